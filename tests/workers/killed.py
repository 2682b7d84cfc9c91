"""A process that kills itself with SIGKILL in a phase of an epoch that a test names."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.swarm.protocol.actions import Send
from shoal.swarm.protocol.messages import Commit, Done, Part, Result
from shoal.swarm.protocol.participant import Participant
from shoal.swarm.swarm import Swarm
from shoal.transfer.transfer import _Fetch
from tests import telling


def die() -> None:
    time.sleep(0.05)  # what was sent before is on its way: the kernel has it
    telling.die()


def before_sending(act: Callable[[Swarm, Send], None]) -> None:
    """Arrange for that to be called before a swarm sends a message."""
    perform = Swarm._do

    def acting(self: Swarm, action: Any) -> None:
        if isinstance(action, Send):
            act(self, action)
        return perform(self, action)

    Swarm._do = acting  # type: ignore[method-assign]


def die_when_stepping(is_time: Callable[[], bool], kind: type) -> None:
    """Arrange for this process to be killed when it is about to step an optimizer of this kind, once it `is_time`."""

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer) is kind and is_time():
            die()

    register_optimizer_step_pre_hook(hook)


def die_when_sending(in_strand: bool, is_time: Callable[[], bool]) -> None:
    """Arrange for this process to be killed, once it `is_time`: in a strand's round when it is about to send a part of
    its gradients or, if it reduces, a result; or in the run's own round when it is about to say that it is done, or how
    the round has ended."""
    kinds = (Part, Result) if in_strand else (Done, Commit)

    def look(swarm: Swarm, action: Send) -> None:
        if ("/strand/" in swarm.peer.view.run_id) == in_strand and isinstance(action.message, kinds) and is_time():
            die()

    before_sending(look)


def die_when_committed(is_time: Callable[[], bool]) -> None:
    """Arrange for this process to be killed, once it `is_time`, when it knows that the run's own round has a result,
    and has not stepped with it."""
    advance = Participant.advance

    def advancing(self: Participant, commit: Commit) -> None:
        advance(self, commit)
        if "/strand/" not in self.view.run_id and is_time():
            die()

    Participant.advance = advancing  # type: ignore[method-assign]


def die_when_downloading() -> None:
    """Arrange for this process to be killed when the first bytes of a state arrive."""
    _Fetch.take = lambda *_: die()  # type: ignore[assignment, method-assign]


def die_in(phase: str, is_time: Callable[[], bool] = lambda: True, steps: type = torch.optim.AdamW) -> None:
    """Arrange for this process to be killed in a phase of these, or in none."""
    match phase:
        case "in a strand's round" | "in the run's round":
            die_when_sending(phase == "in a strand's round", is_time)
        case "committed":
            die_when_committed(is_time)
        case "stepping":
            die_when_stepping(is_time, steps)
        case "downloading":
            die_when_downloading()
