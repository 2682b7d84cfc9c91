"""Counting epochs and samples of a group of peers, for those who train without `shoal.Optimizer`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from blake3 import blake3

from shoal.dht.dht import DHT
from shoal.optim.performance import PerformanceEMA
from shoal.optim.progress import GlobalProgress, LocalProgress, RunProgress
from shoal.optim.refresh import Refresh
from shoal.swarm.directory import DHTDirectory
from shoal.swarm.protocol.errors import Behind
from shoal.swarm.protocol.member import MAX_ADDRESSES, Member, Role
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.swarm import Swarm

log = logging.getLogger(__name__)

NO_LAYOUT = bytes(32)  # nothing is averaged
PATIENCE = 15.0  # seconds that a report waits at most for the others' samples, or three steps of its own


class ProgressTracker:
    """Counts the samples of all peers with the same `prefix`, and the epochs that they make.

    An epoch ends when all peers together have reported `target_batch_size` samples. What happens then is the user's
    affair: whoever has done it calls `update_epoch`, and the first who does so begins the next epoch for all.

    >>> tracker = shoal.ProgressTracker(dht, "my run", target_batch_size=1000)
    >>> epoch = samples = 0
    >>> while True:
    ...     accumulate_gradients(32)
    ...     samples += 32
    ...     tracker.report_local_progress(epoch, samples)
    ...     if tracker.ready_to_update_epoch:
    ...         with tracker.pause_updates():
    ...             average_and_step()
    ...             epoch, samples = tracker.update_epoch(epoch + 1), 0

    A peer that only watches never reports; it is not counted.

    Args:
        dht: this peer's place in the DHT, started. It stays when the tracker is shut down.
        prefix: names the group; up to 90 characters.
        target_batch_size: samples of all peers per epoch; the same for all.
        client_mode: whether this peer can't be dialled; None: as the DHT.
        min_refresh_period, max_refresh_period, default_refresh_period: seconds, see `Refresh`: how often what others
            have is asked for when nothing is reported. Reports are answered with it anyway, and the end of an epoch is
            told to all at once.
        expected_drift_peers, expected_drift_rate: see `Refresh`.
        performance_ema_alpha: weight of the newest measurement in the moving average of samples per second.
        status_loglevel: of the lines that say what all have.
        metadata_expiration, private_key, daemon: the reference's; taken, and without a use here: a peer counts while it
            is connected, the DHT's identity signs, and no thread or process is started.
        start: connect now; otherwise `start` does.

    Raises ValueError for arguments that make no sense; Rejected, in `report_local_progress`, if the other peers have
    another `target_batch_size`.
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        client_mode: bool | None = None,
        min_refresh_period: float = 0.5,
        max_refresh_period: float = 10,
        default_refresh_period: float = 3,
        expected_drift_peers: float = 3,
        expected_drift_rate: float = 0.2,
        performance_ema_alpha: float = 0.1,
        metadata_expiration: float = 60.0,
        status_loglevel: int = logging.DEBUG,
        private_key: object = None,
        daemon: bool = True,
        start: bool = True,
    ) -> None:
        if not isinstance(prefix, str) or not 1 <= len(prefix) <= 90:
            raise ValueError(f"prefix={prefix!r}: give a text of 1 to 90 characters")
        if not isinstance(target_batch_size, int | float) or not 0 < target_batch_size < float("inf"):
            raise ValueError(f"target_batch_size={target_batch_size!r}: give a number of samples over 0")
        self.dht, self.prefix, self.target_batch_size = dht, prefix, target_batch_size
        self.client_mode = dht.client_mode if client_mode is None else client_mode
        refresh = Refresh(
            min_refresh_period,
            max_refresh_period,
            default_refresh_period,
            expected_drift_peers,
            expected_drift_rate,
            status_loglevel,
        )
        self._name = f"{prefix}_progress"
        addresses = () if self.client_mode else tuple(str(address) for address in dht.get_visible_maddrs())
        self._swarm = Swarm(
            dht.node,
            DHTDirectory(dht.dht_node, self._name),
            self._name,
            Member(dht.peer_id.key, addresses[:MAX_ADDRESSES], Role.CLIENT if self.client_mode else Role.NODE),
            Terms({"target_batch_size": f"{target_batch_size:g}"}, NO_LAYOUT),
            Rules(sizes=(), matchmaking_time=PATIENCE, round_timeout=PATIENCE, target_samples=float(target_batch_size)),
        )
        self._progress = RunProgress(
            self._swarm,
            dht.reactor,
            target_batch_size,
            performance_ema_alpha=performance_ema_alpha,
            refresh=refresh,
        )
        self._lock = threading.Lock()  # held while updates are paused
        self._following: asyncio.Task[None] | None = None
        self._started = self._stopped = False
        if start:
            self.start()

    # -- life

    def start(self) -> None:
        """Meet the other peers. Calling it again does nothing."""
        if not self._started:
            self._started = True
            self.dht.reactor.run(self._start())

    def is_alive(self) -> bool:
        """Whether it was started and not shut down."""
        return self._started and not self._stopped and self.dht.is_alive()

    def shutdown(self, timeout: float | None = None) -> None:
        """Leave the group; the DHT stays. Calling it again does nothing.

        Args: timeout: seconds to wait for it at most.
        """
        if self.is_alive():
            self._stopped = True
            try:
                self.dht.reactor.submit(self._stop()).result(timeout)
            except (TimeoutError, CancelledError):
                log.warning("leaving %s took longer than %s s", self.prefix, timeout)

    async def _start(self) -> None:
        try:
            await self._swarm.start()
        except BaseException:  # cancelled, too: who did not start must not stay listed
            self._swarm.stop()
            raise
        self._progress.start()
        self._following = asyncio.create_task(self._follow())

    async def _stop(self) -> None:
        self._progress.stop()
        if self._following is not None:
            self._following.cancel()
        self._swarm.stop()

    # -- what it says

    @property
    def performance_ema(self) -> PerformanceEMA:
        """This peer's speed."""
        return self._progress.performance_ema

    @property
    def local_progress(self) -> LocalProgress:
        """What this peer has reported."""
        return self._progress.local_progress

    @property
    def global_progress(self) -> GlobalProgress:
        """What all peers have, as was last heard."""
        return self._progress.global_progress

    @property
    def global_epoch(self) -> int:
        """The newest epoch that any peer has begun."""
        return self._progress.global_epoch

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the peers have enough samples, or another has begun a later epoch than this peer's."""
        if self.global_epoch != self.local_progress.epoch:
            return self.global_epoch > self.local_progress.epoch
        return self._swarm.called

    @property
    def estimated_next_update_time(self) -> float:
        """When `ready_to_update_epoch` will be so, in seconds of `get_dht_time()`; an estimate, and infinity while
        nobody's speed is known."""
        return self._progress.estimated_next_update_time

    # -- what it is told

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: float, update_global_samples: bool = True
    ) -> None:
        """This peer has so many samples in its epoch. At the end of an epoch this returns when the coordinator has
        answered, and where the others have the missing samples under way, when they are there.

        Args:
            local_epoch: the number of the epoch.
            samples_accumulated: since it began; fewer than before if some were dropped.
            update_global_samples: with False, `global_progress` and `ready_to_update_epoch` do not wait for the answer.

        Raises Rejected if the other peers have another `target_batch_size`, RuntimeError if it is not running.
        """
        if not self.is_alive():
            raise RuntimeError("this tracker is not running: it was not started, or was shut down")
        if local_epoch != self.local_progress.epoch:
            self._begin(local_epoch)
        try:
            self._progress.report_local_progress(samples_accumulated, at_once=not update_global_samples)
        except Behind as error:
            log.debug("%s", error)

    def update_epoch(self, new_epoch: int | None = None) -> int:
        """Begin an epoch, without samples; within `pause_updates`. Returns its number.

        Args: new_epoch: None for the one after this peer's.
        """
        if not self._lock.locked():
            raise RuntimeError("call update_epoch within `with tracker.pause_updates():`")
        epoch = self.local_progress.epoch + 1 if new_epoch is None else new_epoch
        self._begin(epoch)
        return epoch

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Within, the global epoch changes only by `update_epoch`, and no time is counted as this peer's work."""
        with self._lock, self.performance_ema.pause():
            yield
        self._progress.restart_clock()
        self.dht.reactor.submit(self._catch_up())

    def _begin(self, epoch: int) -> None:
        tip = self._tip(epoch)

        async def begin() -> None:
            if tip.outranks(self._swarm.tip):
                self._swarm.move(tip)

        self.dht.reactor.submit(begin()).result()
        self._progress.start_epoch(tip)

    # -- on the reactor

    def _tip(self, epoch: int) -> Tip:
        """There is no state here, so an epoch is named by its number alone."""
        if epoch == 0:
            return Tip.genesis(self._name)
        lineage = blake3(f"shoal progress\0{self._name}\0{epoch}".encode()).digest()
        return Tip(epoch, lineage, float(epoch))

    async def _follow(self) -> None:
        """Be in the newest epoch that any peer has begun."""
        while True:
            await self._catch_up()
            await self._swarm.news()

    async def _catch_up(self) -> None:
        heard = self._swarm.behind
        if heard is not None and heard == self._tip(heard.epoch) and not self._lock.locked():
            self._swarm.move(heard)

    def __repr__(self) -> str:
        return f"shoal.ProgressTracker(prefix={self.prefix!r}, {self.global_progress})"
