"""Where a run has forked, nothing is thrown away, and both sides say so, once."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.optim.forks import TOLD
from shoal.optim.kept import read_kept
from shoal.swarm.protocol.tip import Tip
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model


class Peer:
    """A peer of the run, in this process."""

    def __init__(self, dht: shoal.DHT, **arguments: Any) -> None:
        self.model = make_model()
        self.optimizer = shoal.Optimizer(
            dht=dht, run_id="forked", target_batch_size=64, params=self.model.parameters(), optimizer=OPTIMIZERS["sgd"],
            matchmaking_time=1.0, averaging_timeout=5.0, **arguments,
        )  # fmt: skip
        self.events: list[Any] = []
        self.optimizer.on_event = self.events.append

    def step(self, samples: int = 64) -> None:
        backward(self.model, *fixed_batch(self.optimizer.local_epoch))
        self.optimizer.step(batch_size=samples)
        self.optimizer.zero_grad()

    @property
    def forks(self) -> list[shoal.ForkReport]:
        return [event for event in self.events if isinstance(event, shoal.ForkReport)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    """One with three epochs, and one that has just come."""
    with shoal.DHT(start=True) as one, shoal.DHT(one.get_visible_maddrs(), start=True) as other:
        first = Peer(one)
        for _ in range(3):
            first.step()
        second = Peer(other, kept_state_dir=tmp_path / "kept")
        yield first, second
        second.optimizer.shutdown()
        first.optimizer.shutdown()


def state_of(peer: Peer, **changes: Any) -> dict[str, Any]:
    saved = copy.deepcopy(peer.optimizer.state_dict())
    saved["state"]["local_epoch"] = 2
    saved["shoal"] |= {"samples": 128.0, "line": b"", **changes}
    return saved


@pytest.mark.long
def test_both_sides_of_a_fork_are_told_and_what_is_left_is_kept(
    pair: tuple[Peer, Peer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.fill_(0.5)
    second.optimizer.load_state_dict(state_of(first, lineage=os.urandom(32)))
    left, mine = second.optimizer.tip, flat(second.model).clone()
    second.step(8)
    second.step(8)
    first.step(8)
    first.step(8)
    (told,) = second.forks
    assert (told.stays, told.tip, told.samples) == (False, left, 128.0)
    assert told.other_tip.startswith("3:192:")
    assert told.other_members == (str(first.optimizer.dht.peer_id),)
    assert told.members == (str(second.optimizer.dht.peer_id),)
    (file,) = (tmp_path / "kept").iterdir()
    assert repr(str(file)) in told.kept
    (heard,) = first.forks
    assert (heard.stays, heard.tip, heard.other_tip) == (True, told.other_tip, left)
    assert heard.other_members == told.members
    assert caplog.text.count("has left its state of epoch 2 (128 samples) for that of epoch 3 (192 samples)") == 1
    assert caplog.text.count("the run has forked: ") == 1
    assert str(read_kept(file).snapshot.tip) == left
    assert not torch.equal(flat(second.model), mine)
    second.optimizer.load_kept_state(file)
    assert second.optimizer.tip == left
    assert torch.equal(flat(second.model), mine)


@pytest.mark.long
def test_an_ancestor_is_no_fork(pair: tuple[Peer, Peer], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = pair
    line = first.optimizer._state.line.lineages
    saved = state_of(first, lineage=line[1], samples=64.0)
    saved["state"]["local_epoch"] = 1  # nobody has the round that followed: it is not replayed
    second.optimizer.load_state_dict(saved)
    second.step(8)
    second.step(8)
    first.step(8)
    assert second.optimizer.tip == first.optimizer.tip
    assert first.forks == second.forks == []
    assert not (tmp_path / "kept").exists()
    assert "leads on from it: nothing is lost" in caplog.text


@pytest.mark.long
def test_a_newcomer_leaves_nothing(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    second.step(8)
    first.step(8)
    assert second.optimizer.tip == first.optimizer.tip
    assert second.optimizer._state.line.lineages == first.optimizer._state.line.lineages
    assert first.forks == second.forks == []


@pytest.mark.long
def test_a_member_that_makes_up_states_is_told_of_a_few_times(
    pair: tuple[Peer, Peer], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    liar = second.optimizer.dht.peer_id.key
    for _ in range(20):
        tips = [(liar, Tip(2, os.urandom(32), 1.0)) for _ in range(50)]
        first.optimizer._run.swarm.peer.tips.extend(tips)
        state = first.optimizer._state
        first.optimizer._epoch._pilot.forks.look(state.tip, state.line, [])
    assert 0 < len(first.forks) <= TOLD
    assert caplog.text.count("the run has forked: ") == len(first.forks)
