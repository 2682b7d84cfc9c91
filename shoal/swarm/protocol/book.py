"""One member's bookkeeping of a round: which chunk is owed to whom, what has come, what is missing. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from blake3 import blake3

from shoal.p2p.errors import Refused
from shoal.swarm.protocol.messages import Begin, Part, Repair, Result, Source
from shoal.swarm.protocol.plan import ChunkSpan
from shoal.swarm.protocol.tip import Ballot

# Parts that a member has under way to one reducer. A chunk's result is also the credit for the next part, so neither
# side ever has more than this many chunks queued to the other.
WINDOW = 4


class RuleBroken(Refused):
    """What a member sent does not belong there; the text says why."""


def require(is_obeyed: bool, rule: str) -> None:
    """Raises RuleBroken if that rule is not obeyed; the text says how it is broken."""
    if not is_obeyed:
        raise RuleBroken(rule)


class Book:
    """The chunks of a round, as one member knows them.

    Args:
        me: the member's key.
        begin: the round.
        chunks: its chunk table.

    Attributes:
        keys: the members, in their order.
        weights: what the parts of each member weigh.
        receives: whether each member contributes and receives the average.
        owners: who reduces each chunk.
        digests: of the averaged chunks; b"" while one is missing.
        missing: the chunks whose averages are missing.
        parts: of each of my chunks, whose part has come.
        out: members that have left the round.
        plan: the ballot under which `owners` stands.
    """

    def __init__(self, me: bytes, begin: Begin, chunks: list[ChunkSpan]) -> None:
        self.me, self.begin, self.chunks, self.plan = me, begin, chunks, begin.ballot
        self.keys = [member.key for member in begin.members]
        self.weights = dict(zip(self.keys, begin.weights, strict=True))
        self.receives = {m.key: m.contributes for m in begin.members}
        if me not in self.receives:  # it missed the round, and fetches the result
            self.receives[me], self.weights[me] = True, 0.0
        self.owners = [key for i, key in enumerate(self.keys) for _ in range(begin.starts[i], begin.starts[i + 1])]
        self.digests = [b""] * len(chunks)
        self.missing = set(range(len(chunks))) if self.receives[me] else set()
        self.parts: dict[int, dict[bytes, None]] = {}
        self.out: dict[bytes, None] = {}
        self._reduced: dict[int, None] = {}
        self._weighed: dict[bytes, float] = {}  # what a member's parts weigh, once one has come
        self._queues: defaultdict[bytes, deque[int]] = defaultdict(deque)  # parts that are not sent yet, by reducer
        self._under_way: Counter[bytes] = Counter()
        for chunk, owner in enumerate(self.owners):
            self._assign(chunk, owner)

    def _assign(self, chunk: int, owner: bytes) -> None:
        self.owners[chunk] = owner
        if owner == self.me:
            self.parts[chunk] = {}
        elif self.receives[self.me]:
            self._queues[owner].append(chunk)

    # -- as a sender

    def next_parts(self) -> list[tuple[bytes, int]]:
        """The parts that may be sent now, as (reducer, chunk), taking turns between reducers."""
        parts: list[tuple[bytes, int]] = []
        # Start after this member in the order, so that members do not all send to the same reducer first.
        mine = self.keys.index(self.me)
        order = [key for key in self.keys[mine:] + self.keys[:mine] if self._queues.get(key)]
        while order:
            for owner in list(order):
                if not self._queues[owner] or self._under_way[owner] >= WINDOW:
                    order.remove(owner)
                    continue
                self._under_way[owner] += 1
                parts.append((owner, self._queues[owner].popleft()))
        return parts

    def result_arrived(self, sender: bytes, chunk: int, plan: Ballot) -> bool:
        """A reducer has sent the average of a chunk under `plan`. Returns whether it is needed. Raises RuleBroken if
        the chunk is not the sender's to reduce."""
        if chunk >= len(self.chunks):
            raise RuleBroken(f"a result of chunk {chunk}; the round has {len(self.chunks)}")
        self._under_way[sender] = max(0, self._under_way[sender] - 1)
        if self.owners[chunk] != sender:
            if plan < self.plan:
                return False  # on its way when the chunk was given to another
            raise RuleBroken(f"a result of chunk {chunk}, which is not its to reduce")
        return not self.digests[chunk]

    def received(self, chunk: int, digest: bytes) -> None:
        """The average of `chunk` is in place."""
        self.missing.discard(chunk)
        self.digests[chunk] = digest

    # -- as a reducer

    def part_arrived(self, sender: bytes, chunk: int, plan: Ballot, weight: float) -> bool:
        """A member's part of one of my chunks has arrived under `plan`. Returns whether it is needed. Raises RuleBroken
        if it does not belong here. The first part of a member fixes the weight of all of them."""
        if sender not in self.weights:
            raise RuleBroken("it is not a member of the round")
        if chunk >= len(self.chunks):
            raise RuleBroken(f"a part of chunk {chunk}; the round has {len(self.chunks)}")
        if chunk not in self.parts:
            if plan < self.plan:
                return False  # on its way when the chunk was given to another
            raise RuleBroken(f"chunk {chunk} is not mine to reduce")
        if not self.receives[sender]:
            raise RuleBroken("an auxiliary member contributes nothing")
        if sender in self.parts[chunk]:
            raise RuleBroken(f"chunk {chunk} came twice")
        if weight != self._weighed.setdefault(sender, weight):
            raise RuleBroken(f"chunk {chunk} weighs {weight:g}, and what it sent before {self._weighed[sender]:g}")
        self.weights[sender] = weight
        self.parts[chunk][sender] = None
        return True

    def is_ready(self, chunk: int) -> bool:
        """Whether my chunk can be reduced: the parts of all remaining members have arrived."""
        return chunk in self.parts and chunk not in self._reduced and not any(self._lacking(chunk))

    def _lacking(self, chunk: int) -> Iterator[bytes]:
        """The remaining members whose parts of my chunk are missing."""
        came = self.parts[chunk]
        owing = (key for key in self.keys if key != self.me and key not in self.out and self.receives[key])
        return (key for key in owing if key not in came)

    def reduced(self, chunk: int) -> None:
        """I have averaged one of my chunks."""
        self._reduced[chunk] = None

    def waiting_for(self) -> dict[bytes, None]:
        """The members that hold up a chunk which I reduce: their parts are missing."""
        unreduced = (chunk for chunk in self.parts if chunk not in self._reduced)
        return {key: None for chunk in unreduced for key in self._lacking(chunk)}

    @property
    def awaited(self) -> dict[int, bytes]:
        """The chunks whose averages are missing, and the other members that send them."""
        return {chunk: self.owners[chunk] for chunk in sorted(self.missing) if self.owners[chunk] != self.me}

    # -- when somebody leaves

    def put_out(self, keys: Iterable[bytes]) -> list[int]:
        """Continue without these members. Returns my chunks that can be reduced now."""
        for key in keys:
            self.out[key] = None
            self._queues.pop(key, None)
            self._under_way.pop(key, None)
        return [chunk for chunk in self.parts if self.is_ready(chunk)]

    def repair(self, repair: Repair) -> tuple[list[Source], list[int]]:
        """Follow a repair of chunks that exist. Returns those to fetch, and my new ones that can be reduced now."""
        fetches = []
        self.plan = repair.ballot
        for source in repair.sources:
            chunk, owner = source.chunk, source.owner
            if source.digest:
                self.owners[chunk] = owner
                if self.digests[chunk] != source.digest and self.receives[self.me]:
                    self.digests[chunk] = b""
                    self.missing.add(chunk)
                    fetches.append(source)
            elif self.owners[chunk] != owner:
                self._assign(chunk, owner)
        return fetches, [chunk for chunk in self.parts if self.is_ready(chunk)]

    @property
    def complete(self) -> bool:
        """Whether this member has every average, or, if it receives none, has reduced all of its chunks."""
        return not self.missing if self.receives[self.me] else len(self._reduced) == len(self.parts)

    def root(self) -> bytes:
        """The digest of all chunk digests, 32 bytes; b"" of a member that does not receive the result."""
        return root_of(self.digests) if self.receives[self.me] else b""


def check_begin(begin: Begin) -> None:
    """Raises RuleBroken, with the reason, for a BEGIN that contradicts itself: nothing opens one unchecked."""
    keys, starts = [member.key for member in begin.members], list(begin.starts)
    lengths = {len(keys), len(begin.weights), len(begin.machines), len(begin.states)}
    require(bool(keys), "BEGIN without members")
    require(len(lengths) == 1, "BEGIN with lists of unequal length")
    require(keys == sorted(set(keys)), "BEGIN with members out of order")
    divides = len(starts) == len(keys) + 1 and starts[0] == 0 and starts == sorted(starts)
    require(divides, "BEGIN with a plan that does not divide the chunks")


def root_of(digests: Iterable[bytes]) -> bytes:
    """The digest of a whole vector: the blake3 hash of its chunk digests, in order."""
    return blake3(b"".join(digests)).digest()


MAX_EARLY = 64  # of one member
MAX_EARLY_BYTES = 1 << 28  # of all members together

Chunk = tuple[bytes, Part | Result, Sequence[memoryview]]


class EarlyChunks:
    """Keeps chunks by a plan (a BEGIN or a Repair) that has not come yet."""

    def __init__(self) -> None:
        self._kept: list[Chunk] = []

    def keep(self, peer: bytes, message: Part | Result, buffers: Sequence[memoryview]) -> None:
        """Raises RuleBroken if they are too many, or too large."""
        nbytes = sum(buffer.nbytes for _, _, held in [*self._kept, (peer, message, buffers)] for buffer in held)
        fits = sum(sender == peer for sender, _, _ in self._kept) < MAX_EARLY and nbytes <= MAX_EARLY_BYTES
        require(fits, "too many chunks by a plan that this peer does not have")
        # Copies, since these must not take the memory in which chunks come for as long as that lasts.
        self._kept.append((peer, message, [memoryview(bytearray(buffer)) for buffer in buffers]))

    def take(self, round_id: bytes) -> list[Chunk]:
        """The chunks of that round, in the order in which they came; the others belong nowhere any more."""
        kept, self._kept = self._kept, []
        return [chunk for chunk in kept if chunk[1].round == round_id]
