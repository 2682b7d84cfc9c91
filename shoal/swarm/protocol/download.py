"""The plan of a download from several donors: which chunk to ask whom for, and how long to wait. No I/O, no clock, no
torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from shoal.p2p.identity import PeerID

LEAST_PACE = 32 << 10  # bytes a second of a download, all donors together
SLOW_LINE = 2 * LEAST_PACE  # bytes a second of the slowest line on which it has the time to let something whole arrive


class DownloadPlan:
    """Hands out the chunks of one thing to the donors that hold it, until every chunk has arrived with its digest.

    A donor owes at most `window` chunks at a time. If it has sent nothing for `patience` seconds, it is *late*: it is
    asked for nothing more until it answers, and other donors may be asked for its chunks. If it has sent nothing for
    `give_up` seconds, it is dropped. A chunk is never asked of two donors that are not late. A donor that is dropped,
    for whatever reason, is not asked again, and its chunks are asked of others.

    [Note: the least pace]
    A donor that sends, and lets nothing whole arrive or a little now and then, is never silent. So the download has
    `give_up` seconds at first, and more for what arrives whole and right: 1 s for every LEAST_PACE bytes, but at no
    time more than `give_up` seconds ahead. To that is added how long what was asked for takes on a SLOW_LINE, since
    chunks that are sent side by side arrive together. When that time is over, the donor that has brought nothing for
    longest is dropped. So one donor that drips can hold up N bytes for about `give_up` + N / LEAST_PACE seconds,
    however many chunks it makes of them, and an honest line of SLOW_LINE bytes a second is waited for, whatever N is.

    Args:
        digests: of each chunk, by its number.
        sizes: how many bytes of it are sent, by its number.
        donors: in the order in which they are asked first.
        give_up: see above, in seconds.

    Attributes:
        missing: the chunks that are not here yet.
        dropped: the donors that failed, each with its reason.
        chunks_from: how many chunks were taken from each donor.
    """

    window = 4
    max_outstanding = 32  # chunks asked of all donors that are not late: this bounds the receiver's memory
    patience = 5.0

    def __init__(
        self, digests: Sequence[bytes], sizes: Sequence[int], donors: Iterable[PeerID], give_up: float = 20.0
    ) -> None:
        self._digests, self._sizes, self.give_up = digests, sizes, give_up
        self.missing = set(range(len(digests)))
        # Missing chunks that are asked of nobody, or only of late donors.
        self._waiting = deque(range(len(digests)))
        self._asked: dict[PeerID, set[int]] = {donor: set() for donor in donors}
        self._heard: dict[PeerID, float] = {}  # when a donor that owes something last sent, or began to owe
        self._late: set[PeerID] = set()
        self._brought: dict[PeerID, float] = {}  # when each donor last brought something whole, or was asked first
        self._allowed: float | None = None  # until when the download may last, without what was asked for
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

    def is_sending(self, donor: PeerID, now: float) -> None:
        """A part of a chunk has arrived from that donor."""
        self._heard[donor] = now

    def add_donor(self, donor: PeerID) -> None:
        """Another donor holds the same state. A donor that was dropped stays dropped."""
        if donor not in self.dropped:
            self._asked.setdefault(donor, set())

    def next_requests(self, now: float) -> list[tuple[PeerID, int]]:
        """The requests to make now, as (donor, chunk). To be called after every other event, and at `next_check()`."""
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
        """Until when something has to come, see the note."""
        asked = sum(self._sizes[chunk] for owed in self._asked.values() for chunk in owed)
        return (self._allowed or 0.0) + asked / SLOW_LINE

    def received(self, donor: PeerID, chunk: int, digest: bytes, now: float) -> bool:
        """A donor has sent a chunk with this digest. A wrong digest drops the donor. A chunk that this donor was not
        asked for is ignored.

        Returns:
            Whether the chunk is right and new, and so to be kept.
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
            self.donor_failed(
                slowest, f"all send less than {LEAST_PACE >> 10} KiB/s, and it has brought nothing longest"
            )
            self._allowed = now + self.give_up

    def _give_back(self, chunks: set[int]) -> None:
        """Let other donors be asked for these chunks."""
        in_hand = set(self._waiting).union(*(owed for donor, owed in self._asked.items() if donor not in self._late))
        self._waiting.extendleft(sorted((chunks & self.missing) - in_hand, reverse=True))
