"""Counts the epochs and samples of a group of peers, for users who train without `shoal.Optimizer`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn

from blake3 import blake3

from shoal.dht.dht import DHT
from shoal.interrupts import holding, result_of, unbroken
from shoal.membership.holder import Source
from shoal.optim.progress import Refresh, RunProgress
from shoal.optim.run import Run
from shoal.optim.settings import EPOCH, POSITIVE, SAMPLES, Values, fields_of, whole
from shoal.swarm.gates import admit_to
from shoal.swarm.protocol.errors import Behind
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Place

log = logging.getLogger(__name__)

NO_LAYOUT = bytes(32)  # nothing is averaged
PATIENCE = 15.0  # a report waits at most so many seconds for the others' samples, or three of this peer's steps


class ProgressTracker(RunProgress):
    """Counts the samples and the epochs of all peers with the same `prefix`.

    An epoch ends when all peers together have reported `target_batch_size` samples. Then you do what ends an epoch for
    you (average, step and so on), and call `update_epoch`. The first peer that does so begins the next epoch for all.

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

    A peer that only watches does not report, and is not counted.

    While this peer reports nothing, it asks for the progress of others from time to time. While it knows of no peers,
    it asks every `default_refresh_period`. Otherwise it waits eta * peers / expected: `eta` seconds are left of the
    epoch, `peers` take part now, and `expected` may take part by then, as `expected_drift_peers` and
    `expected_drift_rate` say. Answers to reports have the progress, too, and all peers hear of the end of an epoch at
    once.

    Args:
        dht: a started `shoal.DHT`. The tracker does not shut it down.
        prefix: the name of the group, 1 to 90 characters.
        target_batch_size: the number of samples of all peers at which an epoch ends, over 0; the same for all peers.
        client_mode: this peer does not listen for connections. As the DHT when None.
        min_refresh_period: the shortest wait in seconds between two questions.
        max_refresh_period: the longest wait in seconds between two questions.
        default_refresh_period: the wait in seconds while this peer knows of no peers.
        expected_drift_peers: how many peers may come in an epoch, as a number.
        expected_drift_rate: the same as a fraction of the present peers. The larger of the two counts.
        performance_ema_alpha: the weight of the newest measurement in the moving average of samples per second, over 0
            and at most 1.
        status_loglevel: the level of the log lines with the progress.
        metadata_expiration: an option of hivemind, accepted without effect. A peer counts while it is connected.
        private_key: an option of hivemind, accepted without effect. The DHT's identity signs records.
        daemon: an option of hivemind, accepted without effect. The tracker starts no thread or process.
        start: connect now. If False, call `start` later.
        membership: this peer's membership in a closed run (`prefix="name@key"`), see `shoal.Optimizer`. A membership
            that allows only watching is enough for a tracker in client mode that never reports.

    Attributes:
        dht: as given.
        prefix: as given.
        client_mode: as given; never None.

    Raises:
        ValueError: if an argument makes no sense.
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
        membership: Source | None = None,
    ) -> None:
        refresh = Refresh(**fields_of(Refresh, locals()))
        Values("a text of 1 to 90 characters", str, lambda text: 1 <= len(text) <= 90).check("prefix", prefix)
        target_batch_size = POSITIVE.check("target_batch_size", target_batch_size)
        self.dht, self.prefix = dht, prefix
        self.client_mode = dht.client_mode if client_mode is None else client_mode
        self._name = f"{prefix}_progress"
        admit_to(lambda: dht.node, self._name, membership)
        terms = Terms({"target_batch_size": f"{target_batch_size:g}"}, NO_LAYOUT)
        rules = Rules((), matchmaking_time=PATIENCE, round_timeout=PATIENCE, target_samples=float(target_batch_size))
        run = Run(dht, self._name, terms, rules, Place(role=Role.CLIENT if self.client_mode else Role.NODE))
        super().__init__(run, target_batch_size, refresh, alpha=performance_ema_alpha)
        self._lock = threading.Lock()  # held while updates are paused
        self._following: Future[None] | None = None  # from the start on
        if start:
            self.start()

    # -- life

    @holding
    def start(self) -> None:
        """Meet the other peers. Calling it again does nothing."""
        if self._following is None:
            self._run.start()
            super().start()
            self._following = self.dht.reactor.submit(self._follow())

    def is_alive(self) -> bool:
        """Whether the tracker was started and not shut down, and its DHT is alive."""
        return super().is_alive() and self.dht.is_alive()

    @holding
    def shutdown(self, timeout: float | None = None) -> None:
        """Leave the group. The DHT stays. A second call does nothing.

        Args:
            timeout: the longest time in seconds to wait until this peer has left; no limit when None.
        """
        if self.is_alive() and self._following is not None:
            self.stop()
            self._following.cancel()
            with unbroken():
                has_left = self._run.stop(timeout)
            if not has_left:
                log.warning("leaving %s took longer than %s s", self.prefix, timeout)

    # -- what it is told

    @holding
    def report_local_progress(
        self, local_epoch: int, samples_accumulated: float, update_global_samples: bool = True
    ) -> None:
        """Report the samples of this peer in its epoch. Near the end of an epoch, this call waits for the coordinator's
        answer. If the others have the missing samples under way, it waits until these are reported.

        Args:
            local_epoch: the number of this peer's epoch.
            samples_accumulated: the samples of this peer since the epoch began. The number may be smaller than before,
                if this peer has dropped some.
            update_global_samples: with False, this call returns without waiting, and `global_progress` and
                `ready_to_update_epoch` may not include the answer yet.

        Raises:
            AveragingError: if the other peers have another `target_batch_size`.
            RuntimeError: if the tracker is not running.
            ValueError: for another number, with the name of the argument.
        """
        if not self.is_alive():
            raise RuntimeError("this tracker is not running: it was not started, or was shut down")
        epoch = EPOCH.check("local_epoch", local_epoch)
        samples = whole(SAMPLES.check("samples_accumulated", samples_accumulated))
        if epoch != self.local_progress.epoch:
            self._begin(epoch)
        try:
            self.report(samples, at_once=not update_global_samples)
        except Behind as error:
            log.debug("%s", error)

    @holding
    def update_epoch(self, new_epoch: int | None = None) -> int:
        """Begin an epoch, without samples. Call this within `pause_updates`.

        Args:
            new_epoch: the number of the epoch; None for the one after this peer's present epoch.

        Returns:
            The number of the epoch.

        Raises:
            RuntimeError: if it is not called within `pause_updates`.
            ValueError: for another number.
        """
        if not self._lock.locked():
            raise RuntimeError("call update_epoch within `with tracker.pause_updates():`")
        epoch = self.local_progress.epoch + 1 if new_epoch is None else EPOCH.check("new_epoch", new_epoch)
        self._begin(epoch)
        return epoch

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Within this context, only `update_epoch` changes this peer's global epoch, and no time counts as this peer's
        work."""
        with self._lock, self.performance_ema.pause():
            yield
        self.restart_clock()
        self.dht.reactor.submit(self._catch_up())

    def _begin(self, epoch: int) -> None:
        tip = self._tip(epoch)
        with unbroken():
            result_of(self.dht.reactor.submit(self._move_up(tip)))
            self.start_epoch(tip)

    # -- on the reactor

    def _tip(self, epoch: int) -> Tip:
        """The tip of an epoch. A tracker has no state, so the number of the epoch determines its tip."""
        if epoch == 0:
            return Tip.genesis(self._name)
        lineage = blake3(f"shoal progress\0{self._name}\0{epoch}".encode()).digest()
        return Tip(epoch, lineage, float(epoch))

    async def _follow(self) -> None:
        """Stay in the newest epoch that any peer has begun."""
        while True:
            await self._catch_up()
            await self._swarm.news()

    async def _catch_up(self) -> None:
        heard = self._swarm.behind
        if heard is not None and heard == self._tip(heard.epoch) and not self._lock.locked():
            await self._move_up(heard)

    async def _move_up(self, tip: Tip) -> None:
        """Move to this tip, if it is of an epoch after the present one."""
        if tip.outranks(self._swarm.tip):
            self._swarm.move(tip)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a shoal.ProgressTracker is neither copied nor pickled, for it is a peer: make a new one")

    def __repr__(self) -> str:
        return f"shoal.ProgressTracker(prefix={self.prefix!r}, {self.global_progress})"
