"""The messages of a run. Every field has a bound; a message that exceeds one is refused before any handler sees it.

| message | from → to | meaning |
|---|---|---|
| Hello ↔ Hello | any ↔ any | here I am, this is my tip, these are the members that I know |
| Progress → Count | member → coordinator | I have so many samples since the tip; all members have so many |
| Call | coordinator → members | the target is reached: join, and wait so long for newcomers |
| Moves | member → coordinator | so many bytes have passed between me and these newcomers |
| Doubt | member → next candidate | the coordinator has missed a deadline; signed |
| TakeOver | next candidate → all | I coordinate this tip; the doubts of most members depose the one before me |
| Join → Joined, Elsewhere or Hello | member → coordinator | my input is ready; you are in, or ask that peer, or we
differ | | Unjoin | member → coordinator | my JOIN is void |
| Begin | coordinator → members | the round begins with these members; each reduces these chunks |
| Part, Result | member ↔ reducer | a chunk (in the buffer) of my input; of the average |
| Waiting | member → members | my user has not allowed this round yet: my silence is no fault |
| Done | member → coordinator | I have every chunk, and this is their digest |
| Orphaned | member → successor | our coordinator is lost: take over |
| Broken | member → coordinator | I can't continue with that peer, because … |
| Survey → Have, Elsewhere or Hello | coordinator → members | these are out; which chunks do you hold? |
| Repair → Follows | coordinator → members | the missing chunks come from these members now |
| Fetch → Result | member → holder | send me that chunk |
| After → Commit | member → member past that state | which round followed it? |
| Digests → Committed | member → holder | I missed that round: what was it? |
| Commit | coordinator → members, passed on | this digest is the result: apply it |
| Abort | coordinator → members | this round ends without a result |
| Leave | member → all | I am leaving the run |
| Ping → Pong | any → any | is your reactor alive, and does our round make progress? |
| Describe → Description | any → any | our tensors differ: which are yours? |

A *term* is an option that must be equal in a run; a *ballot* is one attempt at a round (see `Ballot`).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import cached_property
from typing import Annotated

import msgspec

from shoal.p2p.release import Release, how_to_match
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.rates import Rates
from shoal.swarm.protocol.statements import UNSIGNED, Seal, name_of_statement
from shoal.swarm.protocol.tip import Amount, Ballot, Digest, Tip, Weight
from shoal.swarm.protocol.view import MAX_MEMBERS, Member

PROTOCOL = "7"  # a term: peers with different messages are no members to each other, and the log says so
MAX_CHUNKS = 1 << 14
MAX_DOUBTS = 2 * MAX_MEMBERS
MAX_CHUNK_ELEMENTS = 1 << 20
MAX_OPTIONS = 64
MAX_GATHER_BYTES = 64 << 10
MAX_OPTIONS_BYTES = 1 << 10
MAX_NEWCOMERS = MAX_MEMBERS
NEVER = 1e9  # seconds


class Carries(bytes, Enum):
    """What a named buffer contains: the byte in its name that follows the name of the round."""

    PART = b"P"
    RESULT = b"R"
    FETCHED = b"F"


def name_of(round_id: bytes, carries: Carries, chunk: int) -> bytes:
    """The name of a chunk of a round on its way from one member to another (`Transport.send`)."""
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
Seconds = Annotated[float, msgspec.Meta(ge=0, le=NEVER)]
StepOptions = Annotated[bytes, msgspec.Meta(max_length=MAX_OPTIONS_BYTES)]  # b"" for none


class Terms(msgspec.Struct, array_like=True, frozen=True):
    """What must be equal in a run: options by name, and the hash of the layout that rounds average.

    The releases of Shoal may differ. If the option `protocol` differs, they say which release to install.
    """

    options: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=MAX_OPTIONS)]
    schema: Digest
    release: Release = ""

    def difference(self, theirs: Terms) -> str | None:
        """How other terms differ from these, in words for the peer that has these; None if they are equal. If the
        layouts differ, the peers ask each other which tensor it is (`Describe`)."""
        mine, other = self.options.get("protocol", "nothing"), theirs.options.get("protocol", "nothing")
        if mine != other:  # other options may differ for the same reason
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
    """The sender introduces itself.

    Attributes:
        members: all members that it knows, itself included.
        held: the longest that its trainer has kept its reactor from running lately, in seconds.
    """

    sender: Member
    terms: Terms
    tip: Tip
    members: Members
    held: Seconds = 0.0


class Presence(IntEnum):
    """Where the trainer of a member is. Its thread may train in several runs in turn, and wait in one of them."""

    HERE = 0
    """It makes steps in this run."""
    LENT = 1
    """It waits in another run. The member joins a round that is called, and makes no samples until its next report."""
    AWAY = 2
    """It waits in another run. The member joins no round until its next report."""


class Progress(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The sender reports its samples since the tip.

    Attributes:
        tip: the state that the sender is at.
        samples: how many samples it has accumulated since.
        rate: how many samples it makes per second.
        step, seconds: it begins a step that adds `step` samples and takes `seconds` (0: not known, or no step).
        asks: whether it waits for the answer before it begins that step.
        counted: if False, the report does not count; the sender only wants the answer.
        loading: the sender is a newcomer that loads the run's state, and will be at that tip in `seconds`. It receives
            `rate` bytes per second, or 0 if nothing moves at present. If it `asks`, the round is to wait for it.
        replays: without that wait, it would replay the rounds that it misses.
        presence: where the sender's trainer is. If it is elsewhere, the report has no samples, and earlier ones are
            void.
    """

    tip: Tip
    samples: Weight
    rate: Weight
    step: Weight = 0.0
    seconds: Seconds = 0.0
    asks: bool = False
    counted: bool = True
    loading: bool = False
    presence: Presence = Presence.HERE
    replays: bool = False


class Pause(msgspec.Struct, array_like=True, frozen=True):
    """What a newcomer is told about the run's waits for newcomers. All times are in seconds.

    Attributes:
        seconds: how long the round waits for the newcomer, from now on; 0 if it does not.
        budget: how long the run may wait for newcomers at present.
        share: by how many seconds the budget grows in each second.
        epoch: how long an epoch takes; 0 if that is not known.
    """

    seconds: Seconds = 0.0
    budget: Seconds = 0.0
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    epoch: Seconds = 0.0


class Count(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The answer to Progress: the samples of all members since the tip, as far as the coordinator knows.

    Attributes:
        tip: the state that the round starts from.
        samples, rate: the sums over all members.
        peers: how many members have reported.
        called: whether the round was called.
        under_way: the samples that the others are about to add.
        wait: if it is not 0, a member that `asks` should wait for so many seconds and not begin its step, because the
            others are expected to add the missing samples.
        target: the number of samples at which the round is called; 0 if there is none.
        pause: the answer to a newcomer that loads the state.
    """

    tip: Tip
    samples: Amount
    rate: Amount
    peers: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]
    called: bool
    under_way: Amount = 0.0
    wait: Amount = 0.0
    target: Amount = 0.0
    pause: Pause = Pause()


class Call(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The members have enough samples: join the round. BEGIN may wait for newcomers, for so many more `seconds`; if
    that changes, the members that have joined are told again."""

    tip: Tip
    seconds: Seconds = 0.0


class Join(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The sender's input is ready. Its data for all members (`gather`) is in the buffer.

    Attributes:
        tip: the state that the sender is at.
        sender, terms: as in Hello.
        weight: the weight of the sender's input.
        machine, state, options, loss, average: see `Contribution`.
        attempt: the highest attempt that the sender has followed at this tip.
        patience: how many seconds the sender wants to wait for others.
        view: the fingerprint of the members that the sender knows; b"" if it has just exchanged them with the receiver.
        rates: the rates of the sender's links.
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
    loss: Loss | None = None
    average: MaybeDigest = b""


class Joined(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The answer to Join: the sender has it, and coordinates the round. BEGIN may wait for newcomers, for so many more
    `seconds`."""

    tip: Tip
    seconds: Seconds = 0.0


class Elsewhere(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The sender does not follow: another peer coordinates this tip. `begin` is that peer's BEGIN if the sender is in
    its round."""

    coordinator: Member
    begin: Begin | None = None


class Begin(msgspec.Struct, tag=8, array_like=True, frozen=True, dict=True):
    """The round begins. The gathered data of all members are in the buffer.

    Attributes:
        tip: the state that the round starts from.
        ballot: the attempt, and the coordinator.
        members: the members, in the order in which parts are summed.
        weights, machines, states, averages: of each member, as in its JOIN.
        chunk_elements: the number of elements of a chunk.
        starts: member i reduces the chunks from `starts[i]` up to `starts[i + 1]`.
        with_state: whether the round also averages the members' states (`Rules.vector`).
        timeout: the round ends without a result after this many seconds without progress. It is the coordinator's
            time-out, and holds for all members.
        options: the options with which all members make the optimizer step that follows.
        loss: the mean of the members' losses, weighted by their samples; None if one with samples has given none. That
            step gets it from its closure.
        seal: the coordinator's signature.
    """

    tip: Tip
    ballot: Ballot
    members: Members
    weights: Annotated[tuple[Weight, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    machines: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    states: Annotated[tuple[MaybeDigest, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    averages: Annotated[tuple[MaybeDigest, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    chunk_elements: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_ELEMENTS)]
    starts: Annotated[tuple[Start, ...], msgspec.Meta(max_length=MAX_MEMBERS + 1)]
    with_state: bool
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    options: StepOptions = b""
    loss: Loss | None = None
    seal: Seal = UNSIGNED

    @cached_property
    def round(self) -> bytes:
        """16 bytes that name this round, and its plan."""
        return name_of_statement(self)

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of the members, in member order."""
        return tuple(member.key for member in self.members)

    @property
    def leaders(self) -> tuple[bytes, ...]:
        """The peers that may coordinate the round: the one that begins it need not be a member, but only a member can
        take it over."""
        return self.ballot.coordinator, *self.keys


class Part(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """The sender's input of a chunk, in the buffer. There is no buffer if its weight is zero: then the part only asks
    for the result. `plan` is the name of the BEGIN or Repair that the sender follows. `weight` is the weight of all
    parts of the sender; it may differ from the one in BEGIN."""

    round: Round
    chunk: Chunk
    plan: Round
    weight: Weight


class Result(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The average of a chunk, in the buffer; `plan` as in `Part`."""

    round: Round
    chunk: Chunk
    plan: Round


class Done(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The sender has all chunks. `root` is the hash of their digests; b"" from an auxiliary member, which receives
    none. If the sender `waits`, it lacks only chunks whose reducers it is parted from, and `root` is b""."""

    round: Round
    ballot: Ballot
    root: MaybeDigest
    waits: bool = False


class Broken(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """The sender can't continue with the member `peer`, so the two are parted: at once in the case of a `fault` (the
    member broke a rule). A sender that names itself is put out."""

    round: Round
    peer: Digest
    fault: bool
    reason: ShortText


class Survey(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The members `out` have left the round. The receiver follows this ballot and answers which chunks it holds. A
    successor adds the BEGIN (with the gathered data in the buffer), which may not have reached all members, and the
    doubts of its predecessor."""

    tip: Tip
    round: Round
    ballot: Ballot
    out: Keys
    begin: Begin | None
    doubts: Doubts = ()
    seal: Seal = UNSIGNED


class Have(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The answer to Survey.

    Attributes:
        ballot: the ballot that the sender follows. If it is higher than the survey's, the sender follows another
            coordinator; then all other fields but `follows` are empty.
        digests: the digest of each chunk; b"" for a missing one.
        done: the ballot under which the sender last had all chunks.
        out: the members that coordinators have told the sender are out.
        repair: the repair that the sender follows.
        commit: the commit of the round, if the sender has it.
        follows: with a higher ballot: the survey of the coordinator that the sender follows. Otherwise the last survey
            of another coordinator that it has followed, if any.
    """

    ballot: Ballot
    digests: Annotated[tuple[MaybeDigest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]
    done: Ballot | None
    out: Keys
    repair: Repair | None
    commit: Commit | None
    follows: Survey | None = None


class Source(msgspec.Struct, array_like=True, frozen=True):
    """The new source of a chunk. If `digest` is given, `owner` holds the chunk, and members fetch it there. Otherwise
    `owner` reduces the chunk again."""

    chunk: Chunk
    owner: Digest
    digest: MaybeDigest


class Repair(msgspec.Struct, tag=15, array_like=True, frozen=True, dict=True):
    """The sources of all chunks that do not come from the reducer in BEGIN, and the parted pairs of members. A parted
    pair continues without each other's parts, and fetches each other's results from other members."""

    round: Round
    ballot: Ballot
    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=MAX_CHUNKS)]
    parted: Pairs = ()
    seal: Seal = UNSIGNED

    @cached_property
    def plan(self) -> bytes:
        """16 bytes that name this plan."""
        return name_of_statement(self)


class Fetch(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """Asks the receiver for the average of a chunk. It comes uncompressed, or from the redo log as its reducer has
    encoded it."""

    round: Round
    chunk: Chunk


class Commit(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """The result of the round is the one with digest `root`. `members` were in the round; `view` are the members from
    now on. `coordinator` has decided and signed this; other peers pass it on."""

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
    """The round is over without a result. With `alone`, it is over only for the receiver."""

    round: Round
    reason: ShortText
    alone: bool = False


class Ping(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """Asks whether the receiver's reactor runs, which answers itself. `round` is the round that the sender is in, or
    b"".
    """

    round: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class Pong(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """The answer to Ping: whether the round in it makes progress.

    Attributes:
        knows: whether the sender is in that round or coordinates it. True if Ping names no round.
        signs: how often the sender has seen a round make progress, by the bytes on its own connections.
    """

    knows: bool = True
    signs: Signs = 0


class Digests(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """Asks for the chunk digests of a committed round: the last one, or one in the redo log."""

    round: Round


class Committed(msgspec.Struct, tag=22, array_like=True, frozen=True):
    """The answer to Digests: the round's BEGIN, and the digests of its chunks."""

    begin: Begin
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


class Orphaned(msgspec.Struct, tag=23, array_like=True, frozen=True):
    """The coordinator of this round is lost, and the receiver is to take it over. The gathered data are in the
    buffer."""

    begin: Begin


class Leave(msgspec.Struct, tag=24, array_like=True, frozen=True):
    """The sender leaves the run; its connections may stay."""


class Follows(msgspec.Struct, tag=25, array_like=True, frozen=True):
    """The answer to Repair: the sender follows it."""

    ballot: Ballot


class Unjoin(msgspec.Struct, tag=27, array_like=True, frozen=True):
    """The sender does not wait for the round any more. If the round has not begun, it begins without the sender."""


class Waiting(msgspec.Struct, tag=26, array_like=True, frozen=True):
    """The sender is in that round and alive, but its user has not allowed it to send yet."""

    round: Round


class Describe(msgspec.Struct, tag=28, array_like=True, frozen=True):
    """Asks for the tensors behind the receiver's schema hash, because the sender's hash differs. The sender's `Tensors`
    are in the buffer."""


class Description(msgspec.Struct, tag=29, array_like=True, frozen=True):
    """The answer to Describe: the sender's `Tensors` are in the buffer."""


class Doubt(msgspec.Struct, tag=30, array_like=True, frozen=True):
    """The coordinator `of` has missed a deadline at this tip, as `sender` sees it."""

    tip: Tip
    of: Digest
    sender: Digest
    seal: Seal = UNSIGNED


class Moves(msgspec.Struct, tag=33, array_like=True, frozen=True):
    """For the coordinator of that tip: how many bytes have passed between the sender and each of these newcomers since
    its last such message."""

    tip: Tip
    newcomers: Annotated[tuple[tuple[Digest, Amount], ...], msgspec.Meta(max_length=MAX_NEWCOMERS)]


class TakeOver(msgspec.Struct, tag=31, array_like=True, frozen=True):
    """The sender coordinates this tip, because most members doubt the candidates before it."""

    tip: Tip
    doubts: Doubts


class After(msgspec.Struct, tag=32, array_like=True, frozen=True):
    """Asks which round has followed the state `tip`. The answer is its Commit."""

    tip: Tip


Message = (
    Hello | Progress | Count | Call | Join | Joined | Elsewhere | Begin | Part | Result | Done | Broken | Survey | Have
    | Repair | Fetch | Commit | Abort | Ping | Pong | Digests | Committed | Orphaned | Leave | Follows
    | Waiting | Unjoin | Describe | Description | Doubt | TakeOver | After | Moves
)  # fmt: skip
