"""Which chunk of a state to ask whom for: the plan of a download from several donors. No I/O, no clock, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shoal.p2p.identity import PeerID


class DownloadPlan:
    """Hands out the chunks of one state to the donors that hold it, until every chunk came with the right digest.

    A donor has at most `window` chunks to send at a time. One that sent nothing for `patience` seconds is *late*: it is
    asked for nothing more until it answers, and its chunks may be asked of others; after `give_up` seconds it is
    dropped. Otherwise a chunk is asked of one donor at a time. A donor that is dropped, for whatever reason, is not
    asked again, and what was asked of it goes back.

    Args:
        digests: of each chunk, by its number.
        donors: in the order in which they are asked first.
        window: chunks asked of one donor at a time.
        max_outstanding: chunks asked of all donors that are not late; this bounds the receiver's memory.
        patience, give_up: seconds, see above.

    Attributes:
        dropped: the donors that failed, each with its reason.
        chunks_from: the number of chunks taken from each donor that sent any.
    """

    def __init__(
        self,
        digests: Sequence[bytes],
        donors: Iterable[PeerID],
        *,
        window: int = 4,
        max_outstanding: int = 32,
        patience: float = 5.0,
        give_up: float = 20.0,
    ) -> None:
        self._digests = digests
        self._window = window
        self._max_outstanding = max_outstanding
        self._patience = patience
        self._give_up = give_up
        self._missing = set(range(len(digests)))
        # Missing chunks that are asked of nobody, or only of late donors.
        self._waiting = deque(range(len(digests)))
        self._asked: dict[PeerID, set[int]] = {donor: set() for donor in donors}
        self._heard: dict[PeerID, float] = {}  # when a donor that owes something last sent, or began to owe
        self._late: set[PeerID] = set()
        self.dropped: dict[PeerID, str] = {}
        self.chunks_from: dict[PeerID, int] = {}

    @property
    def done(self) -> bool:
        """Whether every chunk is there."""
        return not self._missing

    @property
    def failed(self) -> bool:
        """Whether chunks are missing and no donor is left."""
        return bool(self._missing) and not self._asked

    @property
    def missing(self) -> int:
        """How many chunks are not there yet."""
        return len(self._missing)

    @property
    def owing(self) -> list[PeerID]:
        """The donors that owe chunks."""
        return [donor for donor, owed in self._asked.items() if owed]

    def is_sending(self, donor: PeerID, now: float) -> None:
        """A part of a chunk has come from that donor: it is not silent."""
        self._heard[donor] = now

    def add_donor(self, donor: PeerID) -> None:
        """Somebody else holds the same state. A donor that was dropped stays dropped."""
        if donor not in self.dropped:
            self._asked.setdefault(donor, set())

    def next_requests(self, now: float) -> list[tuple[PeerID, int]]:
        """What to ask now, as (donor, chunk). Call it after every other event, and at `next_check()`."""
        self._judge_silence(now)
        requests = []
        ready = deque(donor for donor, owed in self._asked.items() if donor not in self._late)
        room = self._max_outstanding - sum(len(self._asked[donor]) for donor in ready)
        while ready and room > 0 and self._waiting:
            donor = ready.popleft()
            owed = self._asked[donor]
            if len(owed) >= self._window:
                continue
            if not owed:
                self._heard[donor] = now
            chunk = self._waiting.popleft()
            owed.add(chunk)
            requests.append((donor, chunk))
            room -= 1
            ready.append(donor)  # one chunk each in turn, so that few chunks still use many donors
        return requests

    def next_check(self) -> float | None:
        """When `next_requests` has to be called even if nothing happens; None if that time is not known."""
        times = [
            self._heard[donor] + (self._give_up if donor in self._late else self._patience)
            for donor, owed in self._asked.items()
            if owed
        ]
        return min(times, default=None)

    def received(self, donor: PeerID, chunk: int, digest: bytes, now: float) -> bool:
        """A donor sent a chunk with this digest. True if it is right and new: the caller keeps it then.

        With a wrong digest the donor is dropped. A chunk that this donor was not asked for counts as nothing.
        """
        owed = self._asked.get(donor, set())
        if chunk not in owed:
            return False
        if digest != self._digests[chunk]:
            self.donor_failed(donor, f"sent chunk {chunk} with a wrong digest")
            return False
        owed.discard(chunk)
        self._heard[donor] = now
        if donor in self._late:
            self._late.discard(donor)
            self._waiting = deque(other for other in self._waiting if other not in owed)
        if chunk not in self._missing:
            return False
        self._missing.discard(chunk)
        if chunk in self._waiting:
            self._waiting.remove(chunk)
        self.chunks_from[donor] = self.chunks_from.get(donor, 0) + 1
        return True

    def donor_failed(self, donor: PeerID, reason: str) -> None:
        """A donor will send nothing more: ask others for what it owes."""
        if donor in self._asked:
            self.dropped[donor] = reason
            self._give_back(donor, self._asked.pop(donor))
            self._late.discard(donor)

    def _judge_silence(self, now: float) -> None:
        for donor, owed in list(self._asked.items()):
            if owed and now >= self._heard[donor] + self._give_up:
                self.donor_failed(donor, f"sent nothing for {self._give_up:g} s")
            elif owed and donor not in self._late and now >= self._heard[donor] + self._patience:
                self._late.add(donor)
                self._give_back(donor, owed)

    def _give_back(self, donor: PeerID, chunks: set[int]) -> None:
        in_hand = set(self._waiting)
        for other, owed in self._asked.items():
            if other != donor and other not in self._late:
                in_hand |= owed
        self._waiting.extendleft(sorted((chunks & self._missing) - in_hand, reverse=True))
