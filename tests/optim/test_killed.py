"""Peers that are killed in one phase of an epoch each: the others have the same bits, and go on."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest

from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, five_more, gaps, training
from tests.soaked import only_in_soak
from tests.waiting import wait_until
from tests.workers.training import Phase

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded and delayed": {"offload_optimizer": True, "delay_grad_averaging": True},
    "diloco": {"inner_steps": 4, "target": None},
}
PHASES: list[Phase] = ["in the run's round", "committed", "stepping"]
MOST_SECONDS = 9.0  # more than usual, from one epoch to the next


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=[only_in_soak] if each == "plain" else []) for each in MODES]
)
def test_peers_that_are_killed_in_each_phase(pool: Pool, mode: str) -> None:
    with training(pool, 2 + len(PHASES), optimizer="adamw", **MODES[mode]) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: len(events(peers.all[0])) >= 4)
        survivors, victims = peers.all[:2], peers.all[2:]
        killed = time.monotonic()
        for victim, phase in zip(victims, PHASES, strict=True):
            victim.ask(Training.die_in, phase, outer=mode == "diloco")
        for newcomer in peers.add(1):
            newcomer.ask(Training.die_in, "downloading")
            newcomer.ask(Training.train, batch=8, pause=0.03)
            victims.append(newcomer)
        assert [victim.process.wait(100.0) for victim in victims] == [-9] * len(victims)
        states, histories = five_more(survivors)

    assert all(event["kind"] == "epoch" for history in histories for event in history), "a survivor had to download"
    by_epoch(histories)
    for history in histories:
        usual = median(gap for end, gap in gaps(history) if end < killed)
        assert max(gap for end, gap in gaps(history)[1:]) <= usual + MOST_SECONDS, (usual, gaps(history))
        assert [event["peers"] for event in history[-3:]] == [2, 2, 2]
    if mode == "plain":  # in the other modes, peers differ between the ends of epochs
        assert states[0] == states[1]
