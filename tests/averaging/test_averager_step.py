"""A step of `DecentralizedAverager` when the user, another peer or the clock gets in its way."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from typing import Any

import pytest
import torch

import shoal
from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import StepControl
from shoal.swarm.protocol.contribution import Outcome, decode_gathered, encode_gathered, told
from shoal.swarm.protocol.messages import Commit
from tests.averaging.test_averager import averagers
from tests.swarm.rounds import TIP, begin_of, digest, keys, member, members


def test_steps_of_one_averager_wait_for_each_other() -> None:
    tensors = [[torch.full((5,), float(i))] for i in range(2)]
    with averagers(tensors, target_group_size=2, min_matchmaking_time=30.0) as (one, other):
        first, second = one.step(gather=1, wait=False), one.step(gather=2, wait=False)
        one.dht.reactor.submit(asyncio.sleep(0)).result(60.0)  # the reactor is not kept busy
        assert other.step(timeout=30.0)[one.peer_id] == 1
        assert not second.done()
        assert other.step(timeout=30.0)[one.peer_id] == 2
        assert len(first.result(60.0)) == len(second.result(60.0)) == 2


def test_a_step_that_waits_for_another_has_its_own_deadline() -> None:
    with averagers([[torch.zeros(2)]], min_matchmaking_time=1.0) as (peer,):
        first = peer.step(wait=False, timeout=20.0)
        with pytest.raises(shoal.AveragingError, match="the step before did not end"):
            peer.step(timeout=0.2, scheduled_time=shoal.get_dht_time())
        assert not first.done()


def test_rounds_that_fail_at_once_are_not_tried_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    with averagers([[torch.zeros(2)]]) as (peer,):
        tried = []

        async def fails(*args: Any) -> Outcome:
            tried.append(args)
            raise shoal.AveragingError("no")

        monkeypatch.setattr(peer._engine.swarm, "average", fails)
        with pytest.raises(shoal.AveragingError, match="no"):
            peer.step(timeout=2.0, scheduled_time=shoal.get_dht_time())
        assert 2 <= len(tried) <= 45


def test_tensors_in_use_when_the_round_begins_fail_the_step_and_are_free_afterwards() -> None:
    tensors = [[torch.full((5,), float(i))] for i in range(2)]
    with averagers(tensors, target_group_size=2, next_chunk_timeout=0.5) as (one, other):
        with one.get_tensors():
            options: dict[str, Any] = {"timeout": 1.0, "allow_retries": False}
            now = shoal.get_dht_time()
            futures = [peer.step(wait=False, scheduled_time=now, **options) for peer in (one, other)]
            with pytest.raises(shoal.AveragingError):
                futures[0].result(60.0)
        time.sleep(0.2)  # whoever still waits for the lock has it by now, or had it
        assert one.lock_averaged_tensors.acquire(timeout=60.0), "nobody gave the lock back"
        one.lock_averaged_tensors.release()
        assert torch.equal(tensors[0][0], torch.zeros(5))


def test_who_gathers_garbage_is_refused_and_the_others_go_on() -> None:
    tensors = [[torch.full((5,), float(i))] for i in range(3)]
    with averagers(tensors, min_matchmaking_time=2.0) as peers:
        now = shoal.get_dht_time()
        garbage = StepControl(now + 2.0, now + 20.0, data_for_gather=b"\xc1")
        garbage.allow_allreduce()
        peers[2]._engine.step(garbage, None)
        futures = [peer.step(gather=number, wait=False, timeout=60.0) for number, peer in enumerate(peers[:2])]
        with pytest.raises(shoal.AveragingError, match="not plain data"):
            garbage.result(60.0)
        assert all(sorted(future.result(60.0).values()) == [0, 1] for future in futures)


def test_what_cannot_be_read_counts_as_nothing() -> None:
    """A coordinator that lets garbage through, or leaves a member out, harms nobody."""
    begin = begin_of(members(1, 2, 3))
    commit = Commit(TIP, begin.round, digest("a"), 3.0, keys(1, 2, 3), members(1, 2, 3))
    gathered = {keys(1)[0]: encode_gathered({"a": 1}), keys(2)[0]: b"\xc1", b"nobody": b"\x01"}
    outcome = Outcome(begin, commit, gathered, False, None)
    assert told(outcome) == {member(1).peer: {"a": 1}, member(2).peer: None, member(3).peer: None}


def test_gathered_data_is_plain_and_bounded() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (object(), 2**70, nested):
        with pytest.raises(ValueError, match="plain data"):
            encode_gathered(value)
    with pytest.raises(ValueError, match="gather takes"):
        encode_gathered(b"0" * 100_000)
    assert decode_gathered(encode_gathered({"x": [1, 2.5, b"y", None]})) == {"x": [1, 2.5, b"y", None]}
    assert decode_gathered(b"") is None


@pytest.mark.parametrize("what", ["averager", "DHT"])
def test_a_step_that_is_interrupted_by_a_shutdown_says_so(what: str) -> None:
    with averagers([[torch.zeros(2)]]) as (peer,):
        future = peer.step(wait=False, timeout=100.0)

        def shut_down_when_both_are_under_way() -> None:
            while len(peer._engine._tasks) < 2:
                time.sleep(0.01)
            (peer if what == "averager" else peer.dht).shutdown()

        timer = threading.Thread(target=shut_down_when_both_are_under_way)
        timer.start()
        began = time.monotonic()
        with pytest.raises(shoal.AveragingError, match="shut down"):
            peer.step(timeout=100.0)
        with pytest.raises(shoal.AveragingError, match="shut down"):
            future.result(60.0)
        timer.join()
        assert time.monotonic() - began < 60.0
        assert peer.lock_averaged_tensors.acquire(timeout=60.0)


def test_who_cancels_a_step_finds_it_cancelled() -> None:
    with averagers([[torch.zeros(2)]]) as (peer,):
        future = peer.step(wait=False, timeout=20.0)
        assert future.cancel()
        with pytest.raises(shoal.AveragingError, match="no result"):
            peer.step(timeout=0.3, scheduled_time=shoal.get_dht_time())


def test_step_takes_its_arguments_as_the_reference_does() -> None:
    names = ["gather", "scheduled_time", "weight", "timeout", "allow_retries", "require_trigger", "wait"]
    assert list(inspect.signature(DecentralizedAverager.step).parameters)[1:] == names
    with averagers([[torch.zeros(2)]]) as (peer,):
        with pytest.raises(ValueError, match="require_trigger=True needs wait=False"):
            peer.step(require_trigger=True)
        future = peer.step(None, None, 1.0, 20.0, True, False, False)
        assert not isinstance(future, dict)
        assert future.cancel()
