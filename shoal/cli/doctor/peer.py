"""Checks that need another peer: whether it can be dialled, how fast the line to it is, its clock, and a run's
members."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.doctor.finding import Check, Level
from shoal.cli.doctor.reach import look_at_reach
from shoal.dht.created import CreatedNode
from shoal.dht.messages import SERVICE as DHT_SERVICE
from shoal.dht.messages import Ping, Sender, Store, Stored
from shoal.dht.records import get_dht_time, make_record
from shoal.health.board import HealthBoard
from shoal.p2p.errors import HandshakeFailed, P2PError, PeerUnreachable, Refused
from shoal.p2p.greeting import VERSION
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Service
from shoal.p2p.release import RELEASE
from shoal.swarm.channel import Channel
from shoal.swarm.directory import MAX_CLOCK_DIFFERENCE, RECORD_SECONDS, DHTDirectory
from shoal.swarm.gate import REFUSAL
from shoal.swarm.gates import admit_to, gate_of
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member, Role

TIMEOUT = 10.0  # seconds for an answer
PINGS = 5
FIRST_BYTES, MOST_BYTES = 64 << 10, 4 << 20  # sizes of the first and the largest measurement of bandwidth
LONG_ENOUGH = 0.5  # seconds; the measurements end with one that takes this long
SLOW = 10e6  # bits per second
OFFSETS = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 900, 3600)  # differences of clocks that are tested, in seconds
SHOWN_MEMBERS = 8
LIKE_A_RELEASE = re.compile(r"[0-9][0-9A-Za-z.+!]*")
UNSET = ("", "None", "NoneType", "False", "none")  # values of options that are not shown


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asks the doctor about.

    Attributes:
        address: the address of a peer that listens.
        run_id: the name of the run in which this machine is to take part; "" to check no run.
        membership: for a closed run: the line of text, or its file; None for an open run.
        identity: the file with this peer's key; None for a new key.
    """

    address: Multiaddr
    run_id: str = ""
    membership: str | None = None
    identity: Path | None = None


def asked_about(address: str | None, run_id: str, membership: str | None, identity: Path | None) -> Asked | None:
    """Check the arguments of the command. Returns None if only this machine is to be checked.

    Raises:
        ValueError: if the arguments do not fit together.
    """
    if address is None:
        if run_id or membership or identity:
            raise ValueError("to look at a run, give the ADDRESS of one of its peers")
        return None
    parsed = Multiaddr(address)
    if parsed.peer_id is None:
        raise ValueError(f"{address} does not say who answers there: it must end in /p2p/<peer id>, as it was printed")
    # A peer behind a relay is a client of the DHT and answers nobody there, so the doctor asks its relay.
    return Asked(parsed if parsed.relay is None else parsed.of_relay(), run_id, membership, identity)


async def look_at_peer(asked: Asked, port: int = 0) -> AsyncIterator[Check]:
    """Run all checks that need the peer at an address, and those of its run.

    Args:
        asked: the peer and the run.
        port: the TCP port at which this machine would listen; 0 for any.

    Raises:
        ValueError: if an address, a membership or an identity is invalid.
        OSError: if the identity's file can't be read.
    """
    identity = Identity() if asked.identity is None else Identity.from_file(asked.identity)
    began = time.perf_counter()
    try:
        dht = await CreatedNode.create([asked.address], identity=identity, client_mode=True, bootstrap_timeout=TIMEOUT)
    except PeerUnreachable as error:
        yield _unreachable(asked.address, error)
        return
    try:
        seconds = time.perf_counter() - began
        found = f"answers, and speaks version {VERSION} of the protocol, as this peer does ({seconds:.2f} s)"
        yield Check("peer", Level.WELL, found, "", {"protocol": VERSION, "seconds": seconds})
        assert asked.address.peer_id is not None  # `asked_about` has checked that
        async for finding in _look_at_line(dht, asked.address.peer_id):
            yield finding
        async for finding in look_at_reach(dht, asked.address, port):
            yield finding
        if asked.run_id:
            async for finding in _look_at_run(dht, asked):
                yield finding
    finally:
        await dht.shutdown()


def _unreachable(address: Multiaddr, error: PeerUnreachable) -> Check:
    reason = str(error).rpartition(f"{address}: ")[2]
    if isinstance(error, HandshakeFailed) or "prove to be that peer" in reason:
        advice = "the address is of an earlier start: ask for the present one (`identity_path=` keeps a peer's address)"
    elif "same identity" in reason:
        advice = "end the process that uses the same --identity, as a trainer that runs already, and ask again"
    elif "version" in reason:
        advice = "install the same version of Shoal on both machines"
    elif address.is_loopback:
        advice = "a loopback address leads to this machine only: is the peer running here? Else ask for another address"
    else:
        advice = (
            "is the peer running, does it listen on an address that others reach (host_maddrs=['/ip4/0.0.0.0/tcp/"
            f"{address.port}']), and do its firewall and router let TCP port {address.port} in?"
        )
    return Check("peer", Level.STOPS, f"{address} cannot be dialled: {reason}", advice)


# -- the line


async def _look_at_line(dht: CreatedNode, peer: PeerID) -> AsyncIterator[Check]:
    sender = Sender(True, ())

    async def ping(size: int) -> float:
        """The seconds until an answer to so many bytes is there."""
        began = time.perf_counter()
        buffers = [bytes(size)] if size else []
        await dht.node.call_for_buffers(peer, DHT_SERVICE, Ping(sender), timeout=TIMEOUT, buffers=buffers)
        return time.perf_counter() - began

    try:
        round_trip = min([await ping(0) for _ in range(PINGS)])
        size, seconds = FIRST_BYTES, 0.0
        while (seconds := max(await ping(size) - round_trip, 1e-6)) < LONG_ENOUGH and size < MOST_BYTES:
            size *= 4
    except (P2PError, TimeoutError) as error:
        reason = str(error) or f"no answer within {TIMEOUT:g} s"
        advice = "the line is very slow or loses much: try another one, or client mode with upload_limit="
        yield Check("line", Level.STOPS, f"{reason}", advice)
        return
    rate = 8 * size / seconds
    found = f"{rate / 1e6:.0f} Mbit/s to that peer, over one connection, {round_trip * 1e3:.1f} ms there and back"
    facts = {"bits_per_second": rate, "round_trip_seconds": round_trip}
    advice = (
        "a round sends up to twice the bytes of the gradients: choose a codec, as in "
        "grad_compression=shoal.compression.Uniform8BitQuantization(), and a larger target_batch_size"
    )
    yield Check("line", Level.MIND if rate < SLOW else Level.WELL, found, advice * (rate < SLOW), facts)
    yield await _clock(dht, peer)


async def _clock(dht: CreatedNode, peer: PeerID) -> Check:
    """Compare clocks. The peer is asked to cache several records, and keeps those that have not expired by its clock.
    So they show what its clock says. The records expire by themselves."""
    now, key = get_dht_time(), os.urandom(16)
    offsets = sorted([-offset for offset in OFFSETS] + list(OFFSETS))
    records = [make_record(key, b"", now + offset, subkey, now) for subkey, offset in enumerate(offsets)]
    try:
        request = Store(Sender(True, ()), records, cache=True)
        kept = (await dht.node.call(peer, DHT_SERVICE, request, Stored, timeout=TIMEOUT)).kept
    except (P2PError, TimeoutError) as error:
        return Check("clock", Level.MIND, f"its clock could not be compared: {error}", "try again in a minute")
    first = next((offset for offset, is_kept in zip(offsets, kept, strict=False) if is_kept), None)
    before = max((offset for offset in offsets if first is None or offset < first), default=None)
    facts = {"ahead_at_least_seconds": before, "ahead_at_most_seconds": first}
    if before is not None and first is not None and before < 0 < first:
        return Check("clock", Level.WELL, "its clock and this machine's are the same, to a second", "", facts)
    ahead = first is None or first > 0
    apart = abs((before if ahead else first) or 0.0)
    found = f"its clock is at least {apart:g} s {'ahead of' if ahead else 'behind'} this machine's"
    if apart < MAX_CLOCK_DIFFERENCE:
        return Check("clock", Level.WELL, found, "", facts)
    advice = f"set the clock that is wrong (`timedatectl set-ntp true`): {RECORD_SECONDS:g} s apart, peers do not meet"
    return Check("clock", Level.STOPS if apart >= RECORD_SECONDS else Level.MIND, found, advice, facts)


# -- the run


async def _look_at_run(dht: CreatedNode, asked: Asked) -> AsyncIterator[Check]:
    run_id = asked.run_id
    try:
        admit_to(lambda: dht.node, run_id, asked.membership)
        gate = gate_of(dht.node, run_id)
    except ValueError as error:
        yield Check("membership", Level.STOPS, str(error), "see docs/guides/closed-runs.md")
        return
    members = [member for member in await DHTDirectory(dht, run_id).read() if member.peer != dht.peer_id]
    if not members:
        advice = "is the run id, letter by letter, that in the others' scripts? Peers are listed once they have begun"
        yield Check("run", Level.MIND, f"nobody is listed in {run_id!r}", advice, {"members": []})
        return
    channel = Channel(dht.node, Service(f"averaging/{run_id}", msg.Message), gate)
    asked_all = await asyncio.gather(*(_meet(channel, member, run_id) for member in members))
    answers = dict(zip(members, asked_all, strict=True))
    yield _members(answers)
    hellos = [answer for answer in answers.values() if isinstance(answer, msg.Hello)]
    if hellos:
        yield _terms(hellos)
    releases = Counter(posted.health.version for posted in await HealthBoard(dht, run_id).read(len(members)))
    if releases:
        yield _release(releases)


def _release(releases: Counter[str]) -> Check:
    """Compare this release of Shoal with those that members publish. `releases` counts them. A text that is no release
    is shown if there is room, but never used in a command."""
    mine, theirs = RELEASE, [release for release, _ in releases.most_common()]
    shown = f"{', '.join(theirs[:SHOWN_MEMBERS])}{', …' * (len(theirs) > SHOWN_MEMBERS)}"
    found, facts = f"members have Shoal {shown}; here it is {mine}", {"members": theirs, "here": mine}
    if mine in theirs:
        return Check("release", Level.WELL, found, "", facts)
    wanted = next((release for release in theirs if LIKE_A_RELEASE.fullmatch(release)), None)
    advice = "ask who runs it which release of Shoal it needs" if wanted is None else f"pip install 'shoal=={wanted}'"
    return Check("release", Level.MIND, found, advice, facts)


async def _meet(channel: Channel, member: Member, run_id: str) -> msg.Hello | str:
    """The HELLO of a member, or the reason why there is none."""
    if member.role is Role.CLIENT:
        return "a client, which nobody dials"
    channel.learn(member)
    watching = msg.Progress(Tip.genesis(run_id), 0.0, 0.0, counted=False)
    try:
        return await channel.call(member.key, watching, msg.Hello, TIMEOUT)
    except Refused as error:
        return "it does not accept this membership" if str(error) == REFUSAL else str(error)
    except (P2PError, TimeoutError) as error:
        return str(error) or f"no answer within {TIMEOUT:g} s"


def _members(answers: dict[Member, msg.Hello | str]) -> Check:
    clients = sum(member.role is Role.CLIENT for member in answers)
    silent = {m: a for m, a in answers.items() if isinstance(a, str) and m.role is not Role.CLIENT}
    found = f"{len(answers)} members are listed, {clients} of them clients"
    facts = {
        "members": [
            {"peer": str(member.peer), "role": member.role.name.lower(), "answer": a if isinstance(a, str) else "hello"}
            for member, a in answers.items()
        ]
    }
    if not silent:
        return Check("run", Level.WELL, f"{found}; all that can be dialled answer", "", facts)
    first = [f"{member.peer} ({', '.join(member.addresses)}): {why}" for member, why in silent.items()][:SHOWN_MEMBERS]
    advice = (
        "a peer that is gone stays listed for a minute; a peer that trains needs an open port that this machine "
        "reaches (host_maddrs=), or client_mode=True"
    )
    nobody = len(silent) == len(answers) - clients
    found = f"{found}; {len(silent)} do not answer: {'; '.join(first)}"
    return Check("run", Level.STOPS if nobody else Level.MIND, found, advice, facts)


def _terms(hellos: list[msg.Hello]) -> Check:
    """Compare the options and models of members. The script on this machine must have the same."""
    counted = Counter(tuple(sorted(hello.terms.options.items())) for hello in hellos)
    options = dict(counted.most_common(1)[0][0])
    tip = max((hello.tip for hello in hellos), key=lambda tip: tip.epoch)
    facts = {"options": options, "epoch": tip.epoch, "samples": tip.samples}
    shown = ", ".join(f"{name}={value}" for name, value in options.items() if value not in UNSET)
    found = f"epoch {tip.epoch}; all scripts of this run have {shown}"
    if len(counted) > 1 or len({hello.terms.schema for hello in hellos}) > 1:
        advice = "members with different options or models do not train together: make the scripts equal"
        return Check("terms", Level.MIND, f"{found}; not all members agree", advice, facts)
    return Check("terms", Level.WELL, found, "", facts)
