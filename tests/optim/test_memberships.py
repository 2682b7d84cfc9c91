"""Memberships end, and are renewed in time: by a function, or from a file."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal.membership import Part
from shoal.membership.holder import Holder
from shoal.swarm import gate as gates
from tests.optim.closed_runs import Club
from tests.waiting import wait_until

SECOND = 1 / 86400  # of a day


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "LOOK_SECONDS", 0.1)


@pytest.fixture
def pair(club: Club) -> Iterator[tuple[shoal.DHT, shoal.DHT]]:
    """Two peers of the DHT with the identities a and b."""
    with (
        shoal.DHT(start=True, identity_path=club.identity("a")[0]) as one,
        shoal.DHT(one.get_visible_maddrs(), start=True, identity_path=club.identity("b")[0]) as other,
    ):
        yield one, other


def averager(dht: shoal.DHT, club: Club, membership: object) -> shoal.DecentralizedAverager:
    return shoal.DecentralizedAverager(
        [torch.ones(3)], dht, start=True, prefix=club.run_id, membership=membership, min_matchmaking_time=1.0
    )


def test_a_function_is_asked_again_off_the_event_loop_and_after_it_has_failed(
    club: Club, pair: tuple[shoal.DHT, shoal.DHT], caplog: pytest.LogCaptureFixture
) -> None:
    dht, asked = pair[0], []

    def ask() -> str:
        asked.append(threading.get_ident())
        if len(asked) == 2:
            raise RuntimeError("the service is down")
        return club.admit(dht.peer_id, days=4 * SECOND if len(asked) == 1 else 1.0)

    made = averager(dht, club, ask)
    try:
        first = club.gate(dht).holder.membership
        wait_until(lambda: club.gate(dht).holder.membership != first, 10.0)
    finally:
        made.shutdown()
    assert len(asked) == 3
    assert asked[0] == threading.get_ident()
    loop_thread = dht.reactor.submit(_thread()).result()
    assert loop_thread not in asked
    assert "could not be renewed, and is asked for again in 1 s: the service is down" in caplog.text


async def _thread() -> int:
    return threading.get_ident()


def test_a_file_is_read_again(club: Club, pair: tuple[shoal.DHT, shoal.DHT], tmp_path: Path) -> None:
    dht, file = pair[0], tmp_path / "membership"
    file.write_text(club.admit(dht.peer_id, days=4 * SECOND))
    made = averager(dht, club, file)
    try:
        later = club.admit(dht.peer_id)
        file.write_text(later + "\n")
        wait_until(lambda: club.gate(dht).holder.text == later, 10.0)
    finally:
        made.shutdown()


def test_who_expires_is_put_out_and_told_how_to_renew(
    club: Club, pair: tuple[shoal.DHT, shoal.DHT], caplog: pytest.LogCaptureFixture
) -> None:
    stays, ends = pair
    first = averager(stays, club, club.admit(stays.peer_id))
    second = averager(ends, club, club.admit(ends.peer_id, days=8 * SECOND))
    try:
        steps = [one.step(wait=False) for one in (first, second)]
        assert all(len(step.result(20.0)) == 2 for step in steps)
        wait_until(lambda: not club.gate(stays).admits(ends.peer_id.key), 20.0)
        swarm = first._engine.swarm
        assert swarm is not None
        wait_until(lambda: ends.peer_id.key not in swarm.peer.view.members, 5.0)
        with pytest.raises(shoal.AveragingError):
            first.step(timeout=2.0)
        advice = f"ask the run's owner for `shoal keys admit {club.run_id} {ends.peer_id}`"
        told = [r for r in caplog.records if r.levelno == logging.WARNING and advice in r.getMessage()]
        assert sum("has expired (" in record.getMessage() for record in told) == 1
        assert sum("membership of" in r.getMessage() and "expires 20" in r.getMessage() for r in told) == 1
        # With another membership it is a member again.
        second.shutdown()
        second = averager(ends, club, club.admit(ends.peer_id))
        steps = [one.step(wait=False) for one in (first, second)]
        assert all(len(step.result(30.0)) == 2 for step in steps)
    finally:
        first.shutdown()
        second.shutdown()


def test_a_function_that_never_returns_does_not_hold_up_the_end_of_the_process(club: Club) -> None:
    file, peer = club.identity("a")
    script = f"""
import threading, torch, shoal
from shoal.membership.holder import Holder
from shoal.swarm import gate
gate.LOOK_SECONDS, Holder.renew_at, asked = 0.1, 0.0, []
def ask():
    asked.append(None)
    if len(asked) > 1:
        print("asked again", flush=True)
        threading.Event().wait()
    return {club.admit(peer)!r}
dht = shoal.DHT(start=True, identity_path={file!r})
averager = shoal.DecentralizedAverager([torch.ones(3)], dht, start=True, prefix={club.run_id!r}, membership=ask)
while len(asked) < 2:
    threading.Event().wait(0.1)
averager.shutdown()
dht.shutdown()
"""
    # The time that it takes to import torch on a busy machine; without the end it would take for ever.
    ended = subprocess.run([sys.executable, "-c", script], timeout=60.0, capture_output=True, text=True, check=True)
    assert "asked again" in ended.stdout


def test_a_membership_that_was_replaced_is_asked_for_no_more(
    club: Club, pair: tuple[shoal.DHT, shoal.DHT], caplog: pytest.LogCaptureFixture
) -> None:
    dht = pair[0]
    first = averager(dht, club, club.admit(dht.peer_id, days=4 * SECOND))
    renew_at = club.gate(dht).holder.renew_at
    second = shoal.DecentralizedAverager(
        [torch.ones(3)], dht, start=True, prefix=f"{club.run_id}/other", membership=club.admit(dht.peer_id)
    )
    try:
        assert club.gate(dht).holder.renew_at > renew_at + 3600.0
        wait_until(lambda: time.time() > renew_at + 0.5, 10.0)
    finally:
        first.shutdown()
        second.shutdown()
    assert "give the new one" not in caplog.text


def test_who_expires_is_put_out_though_a_function_of_this_peers_user_never_returns(
    club: Club, pair: tuple[shoal.DHT, shoal.DHT], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, ends = pair
    asked: list[None] = []
    let_go = threading.Event()
    monkeypatch.setattr(Holder, "renew_at", 0.0)

    def ask() -> str:
        asked.append(None)
        if len(asked) > 1:
            let_go.wait(60.0)
        return club.admit(stays.peer_id)

    first = averager(stays, club, ask)
    second = averager(ends, club, club.admit(ends.peer_id, days=8 * SECOND))
    try:
        steps = [one.step(wait=False) for one in (first, second)]
        assert all(len(step.result(20.0)) == 2 for step in steps)
        wait_until(lambda: len(asked) > 1, 5.0)
        swarm = first._engine.swarm
        assert swarm is not None
        wait_until(lambda: ends.peer_id.key not in swarm.peer.view.members, 15.0)
    finally:
        let_go.set()
        first.shutdown()
        second.shutdown()


def test_a_revoked_member_is_lost_to_all_at_once(club: Club, pair: tuple[shoal.DHT, shoal.DHT]) -> None:
    stays, out = pair
    first, second = averager(stays, club, club.admit(stays.peer_id)), averager(out, club, club.admit(out.peer_id))
    try:
        control = first.step(wait=False)
        assert len(second.step()) == len(control.result(20.0)) == 2
        gate = club.gate(stays)
        revocations = club.owner.revoke([out.peer_id], None, shoal.get_dht_time())

        async def hear() -> None:
            gate.hear(revocations, "")

        stays.reactor.submit(hear()).result()
        assert not gate.admits(out.peer_id.key)
        swarm = first._engine.swarm
        assert swarm is not None
        assert out.peer_id.key not in swarm.peer.view.members
        assert not gate.learn(club.admit(out.peer_id, Part.TRAIN, ago=1.0), out.peer_id.key)
        assert gate.learn(club.admit(out.peer_id, Part.TRAIN, ago=-2.0), out.peer_id.key)
    finally:
        first.shutdown()
        second.shutdown()


def test_groups_within_a_closed_run(club: Club, pair: tuple[shoal.DHT, shoal.DHT]) -> None:
    made = [averager(dht, club, club.admit(dht.peer_id)) for dht in pair]
    try:
        for one in made:
            one.set_group_bits("01")
        steps = [one.step(wait=False) for one in made]
        assert all(len(step.result(20.0)) == 2 for step in steps)
        assert all(club.gate(dht).in_use for dht in pair)
    finally:
        for one in made:
            one.shutdown()
    assert not any(club.gate(dht).in_use for dht in pair)


def test_an_open_run_says_once_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.swarm.gates")
    with shoal.DHT(start=True) as dht:
        for _ in range(2):
            shoal.DecentralizedAverager([torch.ones(3)], dht, start=True, prefix="said once").shutdown()
    assert caplog.text.count("'said once' is an open run: whoever knows an address") == 1
