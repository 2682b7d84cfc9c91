"""What comes from the network is a message within its bounds, or refused: unread, and without any other effect."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.p2p.multiaddr import MAX_LENGTH
from shoal.p2p.node import Envelope
from shoal.swarm.protocol.loss import Loss, LossKind
from shoal.swarm.protocol.messages import (
    MAX_CHUNK_ELEMENTS,
    MAX_CHUNKS,
    MAX_OPTIONS,
    Abort,
    After,
    Begin,
    Broken,
    Call,
    Commit,
    Committed,
    Describe,
    Description,
    Digests,
    Done,
    Doubt,
    Elsewhere,
    Fetch,
    Follows,
    Have,
    Hello,
    Join,
    Joined,
    Leave,
    Message,
    Orphaned,
    Part,
    Ping,
    Pong,
    Progress,
    Repair,
    Result,
    Source,
    Survey,
    TakeOver,
    Terms,
    Unjoin,
    Waiting,
)
from shoal.swarm.protocol.rates import MAX_SLOW
from shoal.swarm.protocol.tip import Ballot, Tip
from shoal.swarm.protocol.view import MAX_ADDRESSES, MAX_MEMBERS, Member, Role
from shoal.transfer.donor import transfer_service
from tests.swarm.rounds import TIP, begin_of, digest, have_of, join_of, key, keys, member, members, signer

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # all that `Node` takes for a refusal
BEGIN = begin_of(members(1, 2, 3))
BALLOT, ROUND, ROOT = BEGIN.ballot, BEGIN.round, digest("r")
COMMIT = Commit(TIP, ROUND, ROOT, 3.0, keys(1, 2, 3), members(1, 2, 3))
REPAIR = Repair(ROUND, BALLOT, (Source(0, key(1), b""), Source(1, key(2), ROOT)))
DOUBT = signer(2).sign(Doubt(TIP, key(1), key(2)))
GOOD: list[msgspec.Struct] = [
    Hello(member(1), Terms({"a": "b"}, ROOT), TIP, members(1, 2)),
    Progress(TIP, 8.0, 1.5),
    Call(TIP),
    join_of(member(1)),
    msgspec.structs.replace(join_of(member(1)), loss=Loss(-0.25, LossKind.BFLOAT16)),
    Joined(TIP),
    Elsewhere(member(2)),
    Elsewhere(member(2), BEGIN),
    BEGIN,
    Part(ROUND, 3, ROUND, 1.0),
    Result(ROUND, 3, ROUND),
    Done(ROUND, BALLOT, ROOT),
    Broken(ROUND, key(1), True, "it sent garbage"),
    Survey(TIP, ROUND, BALLOT, keys(3), BEGIN),
    Have(BALLOT, (ROOT, b""), BALLOT, keys(3), REPAIR, COMMIT),
    REPAIR,
    Fetch(ROUND, 3),
    COMMIT,
    Abort(ROUND, "because"),
    Ping(),
    Pong(),
    Digests(ROUND),
    Committed(BEGIN, (ROOT,) * 8),
    Orphaned(BEGIN),
    Leave(),
    Follows(BALLOT),
    Waiting(ROUND),
    Unjoin(),
    Describe(),
    Description(),
    DOUBT,
    TakeOver(TIP, (DOUBT,)),
    After(TIP),
]

decoder = msgspec.msgpack.Decoder(Message)


def over_the_wire(message: msgspec.Struct) -> Any:
    return decoder.decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: msgspec.Struct) -> None:
    received = over_the_wire(message)
    assert type(received) is type(message)
    assert received == message


def test_every_message_has_a_number_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(Message)]
    assert len(set(tags)) == len(tags) == 33


BAD_AMOUNTS = [-1.0, -1e-300, math.nan, math.inf, -math.inf, 2e300, "1", None]
BAD_CHUNKS = [-1, MAX_CHUNKS, 1 << 60, 1.5, "3", None]
BAD_ROUNDS = [b"", bytes(15), bytes(17), bytes(1 << 20), "0" * 16, 5]
BAD_KEYS = [b"", bytes(31), bytes(33), "k" * 32, 7, None]
BAD_BALLOTS = [Ballot(-1, key(1)), Ballot(1 << 53, key(1)), Ballot(1, b"short"), None, 3, ()]
BAD_TIPS = [Tip(-1, bytes(32), 0.0), Tip(1 << 53, bytes(32), 0.0), Tip(0, b"", 0.0), Tip(0, bytes(32), -1.0), None, ()]
TOO_MANY = tuple(Member(n.to_bytes(32, "big"), (), Role.CLIENT) for n in range(MAX_MEMBERS + 1))
TOO_MANY_KEYS = tuple(m.key for m in TOO_MANY)
LONG = "x" * 257
BAD_LOSSES: list[Any] = [
    1.0, (), (1.0,), (math.nan, 2), (math.inf, 4), (-math.inf, 4), (2e300, 4), (-2e300, 4), ("1", 2), (1.0, 5),
    (1.0, -1), (1.0, None), (65536.0, 0), (3.5e38, 1), (-3.5e38, 2),
]  # fmt: skip


def of(kind: type[msgspec.Struct], field: str, *values: Any) -> list[Any]:
    good = next(message for message in GOOD if type(message) is kind)
    changed = [msgspec.structs.replace(good, **{field: value}) for value in values]
    return [pytest.param(message, id=f"{kind.__name__}.{field}-{n}") for n, message in enumerate(changed)]


@pytest.mark.parametrize(
    "message",
    [
        *of(Join, "weight", *BAD_AMOUNTS),
        *of(Progress, "samples", *BAD_AMOUNTS),
        *of(Progress, "rate", *BAD_AMOUNTS),
        *of(Commit, "samples", *BAD_AMOUNTS),
        *of(Begin, "weights", *[(1.0, bad, 1.0) for bad in BAD_AMOUNTS], (1.0,) * (MAX_MEMBERS + 1)),
        *of(Join, "patience", -1.0, math.nan, math.inf, 86401.0),
        *of(Join, "attempt", -1, 1 << 52, 1.5),
        *of(Join, "machine", LONG, b"\xff"),
        *of(Join, "state", bytes(33), "x"),
        *of(Join, "average", bytes(33), "x"),
        *of(Join, "options", bytes(1025), "x"),
        *of(Join, "loss", *BAD_LOSSES),
        *of(Begin, "loss", *BAD_LOSSES),
        *of(Begin, "options", bytes(1025), "x"),
        *of(Begin, "timeout", 0.0, -1.0, math.nan, math.inf, 86401.0, None),
        *of(Join, "view", bytes(33)),
        *of(Join, "tip", *BAD_TIPS),
        *of(Hello, "tip", *BAD_TIPS),
        *of(Call, "tip", *BAD_TIPS),
        *of(After, "tip", *BAD_TIPS),
        *of(Begin, "tip", *BAD_TIPS),
        *of(Commit, "tip", *BAD_TIPS),
        *of(Hello, "members", TOO_MANY),
        *of(Begin, "members", TOO_MANY),
        *of(Commit, "view", TOO_MANY),
        *of(Commit, "members", TOO_MANY_KEYS, (b"short",)),
        *of(Survey, "out", TOO_MANY_KEYS, (bytes(33),)),
        *of(Have, "out", TOO_MANY_KEYS),
        *of(Begin, "machines", (LONG,), ("",) * (MAX_MEMBERS + 1)),
        *of(Begin, "states", (bytes(33),), (b"",) * (MAX_MEMBERS + 1)),
        *of(Begin, "averages", (bytes(33),), (b"",) * (MAX_MEMBERS + 1)),
        *of(Begin, "chunk_elements", 0, -1, MAX_CHUNK_ELEMENTS + 1, 1.5),
        *of(Begin, "starts", (0, -1), (0, MAX_CHUNKS + 1), (0,) * (MAX_MEMBERS + 2)),
        *of(Begin, "ballot", *BAD_BALLOTS),
        *of(Part, "chunk", *BAD_CHUNKS),
        *of(Result, "chunk", *BAD_CHUNKS),
        *of(Fetch, "chunk", *BAD_CHUNKS),
        *of(Repair, "sources", *[(Source(bad, key(1), b""),) for bad in BAD_CHUNKS]),
        *of(Repair, "sources", (Source(0, b"short", b""),), (Source(0, key(1), bytes(33)),)),
        *of(Repair, "sources", (Source(0, key(1), b""),) * (MAX_CHUNKS + 1)),
        *of(Part, "round", *BAD_ROUNDS),
        *of(Result, "round", *BAD_ROUNDS),
        *of(Done, "round", *BAD_ROUNDS),
        *of(Abort, "round", *BAD_ROUNDS),
        *of(Digests, "round", *BAD_ROUNDS),
        *of(Part, "plan", *BAD_ROUNDS),
        *of(Done, "ballot", *BAD_BALLOTS),
        *of(Survey, "ballot", *BAD_BALLOTS),
        *of(Have, "ballot", *BAD_BALLOTS),
        *of(Follows, "ballot", *BAD_BALLOTS),
        *of(Done, "root", bytes(33), "r"),
        *of(Commit, "root", *BAD_KEYS),
        *of(Broken, "peer", *BAD_KEYS),
        *of(Broken, "reason", LONG, 5),
        *of(Broken, "fault", 1, "yes", None),
        *of(Abort, "reason", LONG, None),
        *of(Have, "digests", (bytes(33),), (b"",) * (MAX_CHUNKS + 1)),
        *of(Have, "commit", 5, Abort(ROUND, "")),
        *of(Committed, "digests", (b"",), (bytes(31),), (ROOT,) * (MAX_CHUNKS + 1)),
        *of(Hello, "terms", Terms({}, b""), Terms({LONG: ""}, ROOT), Terms({"a": LONG}, ROOT)),
        *of(Hello, "terms", Terms({}, ROOT, "0.2; rm"), Terms({}, ROOT, "1" * 65)),
        *of(Hello, "terms", Terms({str(n): "" for n in range(MAX_OPTIONS + 1)}, ROOT), None),
        *of(Hello, "sender", *[Member(bad, (), Role.NODE) for bad in BAD_KEYS]),
        *of(Hello, "sender", *[Member(key(1), (), Role.NODE, bad) for bad in (-1.0, math.nan, math.inf, 2e18)]),
        *of(Hello, "sender", Member(key(1), ("x",) * (MAX_ADDRESSES + 1), Role.NODE)),
        *of(Hello, "sender", Member(key(1), ("x" * (MAX_LENGTH + 1),), Role.NODE)),
        *of(Hello, "sender", *[(key(1), (), "node", None, bad) for bad in ("punched", None, 1)]),
        *of(Join, "rates", *[(bad, ()) for bad in (0.0, -1.0, math.nan, math.inf, 2e18)]),
        *of(Join, "rates", *[(None, ((key(1), bad),)) for bad in (0.5, math.nan, math.inf)]),
        *of(Join, "rates", *[(None, ((bad, 1.0),)) for bad in BAD_KEYS]),
        *of(Join, "rates", (None, ((key(1), 1.0),) * (MAX_SLOW + 1)), None),
        *of(Elsewhere, "coordinator", (key(1), (), "king", 1.0), None),
    ],
)
def test_a_field_beyond_its_bound_is_refused(message: msgspec.Struct) -> None:
    with pytest.raises(msgspec.ValidationError):
        over_the_wire(message)


def test_the_bounds_themselves_are_allowed() -> None:
    over_the_wire(msgspec.structs.replace(join_of(member(1)), weight=1e15, attempt=(1 << 52) - 1, patience=86400.0))
    over_the_wire(Part(ROUND, MAX_CHUNKS - 1, ROUND, 1.0))
    over_the_wire(Have(BALLOT, (ROOT,) * MAX_CHUNKS, None, TOO_MANY_KEYS[:MAX_MEMBERS], None, None))
    over_the_wire(Abort(ROUND, "x" * 256))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",  # a code that msgpack does not have
        b"\x91" * 100_000,  # nested deeper than any stack
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 elements that do not follow
        b"\xc6\xff\xff\xff\xff",
        b"\x92\x05",  # cut off
        msgspec.msgpack.encode([99, 1, 2]),  # no such message
        msgspec.msgpack.encode({"type": 1}),
        msgspec.msgpack.encode([19, "more"]) + b"\x00",
        b"\x93\x12\xc4\x10" + bytes(16) + b"\xa1\xff",  # an Abort whose reason is no UTF-8
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(UNDECODABLE):
        decoder.decode(data)


DECODERS = [
    decoder,
    msgspec.msgpack.Decoder(Envelope),
    transfer_service("state").decoder,
    msgspec.msgpack.Decoder(dict[bytes, bytes]),  # what was gathered
]
fields = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=8)
    | st.sampled_from([TIP, BALLOT, BEGIN, ROUND, ROOT, member(1)]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150)
@given(st.binary(max_size=400))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    for each in DECODERS:
        try:
            each.decode(data)
        except UNDECODABLE:
            continue


@settings(max_examples=200)
@given(st.integers(1, 25), st.lists(fields, max_size=10))
def test_what_is_let_in_can_be_passed_on(tag: int, values: list[object]) -> None:
    try:
        message = decoder.decode(msgspec.msgpack.encode([tag, *values]))
    except UNDECODABLE:
        return
    again = over_the_wire(message)
    assert again == message or any(isinstance(value, float) and math.isnan(value) for value in values)


@settings(max_examples=150)
@given(st.sampled_from(GOOD), st.data())
def test_a_damaged_message_decodes_or_is_refused(message: msgspec.Struct, data: st.DataObject) -> None:
    wire = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(wire)))
    for damaged in (bytes(wire), bytes(wire[:cut])):
        try:
            received = decoder.decode(damaged)
        except UNDECODABLE:
            continue
        if isinstance(received, Join):
            assert 0 <= received.weight <= 1e15
        if isinstance(received, Begin):
            assert all(0 <= weight <= 1e15 for weight in received.weights)


# -- terms


def test_terms_that_are_equal_do_not_differ() -> None:
    assert Terms({"a": "1"}, ROOT).difference(Terms({"a": "1"}, ROOT)) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ({"codec": "none"}, {"codec": "float16"}, "codec is none here, and float16 there"),
        ({"codec": "none"}, {}, "codec is none here, and nothing there"),
        ({}, {"codec": "none"}, "codec is nothing here, and none there"),
        ({"b": "1", "a": "1"}, {"b": "2", "a": "2"}, "a is 1 here, and 2 there"),
    ],
)
def test_an_option_that_differs_is_named(mine: dict[str, str], theirs: dict[str, str], words: str) -> None:
    assert Terms(mine, ROOT).difference(Terms(theirs, digest("o"))) == words


def test_another_protocol_is_named_first_and_what_to_install() -> None:
    mine, theirs = Terms({"a": "1", "protocol": "3"}, ROOT, "0.1.0"), Terms({"a": "2", "protocol": "4"}, ROOT, "0.2.0")
    text = "to train together, install the same version on both machines: pip install 'shoal==0.2.0'"
    assert mine.difference(theirs) == f"protocol is 3 here, and 4 there; {text}"
    assert Terms({}, ROOT, "0.1.0").difference(Terms({}, ROOT, "0.2.0")) is None


def test_a_layout_that_differs_is_said_to() -> None:
    difference = Terms({}, digest("a")).difference(Terms({}, digest("b")))
    assert difference is not None
    assert "the schema hash is 6161616161616161 here, and 6262626262626262 there" in difference


# -- a member


def test_addresses_that_are_none_are_left_out() -> None:
    claimed = Member(key(1), ("garbage", "/ip4/10.0.0.1/tcp/4000", "", "/ip4/999.1.1.1/tcp/1"), Role.NODE)
    assert [str(address) for address in claimed.multiaddrs()] == ["/ip4/10.0.0.1/tcp/4000"]


def test_what_a_role_means() -> None:
    assert [member(1, role).reduces for role in (Role.NODE, Role.CLIENT, Role.AUXILIARY)] == [True, False, True]
    assert [member(1, role).contributes for role in (Role.NODE, Role.CLIENT, Role.AUXILIARY)] == [True, True, False]
    assert not member(1, bandwidth=0.0).reduces


def test_a_commit_names_the_tip_after_it() -> None:
    assert COMMIT.next_tip == TIP.after(COMMIT.round + ROOT, 3.0)
    assert have_of(BALLOT).commit is None
