"""What the peers of a run say to each other. Every field is bounded; a message that exceeds a bound is refused unread.

| message | from → to | meaning |
|---|---|---|
| Hello ↔ Hello | any ↔ any | here I am, this is my tip, these are the members that I know |
| Progress → Count | member → coordinator | so many samples since the tip; so many have all |
| Call | coordinator → members | the target is reached: join |
| Doubt | member → next candidate | the coordinator has missed a deadline; signed |
| TakeOver | next candidate → all | that one is deposed at this tip: the doubts of most members |
| Join → Joined, Elsewhere or Hello | member → coordinator | my input is ready; you are in, or ask there, or meet |
| Unjoin | member → coordinator | my JOIN is void |
| Begin | coordinator → members | the members, and who reduces which chunks |
| Part, Result | member ↔ reducer | a chunk (in the buffer) of my input; of the average |
| Waiting | member → members | my user has not allowed this round yet: my silence is no fault |
| Done | member → coordinator | I have every chunk, and this is their digest |
| Orphaned | member → successor | our coordinator is lost: take over |
| Broken | member → coordinator | I can't go on with that peer, because … |
| Survey → Have, Elsewhere or Hello | coordinator → members | these are out; which chunks do you hold? or: not in it |
| Repair → Follows | coordinator → members | where the chunks come from that nobody brings any more |
| Fetch → Result | member → holder | send me that chunk |
| Digests → Committed | member → holder | I missed that round: what was it? |
| Commit | coordinator → members, passed on | this digest is the result: apply it |
| Abort | coordinator → members | this round ends without a result |
| Leave | member → all | I am leaving the run |
| Ping → Pong | any → any | is your reactor alive, and does our round get on? |
| Describe → Description | any → any | our tensors differ: which are yours? |
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import Annotated

import msgspec

from shoal.p2p.release import Release, how_to_match
from shoal.swarm.protocol.rates import Rates
from shoal.swarm.protocol.statements import UNSIGNED, Seal, name_of_statement
from shoal.swarm.protocol.tip import Amount, Ballot, Digest, Tip, Weight
from shoal.swarm.protocol.view import MAX_MEMBERS, Member

PROTOCOL = "3"  # a term: peers with other messages hear of it, and are no members to each other
MAX_CHUNKS = 1 << 14
MAX_DOUBTS = 2 * MAX_MEMBERS
MAX_CHUNK_ELEMENTS = 1 << 20
MAX_OPTIONS = 64
MAX_GATHER_BYTES = 64 << 10
MAX_OPTIONS_BYTES = 1 << 10


class Carries(bytes, Enum):
    """What a named buffer is: the byte in its name after the round's."""

    PART = b"P"
    RESULT = b"R"
    FETCHED = b"F"


def name_of(round_id: bytes, carries: Carries, chunk: int) -> bytes:
    """The name under which a chunk of a round passes from one member to another (`Transport.send`)."""
    return round_id + carries.value + chunk.to_bytes(7)


Members = Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Keys = Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Round = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Signs = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Start = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS)]
Chunk = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]
MaybeDigest = Annotated[bytes, msgspec.Meta(max_length=32)]  # b"" for none
Pairs = Annotated[tuple[tuple[Digest, Digest], ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Doubts = Annotated[tuple["Doubt", ...], msgspec.Meta(max_length=MAX_DOUBTS)]
StepOptions = Annotated[bytes, msgspec.Meta(max_length=MAX_OPTIONS_BYTES)]  # b"" for none


class Terms(msgspec.Struct, array_like=True, frozen=True):
    """What must be equal in a run: options by name, and the hash of the layout of what is averaged.

    The release of Shoal may differ. It says what to install where the option `protocol` differs.
    """

    options: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=MAX_OPTIONS)]
    schema: Digest
    release: Release = ""

    def difference(self, theirs: Terms) -> str | None:
        """What differs, in words for the peer that has these terms; None if nothing does. Which tensor it is, where the
        layout differs, the peers ask each other (`Describe`)."""
        mine, other = self.options.get("protocol", "nothing"), theirs.options.get("protocol", "nothing")
        if mine != other:  # which may be why other options differ as well
            return f"protocol is {mine} here, and {other} there; {how_to_match(theirs.release)}"
        for name in sorted({*self.options, *theirs.options}):
            mine, other = self.options.get(name, "nothing"), theirs.options.get(name, "nothing")
            if mine != other:
                return f"{name} is {mine} here, and {other} there"
        if self.schema != theirs.schema:
            mine, other = self.schema.hex()[:16], theirs.schema.hex()[:16]
            return f"the schema hash is {mine} here, and {other} there: number, order, shape or dtype of tensors differ"
        return None


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """`members` is all that the sender knows, itself included."""

    sender: Member
    terms: Terms
    tip: Tip
    members: Members


class Progress(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Samples accumulated since the tip, and how many the sender makes per second. It begins a step that adds `step`
    samples and takes `seconds` (0: not known, or none); if it `asks`, it waits for the answer first. One that is not
    `counted` only wants the answer. One that is `loading` downloads the state of that tip, and asks to be awaited."""

    tip: Tip
    samples: Weight
    rate: Weight
    step: Weight = 0.0
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    asks: bool = False
    counted: bool = True
    loading: bool = False


class Count(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """What all members together have accumulated since the tip, as far as the coordinator knows; `under_way` is what
    the others are about to add. If `wait` is not 0, one that asks should not begin a step: the others are counted on
    for the rest, for so many seconds. The round is called at `target`."""

    tip: Tip
    samples: Amount
    rate: Amount
    peers: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]
    called: bool
    under_way: Amount = 0.0
    wait: Amount = 0.0
    target: Amount = 0.0


class Call(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The members have enough samples: a round is due."""

    tip: Tip


class Join(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The sender's input is ready. What it wants to tell the others (`gather`) is in the buffer.

    `machine` names everything on which the bits of a local step depend; `attempt` is the highest that the sender has
    followed; `patience` is how many seconds it wants to wait for others; `view` is the fingerprint of the members that
    it knows, or b"" if it has just told them; `options` are those with which it would make the step that follows;
    `rates` are those of its links.
    """

    tip: Tip
    sender: Member
    terms: Terms
    weight: Weight
    machine: ShortText
    state: MaybeDigest
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 52)]
    patience: Annotated[float, msgspec.Meta(ge=0, le=86400)]
    view: MaybeDigest
    options: StepOptions = b""
    rates: Rates = Rates()


class Joined(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The coordinator has the sender's Join."""

    tip: Tip


class Elsewhere(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Not here: the coordinator for this tip is another. `begin` is its BEGIN, if the sender is in its round."""

    coordinator: Member
    begin: Begin | None = None


class Begin(msgspec.Struct, tag=8, array_like=True, frozen=True, dict=True):
    """The round. `members` are in the order in which parts are summed; member i reduces the chunks from `starts[i]`
    up to `starts[i + 1]`, each of `chunk_elements` elements; what they gathered is in the buffer. `with_state`: the
    members' states are averaged in this round too (`Rules.vector`). `timeout`: the round ends without a result when it
    has not got on for so many seconds; that of whoever coordinates, for all members. `options`: with which all make the
    step that follows."""

    tip: Tip
    ballot: Ballot
    members: Members
    weights: Annotated[tuple[Weight, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    machines: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    states: Annotated[tuple[MaybeDigest, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    chunk_elements: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_ELEMENTS)]
    starts: Annotated[tuple[Start, ...], msgspec.Meta(max_length=MAX_MEMBERS + 1)]
    with_state: bool
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    options: StepOptions = b""
    seal: Seal = UNSIGNED

    @cached_property
    def round(self) -> bytes:
        """16 bytes that name this round, and its plan."""
        return name_of_statement(self)


class Part(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """The sender's input of that chunk; no buffer if its weight is zero (it only asks for the result). `plan` names
    the BEGIN or the Repair by which the sender knows who reduces what; `weight` is that of all its parts, and
    may be another than in BEGIN."""

    round: Round
    chunk: Chunk
    plan: Round
    weight: Weight


class Result(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The average of that chunk; `plan` as in `Part`."""

    round: Round
    chunk: Chunk
    plan: Round


class Done(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The sender has all chunks; `root` is the hash of their digests (b"" from an auxiliary, which has none). If it
    `waits`, it lacks those that members reduce from whom it is parted, and `root` is b""."""

    round: Round
    ballot: Ballot
    root: MaybeDigest
    waits: bool = False


class Broken(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """The sender can't go on with that member: the two are parted, at once if there was a `fault` (it broke a rule). A
    peer that says so of itself is out."""

    round: Round
    peer: Digest
    fault: bool
    reason: ShortText


class Survey(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The members `out` have left the round; follow this ballot, and tell what you hold. A successor adds the BEGIN
    (and what was gathered, in the buffer), which may not have reached everybody, and the doubts of its predecessor."""

    tip: Tip
    round: Round
    ballot: Ballot
    out: Keys
    begin: Begin | None
    doubts: Doubts = ()
    seal: Seal = UNSIGNED


class Have(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The digest of each chunk (b"" if missing), the ballot under which the sender last was complete, the members that
    it was told are out, the repair that it follows, and the commit if it has one. If `ballot` is higher than the
    survey's, the sender follows another coordinator, whose survey is in `follows`, and answers nothing else. Otherwise
    `follows` is the last survey of another coordinator that it has followed, if there was one."""

    ballot: Ballot
    digests: Annotated[tuple[MaybeDigest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]
    done: Ballot | None
    out: Keys
    repair: Repair | None
    commit: Commit | None
    follows: Survey | None = None


class Source(msgspec.Struct, array_like=True, frozen=True):
    """Where a chunk comes from now: fetched from `owner` if `digest` is given, else reduced again by it."""

    chunk: Chunk
    owner: Digest
    digest: MaybeDigest


class Repair(msgspec.Struct, tag=15, array_like=True, frozen=True, dict=True):
    """Every chunk that does not come from the reducer that BEGIN named, and the pairs of members that are parted: they
    go on without each other's parts, and fetch each other's results from others."""

    round: Round
    ballot: Ballot
    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=MAX_CHUNKS)]
    parted: Pairs = ()
    seal: Seal = UNSIGNED

    @cached_property
    def plan(self) -> bytes:
        """16 bytes that name who brings what from here on."""
        return name_of_statement(self)


class Fetch(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """Asks for the average of a chunk as the receiver holds it, uncompressed."""

    round: Round
    chunk: Chunk


class Commit(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """The result of the round is the one with digest `root`; `view` are the members from here on; `members` were in
    it. `coordinator` has decided and signed that; others pass it on."""

    tip: Tip
    round: Round
    root: Digest
    samples: Amount
    members: Keys
    view: Members
    coordinator: Digest = bytes(32)
    seal: Seal = UNSIGNED

    @property
    def next_tip(self) -> Tip:
        """The state that the round leads to. Two rounds may commit equal digests; the round's name tells the states
        apart."""
        return self.tip.after(self.round + self.root, self.samples)


class Abort(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """The round, or the receiver's part in it `alone`, is over without a result."""

    round: Round
    reason: ShortText
    alone: bool = False


class Ping(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """Answered by the reactor itself, so an answer shows that it runs. `round`: in which the sender is, or b""."""

    round: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class Pong(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """The answer to Ping: how the round that it names gets on.

    Attributes:
        knows: whether the sender is in that round, or coordinates it; or none was named.
        signs: how often the sender has seen the round get on, by bytes of its own.
    """

    knows: bool = True
    signs: Signs = 0


class Digests(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """Asks for the chunk digests of the last committed round, if it is `round`."""

    round: Round


class Committed(msgspec.Struct, tag=22, array_like=True, frozen=True):
    """The answer to Digests: the round's BEGIN, and the digests of its chunks."""

    begin: Begin
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


class Orphaned(msgspec.Struct, tag=23, array_like=True, frozen=True):
    """The coordinator of this round is lost, and the receiver is the next; what was gathered is in the buffer."""

    begin: Begin


class Leave(msgspec.Struct, tag=24, array_like=True, frozen=True):
    """The sender leaves the run; its connections may stay."""


class Follows(msgspec.Struct, tag=25, array_like=True, frozen=True):
    """The answer to Repair: the sender goes by it."""

    ballot: Ballot


class Unjoin(msgspec.Struct, tag=27, array_like=True, frozen=True):
    """The sender has given up waiting for a round: one that has not begun is to begin without it."""


class Waiting(msgspec.Struct, tag=26, array_like=True, frozen=True):
    """The sender is in that round and well, but its user has not allowed it to send yet."""

    round: Round


class Describe(msgspec.Struct, tag=28, array_like=True, frozen=True):
    """Asks for the tensors behind the schema hash in the receiver's terms, since the sender has another; the sender's
    `Tensors` are in the buffer."""


class Description(msgspec.Struct, tag=29, array_like=True, frozen=True):
    """The answer to Describe: the sender's `Tensors` are in the buffer."""


class Doubt(msgspec.Struct, tag=30, array_like=True, frozen=True):
    """The coordinator `of` has missed a deadline at this tip, as `sender` sees it."""

    tip: Tip
    of: Digest
    sender: Digest
    seal: Seal = UNSIGNED


class TakeOver(msgspec.Struct, tag=31, array_like=True, frozen=True):
    """The sender coordinates this tip: most members doubt those that come before it."""

    tip: Tip
    doubts: Doubts


Message = (
    Hello | Progress | Count | Call | Join | Joined | Elsewhere | Begin | Part | Result | Done | Broken | Survey | Have
    | Repair | Fetch | Commit | Abort | Ping | Pong | Digests | Committed | Orphaned | Leave | Follows
    | Waiting | Unjoin | Describe | Description | Doubt | TakeOver
)  # fmt: skip
