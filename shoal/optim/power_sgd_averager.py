"""Averages gradients as products of two thin matrices (PowerSGD)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shoal.averaging.engine import Attempt
from shoal.averaging.exchange import Vector
from shoal.compression import plan_codecs
from shoal.dht.dht import DHT
from shoal.flat import Layout, neutral
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.loads import hash_of
from shoal.optim.settings import COUNT
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError, Behind
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.swarm import Swarm

Tensors = list[torch.Tensor]


class PowerSGDGradientAverager(GradientAverager):
    """A `GradientAverager` that sends two thin matrices instead of each large gradient M: (rows + columns) * rank
    numbers instead of rows * columns.

    A step is two rounds of one group. In the first round the members average P = M Q, where Q is the result of the last
    step. Each member then makes the columns of the averaged P orthonormal. In the second round they average Q = M^T P.
    The averaged gradient is P Q^T. Each member adds the part of its gradient that this loses, M - P (M^T P)^T, to its
    next gradient (error feedback).

    If either round fails, nothing changes: error feedback, Q and the averaged gradients change only when both rounds
    have succeeded. The result has the same bits on all members that compute alike (instruction set, torch, threads).

    Source: Vogels, Karimireddy and Jaggi 2019, PowerSGD, arXiv 1905.13727.

    Args:
        parameters: the parameters of the model, see `GradientAverager`. There you also find the arguments that are not
            described here.
        averager_rank: the number of columns of P and Q, at least 1.
        min_compression_ratio: the fraction of a tensor's elements that compression must save. Tensors that save less,
            and those with fewer than two dimensions, are averaged as they are.

    Attributes:
        rank: `averager_rank`.
        min_compression_ratio: as given.

    Raises:
        ValueError: as `GradientAverager`, or if `averager_rank` is less than 1.
    """

    @neutral
    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        averager_rank: int,
        *,
        dht: DHT,
        prefix: str,
        start: bool,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        min_compression_ratio: float = 0.5,
        averaged_grads: Sequence[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        if (beta := kwargs.get("error_feedback")) is not None:
            raise ValueError(f"error_feedback={beta} has no effect on the rounds of a {type(self).__name__}")
        self.rank, self.min_compression_ratio = COUNT.check("averager_rank", averager_rank), min_compression_ratio
        super().__init__(
            parameters,
            dht=dht,
            prefix=prefix,
            start=False,
            reuse_grad_buffers=reuse_grad_buffers,
            accumulate_grads_on=accumulate_grads_on,
            client_mode=client_mode,
            warn=warn,
            averaged_grads=averaged_grads,
            **kwargs,
        )
        gradients = self._vector.inputs.views()
        shapes = [matrix_shape(tuple(gradient.shape)) for gradient in gradients]
        saved = [1 - self.rank * sum(shape) / max(1, math.prod(shape)) for shape in shapes]
        wanted = [bool(g.dim() > 1 and part >= min_compression_ratio) for g, part in zip(gradients, saved, strict=True)]
        self._compressed, self._plain = ([n for n, one in enumerate(wanted) if one is yes] for yes in (True, False))
        self._shapes = [shapes[index] for index in self._compressed]
        # Shapes of P and of Q of each compressed gradient.
        lefts, rights = (
            [torch.empty(s[side], min(self.rank, *s), dtype=torch.float32, device="meta") for s in self._shapes]
            for side in (0, 1)
        )
        plain = [torch.empty_like(gradients[index], device="meta") for index in self._plain]
        layouts = [Layout.of(tensors).on("cpu") for tensors in (lefts, [*rights, *plain])]
        self._left, self._right = (Vector(layout, plan_codecs(self._compression, layout)) for layout in layouts)
        self._qs, self._errors = self._first()
        agreed = {"averager_rank": str(self.rank), "min_compression_ratio": f"{self.min_compression_ratio:g}"}
        self._average_by(self._two_rounds, self._left.sizes, **agreed)
        if start:
            self._start()

    @neutral
    def state_dict(self) -> dict[str, Any]:
        """What this averager carries from one step to the next. This call waits for a step that is under way.

        Returns:
            "q", equal at all members of the last step, and "errors", this peer's own. Each is a list of float32
            matrices on the CPU, one for each compressed gradient.
        """
        with self.lock_averaged_tensors:
            return {"q": list(self._qs), "errors": list(self._errors)}

    @neutral
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; with {}, as if no step had been made. Peers that continue from
        different steps have different Qs. They then begin with new Qs, as they do when a newcomer joins.

        Args:
            state_dict: from an averager of the same gradients and rank. It is copied.

        Raises:
            ValueError: if it is of other gradients, or of another rank. Then nothing has changed.
        """
        with self.lock_averaged_tensors:
            if not state_dict:
                self._qs, self._errors = self._first()
                return
            mine, given = _kinds({"q": self._qs, "errors": self._errors}), _kinds(state_dict)
            if given != mine:
                raise ValueError(f"this averager carries on {mine}, and was given {given}")
            copies = ([tensor.to("cpu", copy=True) for tensor in state_dict[name]] for name in ("q", "errors"))
            self._qs, self._errors = copies

    def _first(self) -> tuple[Tensors, Tensors]:
        """The Qs and errors of the first step; the Qs are the same at all peers."""
        errors = [torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in self._shapes]
        return self._random(bytes(16)), errors

    def _random(self, seed: bytes) -> Tensors:
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        views = self._right.inputs.views()[: len(self._compressed)]
        return [torch.randn(view.shape, generator=generator, dtype=torch.float32, device="cpu") for view in views]

    # -- a step

    async def _two_rounds(self, swarm: Swarm, attempt: Attempt) -> Outcome:
        async with contextlib.AsyncExitStack() as runs:
            step = _Step()

            async def begin_left() -> None:
                begin, mine = swarm.peer.participant.begin, attempt.joined
                if begin is None:
                    return
                # Each member joins the second run before it sends its part in the first. So no member can end the first
                # run and begin the second without a slower member.
                second = await runs.enter_async_context(self._second_run(begin))
                matrices: Tensors = []
                products = self._left.inputs.views()  # an auxiliary peer brings nothing, and keeps these
                if not self.auxiliary:
                    await self._read()
                    matrices, products = await asyncio.to_thread(self._lefts, self._common_qs(begin))
                if mine is not None and attempt.joined is mine:  # otherwise that round is over
                    step.run, step.matrices = second, matrices
                    _copy(self._left.inputs.views(), products)

            state = b"" if self.auxiliary else hash_of(self._qs)
            outcome = await attempt.average(swarm, self._left, begin_left, state)
            if outcome.missed or step.run is None:
                missed = "the first half of the step went on without this peer"
                raise AveragingError(missed) if attempt.control.tip is None else Behind(missed)
            if not self.auxiliary:
                # Orthonormal bases of the column spaces. If columns depend on each other, QR adds other directions.
                step.bases = await asyncio.to_thread(lambda: [torch.linalg.qr(p).Q for p in self._left.outputs.views()])

            async def begin_right() -> None:
                mine = attempt.joined
                products = await asyncio.to_thread(step.rights)
                if mine is not None and attempt.joined is mine and not self.auxiliary:
                    gradients = self._vector.inputs.views()
                    _copy(self._right.inputs.views(), [*products, *(gradients[index] for index in self._plain)])

            patience = self.min_matchmaking_time
            outcome = await attempt.average(step.run, self._right, begin_right, patience=patience)
            await attempt.take_tensors()
            if not self.auxiliary:
                await self._finish(step, counted=attempt.control.weight > 0 and not outcome.missed)
            return outcome

    def _second_run(self, begin: Begin) -> contextlib.AbstractAsyncContextManager[Swarm]:
        """The run of the second round, whose members are those of the first."""
        rules = replace(self._rules, sizes=self._right.sizes, target_group=len(begin.members), min_group=1)
        return self._runs.joined(f"{self.prefix}/{begin.round.hex()}", rules, begin.members)

    def _common_qs(self, begin: Begin) -> Tensors:
        """The Qs of the last step, if all members have the same; otherwise new ones, which are equal at all members."""
        pairs = zip(begin.members, begin.states, strict=True)
        states = {state for member, state in pairs if member.contributes}
        return self._qs if len(states) == 1 else self._random(begin.round)

    def _lefts(self, qs: Tensors) -> tuple[Tensors, Tensors]:
        """The gradients as matrices, plus the errors of the last step, and their products with `qs`."""
        gradients = self._vector.inputs.views()
        matrices = [
            gradients[index].reshape(shape).float() + error
            for index, shape, error in zip(self._compressed, self._shapes, self._errors, strict=True)
        ]
        return matrices, [matrix @ q for matrix, q in zip(matrices, qs, strict=True)]

    async def _finish(self, step: _Step, counted: bool) -> None:
        """Take over the result and the new errors: both rounds have succeeded."""
        count = len(self._compressed)
        own = self._right.inputs.views()[:count]
        averages = self._right.outputs.views()
        qs, plain = [view.clone() for view in averages[:count]], averages[count:]

        def products() -> tuple[Tensors, Tensors]:
            triples = zip(step.matrices, step.bases, own, strict=True)
            errors = [m - p @ q.T for m, p, q in triples] if counted else self._errors
            return [p @ q.T for p, q in zip(step.bases, qs, strict=True)], errors

        made, self._errors = await asyncio.to_thread(products)
        self._qs = qs
        outputs = self._vector.outputs.views()
        for index, average in zip(self._compressed + self._plain, [*made, *plain], strict=True):
            outputs[index].copy_(average.view(outputs[index].shape))
        self._write()


@dataclass
class _Step:
    """A step between its two rounds.

    Attributes:
        run: the run of the second round; None before the first round has begun.
        matrices: this peer's gradients plus the errors of its last step.
        bases: the averaged Ps, with orthonormal columns.
    """

    run: Swarm | None = None
    matrices: Tensors = field(default_factory=list)
    bases: Tensors = field(default_factory=list)

    def rights(self) -> Tensors:
        """This peer's Qs."""
        return [matrix.T @ base for matrix, base in zip(self.matrices, self.bases, strict=True)]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that stands for a tensor. The dimensions are split into two groups, so that the
    sum of rows and columns is smallest."""
    splits = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, max(2, len(shape)))]
    return min(splits, key=sum)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _kinds(tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Shapes and dtypes, as they are compared and shown."""
    return {
        name: [f"{tuple(t.shape)} {t.dtype}" if isinstance(t, torch.Tensor) else type(t).__name__ for t in values]
        for name, values in tensors.items()
    }
