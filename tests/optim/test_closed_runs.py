"""Closed runs, with real processes: who is admitted trains, and who is not gets nothing."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from typing import Any

import msgspec
import pytest

import shoal
from shoal.dht.records import get_dht_time
from shoal.dht.validation import owner_marker
from shoal.membership import Membership, OwnerKey, Part
from shoal.membership.membership import MEMBERSHIP
from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Service
from shoal.swarm.gate import REFUSAL, News, Show
from shoal.swarm.protocol.messages import Message, Progress
from shoal.swarm.protocol.view import Member, Role
from shoal.transfer.donor import Chunk, GetChunk, GetManifest, Offer, Withheld, transfer_service
from tests.optim.closed_runs import Club, Counting, stranger
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, training
from tests.swarm.rounds import TIP
from tests.swarm.test_messages import GOOD
from tests.waiting import wait_until

FAST = {"matchmaking_time": 3.0, "averaging_timeout": 10.0}


class Gibberish(msgspec.Struct, tag=99, array_like=True):
    """No message of any service."""

    words: str = "abracadabra"


async def ask_everything(node: Counting, peer: PeerID, club: Club) -> list[str]:
    """Send every message that there is, as a request, and some that there are not; the refusals."""
    run_id = club.run_id
    averaging, state = Service(f"averaging/{run_id}", Message | Gibberish), transfer_service(f"state/{run_id}")
    admission = Service(f"admission/{run_id}", Show | News)
    forged = OwnerKey("test").admit(node.peer_id, [Part.TRAIN], 1, time.time())
    stolen = club.admit(PeerID(bytes(32)))
    expired = club.admit(node.peer_id, ago=3 * 86400.0)
    watching = club.admit(node.peer_id, Part.WATCH, ago=3 * 86400.0)
    shows = [Show(text, 0, 0) for text in ("", "x", forged, stolen, expired, watching)]
    requests: list[tuple[Service, msgspec.Struct]] = [(averaging, message) for message in [*GOOD, Gibberish()]]
    requests += [(state, message) for message in (GetManifest(), GetChunk(bytes(32), 0), Offer(), Chunk(), Withheld())]
    requests += [(admission, message) for message in (*shows, News("", ""))]

    async def ask(service: Service, message: msgspec.Struct) -> str:
        try:
            reply = await node.call_for_buffers(peer, service, message, timeout=1.0)
        except Refused as error:
            return str(error)
        except (P2PError, TimeoutError) as error:
            return type(error).__name__
        return f"{type(message).__name__} is answered by {reply}"

    return list(await asyncio.gather(*(ask(service, message) for service, message in requests)))


def test_a_stranger_gets_refusals_only_whatever_it_asks(pool: Pool, club: Club) -> None:
    with training(pool, 2, **club.run(["a", "b"]), **FAST) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.02)
        wait_until(lambda: all(len(events(peer)) >= 3 for peer in peers.all))

        async def attack() -> None:
            async with stranger(peers.addresses[0], club.run_id) as (node, peer):
                said = await ask_everything(node, peer, club)
                said += await ask_everything(node, peer, club)
                assert set(said) == {REFUSAL, "TimeoutError"}
                assert said.count(REFUSAL) == node.answers == 3
                assert 0 < node.nbytes < 1000, node.nbytes

        asyncio.run(attack())
        reports = ask_all(peers.all, Training.report)
        assert all(report["training"] and not report["errors"] for report in reports)
        seen = [len(events(peer)) for peer in peers.all]
        wait_until(lambda: all(len(events(p)) >= n + 3 for p, n in zip(peers.all, seen, strict=True)))
        by_epoch([events(peer) for peer in peers.all])
        assert all(event["peers"] == 2 for event in events(peers.all[0])[3:])


@pytest.mark.parametrize(("part", "answered"), [(Part.WATCH, {"Progress", "Ping"}), (Part.AUXILIARY, None)])
def test_a_member_gets_what_its_part_permits(pool: Pool, club: Club, part: Part, answered: set[str] | None) -> None:
    """A watcher asks how the run gets on, and nothing else; neither it nor an auxiliary gets the state."""
    with training(pool, 1, **club.run(["a"]), **FAST) as peers:
        peers.all[0].ask(Training.train, batch=8, pause=0.02)
        wait_until(lambda: len(events(peers.all[0])) >= 3)

        async def ask() -> tuple[set[str], set[str]]:
            async with stranger(peers.addresses[0], club.run_id) as (node, peer):
                admission = Service(f"admission/{club.run_id}", Show | News)
                show = Show(club.admit(node.peer_id, part), 0, 0)
                assert (await node.call(peer, admission, show, Show, timeout=5.0)).pin == 0
                averaging, state = (
                    Service(f"averaging/{club.run_id}", Message),
                    transfer_service(f"state/{club.run_id}"),
                )
                watching = Progress(TIP, 0.0, 0.0, counted=False)
                got, refused = set(), set()
                for service, message in [
                    *((averaging, message) for message in [*GOOD, watching]),
                    *((state, message) for message in (GetManifest(), GetChunk(bytes(32), 0))),
                ]:
                    name = type(message).__name__
                    try:
                        await node.call_for_buffers(peer, service, message, timeout=3.0)
                        got.add(name)
                    except Refused as error:
                        if "does not permit" in str(error):
                            refused.add(name)
                return got, refused

        got, refused = asyncio.run(ask())
        assert {"GetManifest", "GetChunk", "Hello", "Join"} <= refused
        assert answered is None or got == answered
        assert not peers.all[0].ask(Training.report)["errors"]


@pytest.mark.long
def test_a_hundred_strangers_at_once_cost_little(pool: Pool, club: Club) -> None:
    with training(pool, 2, **club.run(["a", "b"]), **FAST) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.05)
        wait_until(lambda: all(len(events(peer)) >= 3 for peer in peers.all))

        def epochs_in(seconds: float) -> int:
            before = len(events(peers.all[0]))
            time.sleep(seconds)
            return len(events(peers.all[0])) - before

        async def attack() -> tuple[int, int]:
            async with contextlib.AsyncExitStack() as stack:
                address = peers.addresses[0]
                strangers = [await stack.enter_async_context(stranger(address, club.run_id)) for _ in range(100)]
                counting = asyncio.create_task(asyncio.to_thread(epochs_in, 10.0))
                while not counting.done():
                    await asyncio.gather(*(ask_everything(node, peer, club) for node, peer in strangers))
                return await counting, max(node.nbytes for node, _ in strangers)

        quiet = epochs_in(10.0)
        busy, most = asyncio.run(attack())
        assert most < 1000
        print(f"{busy} epochs in 10 s with strangers, {quiet} without")
        assert busy > 0.7 * quiet, (busy, quiet)  # the strangers take CPU themselves on this machine


def test_a_peer_without_a_membership_is_told_what_to_do(club: Club) -> None:
    path, peer = club.identity("a")
    with shoal.DHT(start=True, identity_path=path) as dht:

        def make(**given: Any) -> None:
            shoal.DecentralizedAverager([], dht, start=False, prefix=given.pop("prefix", club.run_id), **given)

        with pytest.raises(ValueError, match=f"shoal keys admit {club.run_id} {peer}"):
            make()
        with pytest.raises(ValueError, match="is an open run"):
            make(prefix="open", membership="x")
        with pytest.raises(ValueError, match="can be read"):
            make(membership="no such file")
        with pytest.raises(ValueError, match="was not signed by the owner"):
            make(membership=_of_another_owner(club, peer))
        with pytest.raises(ValueError, match="identity_path="):
            make(membership=club.admit(PeerID(bytes(32))))
        with pytest.raises(ValueError, match="has expired"):
            make(membership=club.admit(peer, ago=2 * 86400.0))
        with pytest.raises(ValueError, match="returned a NoneType"):
            make(membership=lambda: None)
        with pytest.raises(ValueError, match="give the line of text"):
            make(membership=3)


def _of_another_owner(club: Club, peer: PeerID) -> str:
    """A membership that says it is of this run, and was signed by somebody else."""
    now = int(time.time())
    body = msgspec.msgpack.encode(Membership(club.run_id, peer.key, (Part.TRAIN,), now, now + 100, 1))
    return MEMBERSHIP.prefix + base64.urlsafe_b64encode(body + bytes(64)).decode()


def test_members_of_all_roles_train_together(pool: Pool, club: Club) -> None:
    names = ["node", "client", "auxiliary"]
    run = club.run(names)
    parts = [Part.TRAIN, Part.CLIENT, Part.AUXILIARY]
    run["membership"] = [club.admit(club.identity(name)[1], part) for name, part in zip(names, parts, strict=True)]
    run["matchmaking_time"] = 3.0
    with training(pool, 3, **run, client_mode=[None, True, None], dht_client=[False, True, False],
                  auxiliary=[False, False, True]) as peers:  # fmt: skip
        *trainers, helper = peers.all
        helper.ask(Training.train, batch=0, pause=0.0)
        ask_all(trainers, Training.train, batch=8, pause=0.02)
        wait_until(
            lambda: all(sum(e["kind"] == "epoch" and e["peers"] == 3 for e in events(p)) >= 5 for p in peers.all)
        )
        by_epoch([events(peer) for peer in trainers])
        assert all(not peer.ask(Training.report)["errors"] for peer in peers.all)


@pytest.mark.long
@pytest.mark.parametrize("own", ["GradientAverager", "PowerSGDGradientAverager"])
def test_runs_within_a_closed_run_are_closed_by_the_same_membership(pool: Pool, club: Club, own: str) -> None:
    with training(pool, 2, **club.run(["a", "b"]), own_averager=own, **FAST) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.02)
        wait_until(lambda: all(sum(event.get("peers") == 2 for event in events(p)) >= 3 for p in peers.all))

        async def ask() -> None:
            async with stranger(peers.addresses[0], club.run_id) as (node, peer):
                within = Service(f"averaging/{club.run_id}/grad", Message)
                with pytest.raises(Refused, match=REFUSAL):
                    await node.call(peer, within, GOOD[0], Message, timeout=5.0)

        asyncio.run(ask())
        by_epoch([events(peer) for peer in peers.all])


def test_a_role_that_the_membership_does_not_permit_is_refused(club: Club) -> None:
    path, peer = club.identity("a")
    with shoal.DHT(start=True, identity_path=path) as dht:
        for part in (Part.CLIENT, Part.AUXILIARY, Part.WATCH):
            text = club.admit(peer, part)
            averager = shoal.DecentralizedAverager([], dht, start=False, prefix=club.run_id, membership=text)
            with pytest.raises(ValueError, match=f"permits this peer to {part.value}, not to train"):
                averager.run_in_background()


def test_a_watcher_follows_the_progress_and_counts_for_nothing(club: Club) -> None:
    trainer, watcher = club.identity("trainer"), club.identity("watcher")
    with (
        shoal.DHT(start=True, identity_path=trainer[0]) as one,
        shoal.DHT(one.get_visible_maddrs(), start=True, identity_path=watcher[0]) as other,
    ):
        counts = shoal.ProgressTracker(one, club.run_id, 100, membership=club.admit(trainer[1]))
        watches = shoal.ProgressTracker(
            other, club.run_id, 100, client_mode=True, membership=club.admit(watcher[1], Part.WATCH),
            min_refresh_period=0.05, default_refresh_period=0.1, max_refresh_period=0.2,
        )  # fmt: skip
        counts.report_local_progress(0, 40)
        wait_until(lambda: watches.global_progress.samples_accumulated == 40, 20.0)
        assert watches.global_progress.num_peers == 1
        with contextlib.suppress(P2PError):
            watches.report_local_progress(0, 60)
        counts.report_local_progress(0, 41)
        assert not counts.ready_to_update_epoch
        assert counts.global_progress.samples_accumulated == 41
        assert counts.global_progress.num_peers == 1
        watches.shutdown()
        counts.shutdown()


def test_a_record_in_the_dht_without_a_membership_lists_nobody(club: Club) -> None:
    member, outsider = club.identity("member"), club.identity("outsider")
    with (
        shoal.DHT(start=True, identity_path=member[0]) as dht,
        shoal.DHT(dht.get_visible_maddrs(), start=True, identity_path=outsider[0]) as other,
    ):
        text = club.admit(member[1])
        averager = shoal.DecentralizedAverager([], dht, start=True, prefix=club.run_id, membership=text)
        me = Member(outsider[1].key, tuple(map(str, other.get_visible_maddrs())), Role.NODE)
        for record in (me, (me, ""), (me, club.admit(member[1])), (me, _of_another_owner(club, outsider[1]))):
            assert not _stored(other, club, msgspec.msgpack.encode(record)), "a node of the DHT keeps it"
        for record in ((me, club.admit(outsider[1], Part.WATCH)), (me, club.admit(outsider[1], ago=2 * 86400.0))):
            assert _stored(other, club, msgspec.msgpack.encode(record))
            assert averager._engine.swarm is not None
            listed = dht.reactor.submit(averager._engine.swarm.contacts._directory.read()).result()
            assert [found.peer for found in listed] == [member[1]]
        # What nobody has signed, and another owner's words, are kept by no node.
        assert not other.store(f"{club.run_id}/members", b"x", get_dht_time() + 60)
        words = msgspec.msgpack.encode((OwnerKey("test").revoke([member[1]], None, time.time()), ""))
        assert not other.store(f"{club.run_id}/owner", words, get_dht_time() + 60, subkey=owner_marker(outsider[1]))
        averager.shutdown()


def _stored(dht: shoal.DHT, club: Club, value: bytes) -> bool:
    """Whether a peer can write that under the run's members."""
    subkey = owner_marker(dht.peer_id)
    return bool(dht.store(f"{club.run_id}/members", value, get_dht_time() + 60, subkey=subkey))
