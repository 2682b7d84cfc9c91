"""examples/admission.py admits volunteers by their codes: with a real service, and two real peers."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.admission import membership_from
from shoal.membership.membership import MEMBERSHIP
from tests.forked import ROOT
from tests.optim.closed_runs import Club
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, training
from tests.waiting import wait_until


@pytest.fixture
def url(club: Club, tmp_path: Path) -> Iterator[str]:
    """Of a service that knows the codes one, two and three."""
    club.owner.save(tmp_path / f"{club.run_id}.key")
    (tmp_path / "codes").write_text("one\ntwo\nthree\n")
    command = [
        sys.executable, "-m", "examples.admission", "--run", club.run_id, "--folder", str(tmp_path), "--codes",
        str(tmp_path / "codes"), "--members", str(tmp_path / "members"), "--port", "0",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_two_volunteers_with_codes_train_together(pool: Pool, club: Club, url: str) -> None:
    files = [club.identity(name)[0] for name in "ab"]
    admission = [[url, "one"], [url, "two"]]
    with training(pool, 2, run_id=club.run_id, identity=files, admission=admission, matchmaking_time=3.0) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.02)
        wait_until(lambda: all(sum(event.get("peers") == 2 for event in events(p)) >= 3 for p in peers.all))
        by_epoch([events(peer) for peer in peers.all])


def test_each_code_is_good_for_one_peer(club: Club, url: str) -> None:
    one, other = club.identity("a")[1], club.identity("b")[1]
    for _ in range(2):  # and for that one again
        assert MEMBERSHIP.read(membership_from(url, "one", one)(), club.owner.run).peer_id == one
    for code in ("one", "four", "", "\0"):
        with pytest.raises(PermissionError, match="ask the run's owner"):
            membership_from(url, code, other)() if code else _post(url, f"code=x&peer={other}")
    assert MEMBERSHIP.read(membership_from(url, "two", other)(), club.owner.run).peer_id == other


@pytest.mark.parametrize("body", ["x", "code=one", "code=one&peer=x", "code=one&code=two&peer=x", "a=b&" * 400])
def test_what_is_no_request_is_answered_with_what_to_send(url: str, body: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="Bad Request") as raised:
        urllib.request.urlopen(urllib.request.Request(url, body.encode()), timeout=10)
    raised.value.close()


def _post(url: str, body: str) -> None:
    try:
        urllib.request.urlopen(urllib.request.Request(url, body.encode()), timeout=10).close()
    except urllib.error.HTTPError as error:
        with error:
            raise PermissionError(error.read().decode()) from error
