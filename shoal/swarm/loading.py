"""A newcomer's word to the members: how long it still loads the run's state. So the run may wait for it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.swarm.channel import Channel, loop_time
from shoal.swarm.contacts import Contacts
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.newcomers import GATHER_SECONDS, LONGEST_SECONDS, SPARE, SPARE_SECONDS
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.tip import Tip

REPORT_SECONDS = 2.0
LOG_SECONDS = 10.0
RATE_SECONDS = 10.0  # over this time the rate is measured
LEAST_SECONDS = 3.0  # a rate over less time says nothing
WHOLE = 0.99  # of the state's bytes: a little less may be sent than is announced
CATCHES_UP = 0.5  # a newcomer to which a result comes in such a part of an epoch catches up while the run goes on

T = TypeVar("T")
log = logging.getLogger(__name__)


class DoesNotFit(AveragingError):
    """The run does not wait for as long as this peer needs to load the state, and an epoch is shorter than that."""

    again: float

    def __init__(self, text: str, again: float) -> None:
        super().__init__(text)
        self.again = again


class Loading:
    """Tells the members every two seconds how long this peer still loads the state, from its first request for a chunk
    until `close`.

    Args:
        channel: sends the reports.
        contacts: the connections to members.
        peer: this peer.
        result_bytes: the bytes of a round's result if this peer can replay the rounds that follow the state that it
            loads; None if it can't.
        rate: the bytes per second that this peer has received in an earlier download; 0 if that is not known.
        timeout: the time, in seconds, within which a member must answer.

    Attributes:
        rate: the last known one.
        progress: how many bytes have arrived, how many the state has, and how many seconds are left. A number that is
            not known is 0.
    """

    def __init__(
        self, channel: Channel, contacts: Contacts, peer: Peer, result_bytes: float | None, rate: float, timeout: float
    ) -> None:
        self._channel, self._contacts, self._peer, self._timeout = channel, contacts, peer, timeout
        self._result_bytes, self.rate = result_bytes, rate
        self._state: Tip | None = None  # the state that it downloads; None if it is at `Peer.tip`, and replays
        self._nbytes = 0  # of that state
        self._holders: Sequence[PeerID] = ()
        self._coordinator: Sequence[bytes] = ()  # its key, if it is known and no holder of the state
        self._moved: dict[PeerID, int] = {}  # by holder: the bytes that had passed when they were last counted
        self._began = 0.0
        self._passed = 0  # bytes that have passed between this peer and the holders since the download began
        self._samples: deque[tuple[float, int]] = deque()  # (time, bytes that had passed)
        self._pause = msg.Pause()  # the coordinator's last answer in this download
        self._told: Tip | None = None  # where the last report said that this peer will be
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refused: asyncio.Future[DoesNotFit] = asyncio.get_running_loop().create_future()
        self._logged_at = loop_time()
        self.progress = (0, 0, 0.0)

    async def reserve(self, state: Tip, holders: Sequence[PeerID], nbytes: int) -> bool:
        """The download of a state is about to begin. See `Swarm.reserve`."""
        self._begin(state, holders, nbytes)
        return await self._tell()

    def replay(self, holders: Sequence[PeerID]) -> None:
        """This peer is about to replay the rounds that follow its state. `holders` are members that are past it."""
        self._begin(None, holders, 0)
        self._spawn(self._tell())

    def _begin(self, state: Tip | None, holders: Sequence[PeerID], nbytes: int) -> None:
        self._state, self._holders, self._nbytes = state, holders, nbytes
        self._moved, self._passed, self._began, self._pause = {}, 0, loop_time(), msg.Pause()
        self._count()
        self._samples.clear()
        self.progress = (0, nbytes, 0.0)
        self._contacts.losses.news.set()
        if not self._tasks:
            self._spawn(self._keep_telling())

    async def unless_refused(self, download: Coroutine[Any, Any, T]) -> T:
        """Await the download. Raises DoesNotFit, and cancels the download, if it can't lead this peer into the run."""
        task = asyncio.ensure_future(download)
        try:
            either: set[asyncio.Future[Any]] = {task, self._refused}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self._refused.result()
        finally:
            task.cancel()

    def close(self) -> None:
        """This peer is at the state, or has given up."""
        if not self.rate and (passed := self._count()):  # the download was short
            self.rate = passed / (loop_time() - self._began)
        for task in self._tasks:
            task.cancel()
        if self._told not in (None, self._peer.tip):  # nobody has to wait any longer
            self._channel.node.spawn(self._report(msg.Progress(self._told, 0.0, 0.0, loading=True)))
        self._contacts.losses.news.set()

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._spawn(self._tell())  # on a slow line, answers are queued behind chunks

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self._channel.node.spawn(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- how far it is

    def _count(self) -> int:
        """The bytes that have passed between this peer and the holders since the download began. Those that have passed
        on a connection that was lost count as well."""
        for holder in self._holders:
            moved = self._channel.node.transport.moved(holder)
            self._passed += max(0, moved - self._moved.get(holder, moved))
            self._moved[holder] = moved
        return self._passed

    def _rate(self, passed: int) -> float:
        """The bytes per second that arrive at present, or as before if that is not known."""
        now, samples = loop_time(), self._samples
        if passed:  # before the first chunk begins to arrive, nothing is measured
            samples.append((now, passed))
        while samples and now - samples[0][0] > RATE_SECONDS:
            samples.popleft()
        seconds = now - samples[0][0] if samples else 0.0
        if seconds >= LEAST_SECONDS:
            self.rate = (passed - samples[0][1]) / seconds
        return self.rate

    def _ahead(self, state: Tip) -> Tip:
        """The tip at which the members are, if it is ahead of the state, and this peer can get there."""
        best = self._peer.view.best(loop_time())
        return best if self._result_bytes is not None and best is not None and best.outranks(state) else state

    async def _tell(self) -> bool:
        """Tell the holders, and the coordinator, how long it still takes. Returns as `reserve`."""
        state, passed = self._state or self._peer.tip, self._count()
        rate, ahead, epoch = self._rate(passed), self._ahead(state), self._pause.epoch
        left = max(0.0, WHOLE * self._nbytes - passed)
        rounds = (ahead.epoch - state.epoch) * (self._result_bytes or 0.0)
        seconds = min((left + rounds) / rate, msg.NEVER) if rate else 0.0
        one = self._result_bytes / rate if rate and self._result_bytes is not None else math.inf
        asks, replays = one > CATCHES_UP * epoch or seconds <= one, one < epoch
        self.progress = (min(passed, self._nbytes), self._nbytes, seconds)
        moving = rate if left or rounds else 0.0
        self._told = ahead
        report = msg.Progress(ahead, 0.0, moving, seconds=seconds, loading=True, asks=asks, replays=replays)
        answer = await self._report(report)
        self._log(passed, seconds, ahead.epoch - state.epoch)
        if isinstance(answer, msg.Pause):
            self._pause = answer
            if not self._peer.participant.made:
                self._peer.newcomers.adopt(answer.budget, loop_time())
        # The run does not wait, or has gone on, and each epoch would bring less than what one takes.
        is_denied = asks and not self._pause.seconds and answer is not None
        falls_behind = not replays and self._pause.epoch > 0 and self._nbytes > rate * self._pause.epoch
        if is_denied and falls_behind and rate and left and self._state and not self._refused.done():
            self._refused.set_result(refusal(self._nbytes / rate, self._pause))
        return isinstance(answer, msg.Pause) or replays

    async def _report(self, report: msg.Progress) -> msg.Pause | msg.Hello | None:
        """Send a report to all holders, and to the coordinator if it is none of them. Returns the coordinator's answer,
        or HELLO if a member is past that tip."""
        answers = await self._ask_all([*(holder.key for holder in self._holders), *self._coordinator], report)
        named = Counter(one.coordinator for one in answers.values() if isinstance(one, msg.Elsewhere))
        coordinator = max(named, key=lambda member: named[member], default=None)
        if coordinator is not None and coordinator.key not in answers:
            await self._contacts.meet(coordinator)
            self._coordinator = [coordinator.key]  # next time it hears at once: the holders' answers may take long
            answers |= await self._ask_all(self._coordinator, report)
        if coordinator is not None and isinstance(answers[coordinator.key], msg.Count):
            answers = {coordinator.key: answers[coordinator.key]}  # others may claim to coordinate, too
        pauses = [one.pause for one in answers.values() if isinstance(one, msg.Count)]
        if pauses:
            return max(pauses, key=lambda pause: pause.seconds)
        return next((one for one in answers.values() if isinstance(one, msg.Hello)), None)

    async def _ask_all(self, keys: Sequence[bytes], report: msg.Progress) -> dict[bytes, object]:
        once = list(dict.fromkeys(keys))
        return dict(zip(once, await asyncio.gather(*(self._ask(key, report) for key in once)), strict=True))

    async def _ask(self, key: bytes, report: msg.Progress) -> object:
        said = self._peer.view.said(key)
        try:
            answer = (await self._channel.ask(key, report, self._timeout)).body
            if isinstance(answer, msg.Hello):
                self._peer.told(key, self._peer.view.newest(key, answer.tip, said), loop_time())
            return answer
        except (P2PError, TimeoutError) as error:
            log.debug("could not tell %r that this peer loads the state: %s", PeerID(key), error)
            return None

    def _log(self, passed: int, seconds: float, behind: int) -> None:
        if loop_time() - self._logged_at >= LOG_SECONDS:
            self._logged_at = loop_time()
            left = f"{seconds:.0f} s left" if seconds else "at an unknown rate"
            log.info(
                "loading the run's state: %.1f of %.1f MB, %s, %d epochs behind",
                min(passed, self._nbytes) / 1e6, self._nbytes / 1e6, left, behind,
            )  # fmt: skip


def refusal(seconds: float, pause: msg.Pause) -> DoesNotFit:
    """The error for a newcomer whose download takes so many seconds, after that answer of the coordinator."""
    missing = SPARE * seconds + SPARE_SECONDS + GATHER_SECONDS - pause.budget
    fits = pause.share > 0 and seconds < LONGEST_SECONDS
    again = max(1.0, missing / pause.share) if fits else math.inf
    when = f"In {again:.0f} s it may wait for as long" if fits else "It never waits for as long"
    # A health record has the first 160 bytes of it.
    return DoesNotFit(
        f"the state takes {seconds:.0f} s, an epoch {pause.epoch:.1f} s, and the run waits {pause.budget:.0f} s at "
        f"most: a larger wait_for_newcomers or target_batch_size, DiLoCo or load_state_compression helps. {when}",
        again,
    )
