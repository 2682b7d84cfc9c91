"""The plan of a download from several donors: which donor to ask for which chunk, and how long to wait. No I/O, no
clock, no torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from shoal.p2p.identity import PeerID

LEAST_PACE = 32 << 10  # bytes per second that a download must make, all donors together
SLOW_LINE = 2 * LEAST_PACE  # bytes per second of the slowest line over which a download succeeds


class DownloadPlan:
    """Asks the donors of a state or a result for its chunks, until every chunk has arrived with its digest.

    A donor owes at most `window` chunks at a time. If it has sent nothing for `patience` seconds, it is *late*: it is
    not asked for further chunks until it answers, and other donors may be asked for its chunks. If it has sent nothing
    for `give_up` seconds, it is dropped: it is not asked again, and others are asked for its chunks. Of the donors that
    are asked for one chunk, at most one is not late.

    [Note: the least pace]
    A donor that sends bytes very slowly is never silent, but its chunks hardly ever complete. So the download as a
    whole has a deadline. It starts `give_up` seconds ahead. Every LEAST_PACE bytes of complete and correct chunks move
    it by 1 s, but never to more than `give_up` seconds ahead. The time that the requested chunks need on a SLOW_LINE is
    added, since chunks that are sent at the same time complete together. At the deadline, the donor whose last complete
    chunk is the oldest is dropped. So one malicious donor can hold up a download of N bytes for about `give_up` + N /
    LEAST_PACE seconds, however many chunks there are. And a donor whose line carries SLOW_LINE bytes per second is
    never dropped, whatever N is.

    Args:
        digests: the digest of each chunk, by its number.
        sizes: the size of each chunk as it is sent, in bytes, by its number.
        donors: the donors, in the order in which they are asked first.
        give_up: see above, in seconds; 20 by default.
        have: the chunks that need not be downloaded.

    Attributes:
        missing: the chunks that have not arrived yet.
        dropped: the donors that failed, each with its reason.
        chunks_from: how many chunks were taken from each donor.
    """

    window = 4
    max_outstanding = 32  # chunks that donors that are not late owe together; this bounds the receiver's memory
    patience = 5.0

    def __init__(
        self,
        digests: Sequence[bytes],
        sizes: Sequence[int],
        donors: Iterable[PeerID],
        give_up: float = 20.0,
        have: Iterable[int] = (),
    ) -> None:
        self._digests, self._sizes, self.give_up = digests, sizes, give_up
        self.missing = set(range(len(digests))).difference(have)
        # Missing chunks that no donor was asked for, or only late ones.
        self._waiting = deque(sorted(self.missing))
        self._asked: dict[PeerID, set[int]] = {donor: set() for donor in donors}
        self._heard: dict[PeerID, float] = {}  # when a donor that owes something last sent, or began to owe
        self._late: set[PeerID] = set()
        self._brought: dict[PeerID, float] = {}  # when a donor last sent a complete chunk, or began to owe one
        self._allowed: float | None = None  # the deadline, without the time for the requested chunks
        self.dropped: dict[PeerID, str] = {}
        self.chunks_from: Counter[PeerID] = Counter()

    @property
    def failed(self) -> bool:
        """Whether chunks are missing and no donor is left."""
        return bool(self.missing) and not self._asked

    @property
    def owing(self) -> list[PeerID]:
        """The donors that owe chunks."""
        return [donor for donor, owed in self._asked.items() if owed]

    def stood_still(self, now: float) -> None:
        """This process was stopped, so it has read nothing meanwhile. No donor was silent."""
        for donor in self.owing:
            self._heard[donor] = self._brought[donor] = now
        self._allowed = None

    def is_sending(self, donor: PeerID, now: float) -> None:
        """A part of a chunk has arrived from that donor."""
        self._heard[donor] = now

    def add_donor(self, donor: PeerID) -> None:
        """Another donor holds the same state. A donor that was dropped stays dropped."""
        if donor not in self.dropped:
            self._asked.setdefault(donor, set())

    def next_requests(self, now: float) -> list[tuple[PeerID, int]]:
        """The requests to make now, as (donor, chunk). Called after every other event, and at `next_check()`."""
        if self._allowed is None:
            self._allowed = now + self.give_up
        self._judge_silence(now)
        requests: list[tuple[PeerID, int]] = []
        ready = deque(donor for donor, owed in self._asked.items() if donor not in self._late)
        room = self.max_outstanding - sum(len(self._asked[donor]) for donor in ready)
        while ready and len(requests) < room and self._waiting:
            donor = ready.popleft()
            owed = self._asked[donor]
            if len(owed) >= self.window:
                continue
            if not owed:
                self._heard[donor] = self._brought[donor] = now
            owed.add(self._waiting[0])
            requests.append((donor, self._waiting.popleft()))
            ready.append(donor)  # each donor takes one chunk in turn, so that few chunks still use many donors
        return requests

    def next_check(self) -> float | None:
        """When `next_requests` must be called even if nothing happens; None if that time is not known."""
        patience = {donor: self.give_up if donor in self._late else self.patience for donor in self.owing}
        checks = [self._heard[donor] + seconds for donor, seconds in patience.items()]
        return min((*checks, self._until())) if checks else None

    def _until(self) -> float:
        """The deadline of the download, see the note."""
        asked = sum(self._sizes[chunk] for owed in self._asked.values() for chunk in owed)
        return (self._allowed or 0.0) + asked / SLOW_LINE

    def received(self, donor: PeerID, chunk: int, digest: bytes, now: float) -> bool:
        """A donor has sent a chunk with this digest. A wrong digest drops the donor. A chunk that this donor was not
        asked for is ignored.

        Returns:
            Whether the chunk is correct and new. If so, the caller keeps it.
        """
        owed = self._asked.get(donor, set())
        if chunk not in owed:
            return False
        if digest != self._digests[chunk]:
            self.donor_failed(donor, f"sent chunk {chunk} with a wrong digest")
            return False
        owed.discard(chunk)
        self._heard[donor] = self._brought[donor] = now
        if self._allowed is not None:
            self._allowed = min(self._allowed + self._sizes[chunk] / LEAST_PACE, now + self.give_up)
        if donor in self._late:
            self._late.discard(donor)
            self._waiting = deque(other for other in self._waiting if other not in owed)
        if chunk not in self.missing:
            return False
        self.missing.discard(chunk)
        if chunk in self._waiting:
            self._waiting.remove(chunk)
        self.chunks_from[donor] += 1
        return True

    def donor_failed(self, donor: PeerID, reason: str) -> None:
        """A donor will send nothing more: others are asked for its chunks."""
        if donor in self._asked:
            self.dropped[donor] = reason
            self._late.discard(donor)
            self._give_back(self._asked.pop(donor))

    def _judge_silence(self, now: float) -> None:
        for donor in self.owing:
            if now >= self._heard[donor] + self.give_up:
                self.donor_failed(donor, f"sent nothing for {self.give_up:g} s")
            elif donor not in self._late and now >= self._heard[donor] + self.patience:
                self._late.add(donor)
                self._give_back(self._asked[donor])
        if self.owing and now >= self._until():
            slowest = min(self.owing, key=lambda donor: self._brought[donor])
            pace = f"all together send less than {LEAST_PACE >> 10} KiB/s"
            self.donor_failed(slowest, f"{pace}, and its last whole chunk is the oldest")
            self._allowed = now + self.give_up

    def _give_back(self, chunks: set[int]) -> None:
        """Let other donors be asked for these chunks."""
        in_hand = set(self._waiting).union(*(owed for donor, owed in self._asked.items() if donor not in self._late))
        self._waiting.extendleft(sorted((chunks & self.missing) - in_hand, reverse=True))
