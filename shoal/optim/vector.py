"""The vector that a round of a run averages: which parts it has, and where they are in this peer's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.averaging.exchange import Exchange
from shoal.compression import CodecPlan
from shoal.optim.gradients import GradientBuffers, Gradients
from shoal.optim.replica import Replica
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.contribution import Fault, SendTo
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.rules import Rules


class EpochVector:
    """Gradients, buffers and state, in the order of `Rules.vector`.

    Args:
        me: this peer's key.
        rules: of the run.
        replica: has all but the gradients.
        gradients: those with rounds of their own are not in the run's.
    """

    def __init__(self, me: bytes, rules: Rules, replica: Replica, gradients: Gradients | None) -> None:
        self._me, self._rules, self._replica = me, rules, replica
        self._gradients = gradients if isinstance(gradients, GradientBuffers) else None

    def open(self, begin: Begin, send: SendTo, fault: Fault) -> Exchange:
        """The exchange of a round. Raises RuleBroken if it averages what is not due, or by another plan, or if no step
        can be made with its options."""
        epoch = begin.tip.epoch
        stepped = not self._rules.state_always and any(member.contributes for member in begin.members)
        if stepped and not self._rules.options_fit(begin.options):
            raise RuleBroken("BEGIN has options for the step that the parameter groups can't have")
        if begin.with_state and not self._rules.may_average_state(epoch):
            raise RuleBroken(f"BEGIN averages the state at the end of epoch {epoch}, where that is not due")
        if begin.with_state and not self._rules.state_always:
            self._replica.take_state()  # else it was taken before the JOIN
        parts: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], CodecPlan]] = []
        if self._gradients is not None:
            parts.append((self._gradients.mine, self._gradients.averaged, self._gradients.codecs))
        if self._rules.due_sizes and self._rules.is_due(epoch):
            buffers = self._replica.buffers
            parts.append((buffers.mine, buffers.averaged, buffers.codecs))
        if begin.with_state:
            state = self._replica.shared
            parts.append((state.mine, state.averaged, state.codecs))
        inputs = [flat for mine, _, _ in parts for flat in mine]
        outputs = [flat for _, averaged, _ in parts for flat in averaged]
        plan = sum((codecs for _, _, codecs in parts), CodecPlan((), 0))
        return Exchange.of(self._me, begin, inputs, outputs, plan, send, fault)
