"""One member's bookkeeping of a round: which chunks it owes, which have arrived, and which are missing. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from blake3 import blake3

from shoal.p2p.errors import Outrun, Refused
from shoal.swarm.protocol.messages import Begin, Part, Repair, Result, Source
from shoal.swarm.protocol.plan import ChunkSpan

# The most parts that a member has under way to one reducer. The result of a chunk permits the next part, so neither
# side ever has more than this many chunks queued to the other.
WINDOW = 4


class RuleBroken(Refused):
    """A member's message breaks a rule of the protocol; the text says which one."""


class RuleOutrun(RuleBroken, Outrun):
    """A message was right when it was sent, as far as this peer knows: rounds, JOINs and attempts go on meanwhile."""


def require(is_obeyed: bool, rule: str) -> None:
    """Raise RuleBroken if a rule is not obeyed. `rule` says how it is broken."""
    if not is_obeyed:
        raise RuleBroken(rule)


def require_timely(is_timely: bool, rule: str) -> None:
    """Raise RuleOutrun if a message comes too late. `rule` says for what."""
    if not is_timely:
        raise RuleOutrun(rule)


class Book:
    """The chunks of a round, as one member knows them.

    Args:
        me: the member's key.
        begin: the round.
        chunks: its chunk table.

    Attributes:
        keys: the keys of the members, in member order.
        weights: the weight of each member's parts.
        receives: whether each member contributes and receives the average.
        owners: the reducer of each chunk.
        digests: the digest of each averaged chunk; b"" while it is missing.
        missing: the chunks whose averages are missing.
        parts: for each of my chunks, the members whose parts have arrived.
        out: members that have left the round.
        parted: members that this one is parted from: it exchanges nothing with them. It does not wait for their parts,
            and fetches the chunks that they reduce from others.
        plan: the name of the BEGIN or REPAIR that has set `owners`.
        changes: a counter that grows when members leave, or the plan changes.

    "My chunks" are those that this member reduces.
    """

    def __init__(self, me: bytes, begin: Begin, chunks: list[ChunkSpan]) -> None:
        self.me, self.begin, self.chunks, self.plan = me, begin, chunks, begin.round
        self.keys = list(begin.keys)
        self.weights = dict(zip(self.keys, begin.weights, strict=True))
        self.receives = {m.key: m.contributes for m in begin.members}
        if me not in self.receives:  # this peer missed the round, and fetches the result
            self.receives[me], self.weights[me] = True, 0.0
        self.owners = [key for i, key in enumerate(self.keys) for _ in range(begin.starts[i], begin.starts[i + 1])]
        self.digests = [b""] * len(chunks)
        self.missing = set(range(len(chunks))) if self.receives[me] else set()
        self.parts: dict[int, dict[bytes, None]] = {}
        self.out: dict[bytes, None] = {}
        self.parted: dict[bytes, None] = {}
        self._past: dict[bytes, None] = {}  # earlier plans
        self.changes = 0
        # Members whose parts this one waits for: neither out nor parted.
        self._owing = {key: None for key in self.keys if key != me and self.receives[key]}
        self._lacks: dict[int, int] = {}  # for each of my chunks: how many members in `_owing` have not sent their part
        self._reduced: dict[int, None] = {}
        self._weighed: dict[bytes, float] = {}  # the weight of a member's parts, once one has arrived
        self._queues: defaultdict[bytes, deque[int]] = defaultdict(deque)  # parts that are not sent yet, by reducer
        self._under_way: Counter[bytes] = Counter()
        for chunk, owner in enumerate(self.owners):
            self._assign(chunk, owner)

    def _assign(self, chunk: int, owner: bytes) -> None:
        self.owners[chunk] = owner
        if owner == self.me:
            self.parts[chunk] = {}
            self._lacks[chunk] = len(self._owing)
        elif self.receives[self.me] and owner not in self.parted:
            self._queues[owner].append(chunk)

    def knows(self, plan: bytes) -> bool:
        """Whether that is the current plan of this round, or an earlier one."""
        return plan == self.plan or plan in self._past

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

    def result_arrived(self, sender: bytes, chunk: int, plan: bytes) -> bool:
        """A reducer has sent the average of a chunk under `plan`. Returns whether it is needed. Raises RuleBroken if
        the chunk is not the sender's to reduce."""
        if chunk >= len(self.chunks):
            raise RuleBroken(f"a result of chunk {chunk}; the round has {len(self.chunks)}")
        self._under_way[sender] = max(0, self._under_way[sender] - 1)
        if sender in self.parted:
            return False
        if self.owners[chunk] != sender:
            if plan in self._past:
                return False  # it was under way when the chunk was assigned to another reducer
            raise RuleBroken(f"a result of chunk {chunk}, which is not its to reduce")
        return not self.digests[chunk]

    def received(self, chunk: int, digest: bytes) -> None:
        """The average of `chunk` is in place."""
        self.missing.discard(chunk)
        self.digests[chunk] = digest

    # -- as a reducer

    def part_arrived(self, sender: bytes, chunk: int, plan: bytes, weight: float) -> bool:
        """A member's part of one of my chunks has arrived under `plan`. The first part of a member fixes the weight of
        all its parts.

        Returns:
            Whether the part is needed.

        Raises:
            RuleBroken: if the part breaks the rules of the round.
        """
        if sender not in self.weights:
            raise RuleBroken("it is not a member of the round")
        if chunk >= len(self.chunks):
            raise RuleBroken(f"a part of chunk {chunk}; the round has {len(self.chunks)}")
        if sender in self.parted:
            return False
        if chunk not in self.parts:
            if plan in self._past:
                return False  # it was under way when the chunk was assigned to another reducer
            raise RuleBroken(f"chunk {chunk} is not mine to reduce")
        if not self.receives[sender]:
            raise RuleBroken("an auxiliary member contributes nothing")
        if sender in self.parts[chunk]:
            raise RuleBroken(f"chunk {chunk} came twice")
        if weight != self._weighed.setdefault(sender, weight):
            raise RuleBroken(f"chunk {chunk} weighs {weight:g}, and what it sent before {self._weighed[sender]:g}")
        self.weights[sender] = weight
        self.parts[chunk][sender] = None
        if sender in self._owing:
            self._lacks[chunk] -= 1
        return True

    def is_ready(self, chunk: int) -> bool:
        """Whether one of my chunks can be reduced: the parts of all remaining members have arrived."""
        return chunk not in self._reduced and self._lacks.get(chunk) == 0

    def reduced(self, chunk: int) -> None:
        """I have averaged one of my chunks."""
        self._reduced[chunk] = None

    def waiting_for(self) -> dict[bytes, None]:
        """The members that hold up one of my chunks, because their parts are missing."""
        held_up = [self.parts[chunk] for chunk, lacks in self._lacks.items() if lacks and chunk not in self._reduced]
        return {key: None for came in held_up for key in self._owing if key not in came}

    @property
    def awaited(self) -> dict[int, bytes]:
        """The chunks whose averages are missing, and the other members that send them."""
        mine_to_fetch = {self.me, *self.parted}
        return {chunk: self.owners[chunk] for chunk in sorted(self.missing) if self.owners[chunk] not in mine_to_fetch}

    def recipients(self) -> list[bytes]:
        """The members that receive the averages of my chunks."""
        return list(self._owing)

    # -- when somebody leaves

    def put_out(self, keys: Iterable[bytes]) -> list[int]:
        """Continue without these members. Returns my chunks that can be reduced now."""
        self.changes += 1
        for key in keys:
            self.out[key] = None
            self._owes_no_more(key)
            self._under_way.pop(key, None)
        return [chunk for chunk in self.parts if self.is_ready(chunk)]

    def repair(self, repair: Repair) -> tuple[list[Source], list[int]]:
        """Follow a repair, which was checked (`check_repair`).

        Returns:
            The chunks to fetch, and those of my chunks that can be reduced now.
        """
        fetches = []
        self.changes += 1
        self._past[self.plan] = None
        self.plan = repair.plan
        self._part(other for pair in repair.parted if self.me in pair for other in pair if other != self.me)
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

    def _part(self, keys: Iterable[bytes]) -> None:
        """Exchange nothing with these members from now on. Chunks that are not reduced yet are reduced without their
        parts (by `Exchange`)."""
        for key in keys:
            self.parted[key] = None
            self._owes_no_more(key)

    def _owes_no_more(self, key: bytes) -> None:
        """Neither wait for parts of that member nor send parts to it."""
        self._queues.pop(key, None)
        if key in self._owing:
            del self._owing[key]
            for chunk, came in self.parts.items():
                self._lacks[chunk] -= key not in came

    @property
    def lacks_only_parted(self) -> bool:
        """Whether all missing chunks are those that parted members reduce. This member can fetch them from others."""
        theirs = all(self.owners[chunk] in self.parted for chunk in self.missing)
        return bool(self.missing) and theirs and len(self._reduced) == len(self.parts)

    @property
    def complete(self) -> bool:
        """Whether this member has every average. One that receives none must have reduced all of its chunks."""
        return not self.missing if self.receives[self.me] else len(self._reduced) == len(self.parts)

    def root(self) -> bytes:
        """The digest of all chunk digests, 32 bytes; b"" if this member does not receive the result."""
        return root_of(self.digests) if self.receives[self.me] else b""


def check_repair(begin: Begin, repair: Repair) -> None:
    """Raise RuleBroken, with the reason, if a Repair does not fit that round."""
    keys = set(begin.keys)
    require(repair.round == begin.round, "a repair of another round")
    require(repair.ballot.coordinator in begin.leaders, "a repair by a peer that can't coordinate the round")
    require(all(source.chunk < begin.starts[-1] for source in repair.sources), "a repair of chunks that do not exist")
    require(all(source.owner in keys for source in repair.sources), "a repair by peers that are not in the round")
    require(all(len(source.digest) in (0, 32) for source in repair.sources), "a repair with digests of another length")
    pairs = all(one in keys and other in keys and one != other for one, other in repair.parted)
    require(pairs, "a repair that parts peers that are not in the round")


def check_begin(begin: Begin) -> None:
    """Raise RuleBroken, with the reason, if a BEGIN contradicts itself. Call this before any other use of a BEGIN."""
    keys, starts = list(begin.keys), list(begin.starts)
    lengths = {len(keys), len(begin.weights), len(begin.machines), len(begin.states), len(begin.averages)}
    require(bool(keys), "BEGIN without members")
    require(len(lengths) == 1, "BEGIN with lists of unequal length")
    require(keys == sorted(set(keys)), "BEGIN with members out of order")
    divides = len(starts) == len(keys) + 1 and starts[0] == 0 and starts == sorted(starts)
    require(divides, "BEGIN with a plan that does not divide the chunks")


def root_of(digests: Iterable[bytes]) -> bytes:
    """The digest of a whole vector: the blake3 hash of its chunk digests, in order."""
    return blake3(b"".join(digests)).digest()


MAX_EARLY = 64  # early chunks of one member
MAX_EARLY_BYTES = 1 << 28  # early chunks of all members together
TOO_MANY = "too many chunks by a plan that this peer does not have"

Chunk = tuple[bytes, Part | Result, Sequence[memoryview]]


class EarlyChunks:
    """Keeps chunks that belong to a plan (a BEGIN or a Repair) that has not arrived yet."""

    def __init__(self) -> None:
        self._kept: list[Chunk] = []

    def keep(self, peer: bytes, message: Part | Result, buffers: Sequence[memoryview]) -> None:
        """Keep a chunk of `peer`. If all kept chunks take too much memory, drop chunks of the member that has sent the
        most: an honest member sends few.

        Raises:
            RuleBroken: if `peer` itself has sent the most, or too many.
        """
        held = Counter({peer: _size(buffers)})
        for sender, _, kept in self._kept:
            held[sender] += _size(kept)
        require(sum(sender == peer for sender, _, _ in self._kept) < MAX_EARLY, TOO_MANY)
        while held.total() > MAX_EARLY_BYTES:
            most = max(held, key=lambda sender: held[sender])
            require(most != peer, TOO_MANY)
            last = max(i for i, (sender, _, kept) in enumerate(self._kept) if sender == most and kept)
            held[most] -= _size(self._kept.pop(last)[2])
        # Copies, so that early chunks do not occupy the memory into which chunks are received.
        self._kept.append((peer, message, [memoryview(bytearray(buffer)) for buffer in buffers]))

    def take(self, round_id: bytes) -> list[Chunk]:
        """Return the chunks of that round, in order of arrival, and drop all others."""
        kept, self._kept = self._kept, []
        return [chunk for chunk in kept if chunk[1].round == round_id]


def _size(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)
