"""An admitted member lies: its state is taken, its membership revoked, and the owner's pin brings all back."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import shoal
from shoal.membership import OwnerKey
from tests.optim.closed_runs import Club
from tests.optim.models import make_model
from tests.optim.processes import Peer, Pool, Training, ask_all, events, training
from tests.waiting import wait_until

FORGED_EPOCH = 1_000_003
FAST = {"matchmaking_time": 3.0, "averaging_timeout": 10.0}


def keys(club: Club, *arguments: str) -> str:
    """Run `shoal keys` as the owner."""
    folder = club.folder / "keys"
    if not folder.exists():
        folder.mkdir()
        club.owner.save(folder / f"{club.run_id}.key")
    command = [sys.executable, "-m", "shoal", "keys", *arguments, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(peer: Peer) -> dict[str, Any]:
    return peer.ask(Training.report)


def epoch_of(tip: str) -> int:
    return int(tip.split(":")[0])


def lie(club: Club, addresses: list[str], target: int) -> tuple[shoal.DHT, shoal.Optimizer]:
    """Join as a member, and say to hold a state with more samples than all others'."""
    path, peer = club.identity("liar")
    dht = shoal.DHT(addresses, start=True, identity_path=path)
    model = make_model(seed=666)
    made = shoal.Optimizer(
        dht=dht, run_id=club.run_id, target_batch_size=target, params=model.parameters(), membership=club.admit(peer),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3), **FAST,
    )  # fmt: skip
    forged = copy.deepcopy(made.state_dict())
    forged["state"]["local_epoch"] = FORGED_EPOCH
    forged["shoal"] |= {"samples": 1e300, "lineage": os.urandom(32), "line": b""}
    made.load_state_dict(forged)
    return dht, made


@pytest.mark.long
def test_a_pin_undoes_a_forged_state(pool: Pool, club: Club) -> None:
    names = ["a", "b", "c"]
    run = club.run(names, target=64, **FAST)
    run["kept_state_dir"] = [str(club.folder / name / "kept") for name in "xyz"]
    with training(pool, 3, **run) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: all(len(events(peer)) >= 5 for peer in peers.all))
        dht, liar = lie(club, peers.addresses, 64)
        try:
            wait_until(lambda: all(epoch_of(report(peer)["tip"]) >= FORGED_EPOCH for peer in peers.all), 60.0)
            left = [next(f for f in report(peer)["forks"] if not f["stays"]) for peer in peers.all]
            assert all(epoch_of(fork["other_tip"]) >= FORGED_EPOCH for fork in left)
            assert all(str(club.folder) in fork["kept"] for fork in left)
            pinned = max((fork["tip"] for fork in left), key=epoch_of)
            began = time.monotonic()
            keys(club, "revoke", club.run_id, str(dht.peer_id), "--initial-peers", peers.addresses[0])
            told = keys(club, "pin", club.run_id, pinned, "--initial-peers", peers.addresses[0])
            assert "told the run" in told

            def is_back(peer: Peer) -> bool:
                return epoch_of(pinned) + 3 <= epoch_of(report(peer)["tip"]) < FORGED_EPOCH

            wait_until(lambda: all(map(is_back, peers.all)), 90.0)
            assert time.monotonic() - began < 90
        finally:
            liar.shutdown()
            dht.shutdown()
        last = max(epoch_of(report(peer)["tip"]) for peer in peers.all) + 3
        states = ask_all(peers.all, Training.stop, last)
        logs = [report(peer)["log"] for peer in peers.all]
        assert all(state == states[0] for state in states), states
    for log in logs:
        assert any("has left its state of epoch" in line and "keys pin" in line for line in log), log
    assert any(any("continues from the state that it had left" in line for line in log) for log in logs), logs


@pytest.mark.long
def test_a_revoked_member_is_put_out_and_a_newcomer_begins_at_the_pin(pool: Pool, club: Club) -> None:
    run = club.run(["a", "b", "c"], target=64, **FAST)
    with training(pool, 3, **run) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: all(len(events(peer)) >= 4 for peer in peers.all))
        *stay, out = peers.all
        began = time.monotonic()
        keys(club, "revoke", club.run_id, out.peer, "--initial-peers", peers.addresses[0])
        wait_until(lambda: all(events(peer)[-1].get("peers") == 2 for peer in stay), 60.0)
        assert time.monotonic() - began < 60
        assert not report(out)["errors"]
        wait_until(lambda: any("has revoked this peer's membership" in line for line in report(out)["log"]), 60.0)
        pinned = report(stay[0])["tip"]
        keys(club, "pin", club.run_id, pinned, "--initial-peers", peers.addresses[0])
        before = epoch_of(report(stay[0])["tip"])
        wait_until(lambda: all(epoch_of(report(peer)["tip"]) >= before + 3 for peer in stay), 60.0)
        files, texts = club.identity("d")[0], club.admit(club.identity("d")[1])
        (late,) = peers.add(1, identity=files, membership=texts)
        late.ask(Training.train, batch=8, pause=0.03)
        wait_until(lambda: events(late) != [] and events(late)[-1].get("peers") == 3, 60.0)
        assert events(late)[0]["kind"] == "download"
        assert epoch_of(report(late)["tip"]) >= epoch_of(pinned)
        assert not any(fork for peer in stay for fork in report(peer)["forks"] if not fork["stays"])


@pytest.mark.long
def test_a_pin_that_rewinds_leads_back_to_a_checkpoint(pool: Pool, club: Club) -> None:
    """A lie within a round is behind all later states: only who has a checkpoint from before can undo it."""
    run = club.run(["a", "b", "c"], target=64, **FAST)
    checkpoint = str(club.folder / "checkpoint")
    with training(pool, 3, **run) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: all(len(events(peer)) >= 3 for peer in peers.all))
        assert [state["epoch"] for state in ask_all(peers.all, Training.stop, 6)] == [6, 6, 6]
        peers.all[0].ask(Training.save, checkpoint)
        pinned = report(peers.all[0])["tip"]
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: all(epoch_of(report(peer)["tip"]) >= 10 for peer in peers.all))
        keys(club, "pin", club.run_id, pinned, "--rewind", "--initial-peers", peers.addresses[0])
        waits = "nobody in reach holds that state"
        wait_until(lambda: all(any(waits in line for line in report(p)["log"]) for p in peers.all), 60.0)
        file, text = club.identity("d")[0], club.admit(club.identity("d")[1])
        (holder,) = peers.add(1, identity=file, membership=text)
        assert holder.ask(Training.load, checkpoint) == 6
        assert report(holder)["tip"] == pinned
        holder.ask(Training.train, batch=8, pause=0.03)

        def is_back(peer: Peer) -> bool:
            return any(event.get("peers") == 4 for event in events(peer))

        wait_until(lambda: all(map(is_back, peers.all)), 90.0)
        left = [next(fork for fork in report(peer)["forks"] if not fork["stays"]) for peer in peers.all[:3]]
        assert all("its owner has pinned it" in fork["reason"] and epoch_of(fork["tip"]) >= 10 for fork in left)
        last = max(epoch_of(report(peer)["tip"]) for peer in peers.all) + 3
        states = ask_all(peers.all, Training.stop, last)
    assert all(state == states[0] for state in states)


def test_a_newcomer_waits_for_the_pinned_state_and_rewind_goes_back(club: Club) -> None:
    """Nobody holds the pinned state: who is new does not begin a state of its own."""
    path, peer = club.identity("a")
    model = make_model()
    with shoal.DHT(start=True, identity_path=path) as dht:
        made = shoal.Optimizer(
            dht=dht, run_id=club.run_id, target_batch_size=8, params=model.parameters(), membership=club.admit(peer),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05), matchmaking_time=0.2, averaging_timeout=2.0,
        )  # fmt: skip
        try:
            gate = club.gate(dht)

            def hear(pin: str) -> None:
                made._run.call(lambda: gate.hear("", pin))

            def step() -> None:
                model(torch.ones(8, 10)).sum().backward()
                made.step(batch_size=8)

            step()
            first = made.tip
            assert epoch_of(first) == 1
            step()
            # It descends from the pinned state, so it stays where it is.
            hear(club.owner.pin(first, None, time.time()))
            step()
            assert epoch_of(made.tip) == 3
            assert made._state.tip.pin > 0
            saved = made.state_dict()
            # A state that nobody holds: it goes on from its own, for it is no newcomer.
            unknown = f"7:100:{'ab' * 32}"
            hear(club.owner.pin(unknown, None, time.time() + 10))
            step()
            assert epoch_of(made.tip) == 4
        finally:
            made.shutdown()
        # The pin is of that run: in another one the state goes on without it.
        made = shoal.Optimizer(
            dht=dht, run_id="open", target_batch_size=8, params=model.parameters(), matchmaking_time=0.2,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05), averaging_timeout=2.0,
        )  # fmt: skip
        try:
            made.load_state_dict(saved)
            assert made._state.tip.pin == 0
            step()
            assert epoch_of(made.tip) == 4
        finally:
            made.shutdown()
    path, peer = club.identity("b")
    with shoal.DHT(start=True, identity_path=path) as dht:
        made = shoal.Optimizer(
            dht=dht, run_id=club.run_id, target_batch_size=8, params=model.parameters(), membership=club.admit(peer),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05), matchmaking_time=0.2, averaging_timeout=2.0,
        )  # fmt: skip
        try:
            gate = club.gate(dht)
            made._run.call(lambda: gate.hear("", club.owner.pin(unknown, None, time.time())))
            for _ in range(3):
                step()
            assert epoch_of(made.tip) == 0
        finally:
            made.shutdown()


def test_another_owners_words_are_not_followed(club: Club) -> None:
    path, peer = club.identity("a")
    with shoal.DHT(start=True, identity_path=path) as dht:
        averager = shoal.DecentralizedAverager([], dht, start=True, prefix=club.run_id, membership=club.admit(peer))
        gate = club.gate(dht)
        other = OwnerKey("test")
        now, tip = time.time(), f"1:1:{'00' * 32}"
        revocations, pin = other.revoke([peer], None, now), other.pin(tip, None, now)
        dht.reactor.submit(_call(lambda: gate.hear(revocations, pin))).result()
        assert (gate.pin, gate.revocations, gate.texts) == (None, None, ["", ""])
        newer, older = (club.owner.pin(tip, None, now + late) for late in (10, 0))
        dht.reactor.submit(_call(lambda: gate.hear("", newer))).result()
        dht.reactor.submit(_call(lambda: gate.hear("", older))).result()
        assert gate.pin is not None
        assert gate.pin.number == int(now + 10)
        averager.shutdown()


async def _call(function: Any) -> Any:
    return function()
