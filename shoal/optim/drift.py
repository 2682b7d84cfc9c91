"""How far inner steps have moved a peer's model from the anchor, and how the model follows the anchor's steps."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.exchange import Vector
from shoal.averaging.residual import Residual
from shoal.compression import Compression, TensorRole, plan_codecs
from shoal.flat import Layout, holders_of, is_finite, pick_kernels
from shoal.optim._torch import mark_as_stepped, writes_of
from shoal.optim.accumulator import clip, in_grad
from shoal.optim.diloco import DiLoCo
from shoal.optim.exact_norm import norm_of
from shoal.outer import ExactSGD

log = logging.getLogger(__name__)


class InnerSchedule:
    """A scheduler of the inner optimizer, at a position that follows from the run's progress and not from what this
    peer itself has done: so a newcomer's learning rate is that of the others.

    Args:
        scheduler: at its beginning.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler, self._at = scheduler, 0
        self._begin = copy.deepcopy(scheduler.state_dict())
        self._rates = [group["lr"] for group in scheduler.optimizer.param_groups]

    def rewind(self) -> None:
        """Go back to the beginning. Many schedulers multiply the present rate: it has to be the one that they made."""
        self.scheduler.load_state_dict(copy.deepcopy(self._begin))
        for group, rate in zip(self.scheduler.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._at = 0

    def follow(self, position: int) -> None:
        """Step the scheduler until it has made that many steps; where it has made more, from its beginning."""
        if position < self._at:
            self.rewind()
        if position > self._at:
            mark_as_stepped(self.scheduler.optimizer)  # by other peers, if not here
        for _ in range(position - self._at):
            self.scheduler.step()
        self._at = position


class Drift:
    """What this peer brings to the rounds of a run with an outer optimizer: in place of gradients, the anchor minus the
    model. Nothing of it is lost when a round fails, for the model stays where it is.

    The trainer's thread calls everything but `as_grad` and `use_local`, which belong to the step of the anchor.

    Args:
        choice: what the user has chosen.
        inner: the optimizer of the model's parameters.
        scheduler: of the inner optimizer, or None.
        model: the trained parameters of the model.
        anchors: the anchor of each: on the host, float32 for what is less exact.
        outer: the optimizer of the anchors.
        compression: how drifts travel.
        error_feedback: see `Vector`.
        on_host: with an inner optimizer on the host, what it steps in place of the model.
        turns: for each fragment, the numbers of the parameters in each of its vectors; by default the fragments of
            `choice`, each in one vector.

    Attributes:
        fragments: the numbers of the parameters that are averaged together, for each vector.
        samples, steps: behind the inner steps since the drift was last taken.
        is_exact: whether the outer optimizer's bits are the same on every machine.
    """

    def __init__(
        self,
        choice: DiLoCo,
        inner: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        model: Sequence[Tensor],
        anchors: Sequence[Tensor],
        outer: torch.optim.Optimizer,
        compression: Compression,
        error_feedback: float | None = None,
        *,
        on_host: Sequence[Tensor] = (),
        turns: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> None:
        self.choice, self.inner, self._model, self._anchors = choice, inner, list(model), list(anchors)
        self.schedule = None if scheduler is None else InnerSchedule(scheduler)
        self.is_exact = isinstance(outer, ExactSGD)
        if turns is None:
            turns = [[numbers] for numbers in fragments_of(choice.fragments, self._model)]
        self.fragments = [list(numbers) for turn in turns for numbers in turn]
        places = iter(range(len(self.fragments)))
        self._turns = [[next(places) for _ in turn] for turn in turns]
        pinned = any(tensor.device.type == "cuda" for tensor in model)
        self.vectors: list[Vector] = []
        for numbers in self.fragments:
            layout = Layout.of([self._anchors[number] for number in numbers]).on("cpu")
            codecs = plan_codecs(compression, layout, TensorRole.GRADIENT)
            self.vectors.append(Vector(layout, codecs, pinned=pinned, error_feedback=error_feedback))
        self._on_host = list(on_host)
        self._is_stale = True  # what is on the host
        self._written: list[tuple[int, int]] = []  # where the model's parameters are, and how often they were written
        self._is_apart = False  # whether the model may be elsewhere than at the anchors without inner steps
        self.samples, self.steps = 0.0, 0
        self._brought = self._in_flight = (0.0, 0)
        self._epoch = 0
        self._closed = self._turns[0]  # the numbers of the vectors into which the drift was taken last
        self._taken: dict[int, Tensor] = {}  # the fragment's model then, on the host, if it is to be kept
        self._before: list[Tensor] | None = None  # the anchors that the model still is at, if they have gone on

    # -- inner steps

    @property
    def steps_of_epoch(self) -> int | None:
        """The inner steps that this peer is to make in this epoch; None where samples are counted."""
        of_epoch = self.choice.steps_per_epoch
        return None if of_epoch is None else of_epoch - (0 if self._epoch else self.choice.delay)

    @property
    def progress(self) -> float:
        """What this peer has of the epoch: steps where they are counted, else samples."""
        return self.samples if self.choice.inner_steps is None else float(self.steps)

    @property
    def has_moved(self) -> bool:
        """Whether the model may have moved by what no round has taken: by inner steps, in fragments that had no turn
        since, or by the share of the last drift that has stayed."""
        return self._is_apart or self.steps + self._in_flight[1] > 0

    def accumulate(self, batch_size: float) -> None:
        """Make a step of the inner optimizer with the parameters' `.grad`, the mean over `batch_size` samples."""
        if self._on_host:
            self._take_to_host()
        if self._on_host or all(parameter.device.type == "cpu" for parameter in self._model):
            pick_kernels(self.inner)
        self.inner.step()
        for model, host in zip(self._model, self._on_host, strict=False):  # or none
            model.copy_(host)
        self._written = self._writes()
        self.samples += batch_size
        self.steps += 1
        self._follow()

    def _take_to_host(self) -> None:
        is_stale = self._is_stale or self._writes() != self._written  # the user has loaded weights
        for host, model in zip(self._on_host, self._model, strict=True):
            if is_stale:
                host.copy_(model)
            host.grad = None if model.grad is None else model.grad.to("cpu")
        self._is_stale = False

    def _writes(self) -> list[tuple[int, int]]:
        return [(model.data_ptr(), writes_of(model)) for model in self._model] if self._on_host else []

    def begin(self, epoch: int) -> None:
        """What is made from now on belongs to that epoch."""
        self._epoch = epoch
        self._follow()

    def _follow(self) -> None:
        if self.schedule is None:
            return
        steps = self.steps_of_epoch
        made = 0 if steps is None else min(self.steps, steps)
        self.schedule.follow(self._epoch if steps is None else self.choice.steps_before(self._epoch) + made)

    # -- the way into a round

    def vector(self, epoch: int) -> Vector:
        """What the round that ends this epoch averages."""
        (place,) = self._turns[epoch % len(self._turns)]
        return self.vectors[place]

    def close(self, scale: float = 1.0) -> float:
        """Take the drift of this epoch's fragment for its round.

        Returns:
            The number of samples behind it: 0, with zeros in its place, if the model is not finite any more; then it
            goes back to the anchor.
        """
        if not self.take():
            self.go_back()
        return self.samples

    @torch.no_grad()
    def take(self) -> bool:
        """Take the drift of this epoch's fragment; whether it is finite."""
        self._closed = self._turns[self._epoch % len(self._turns)]
        for place in self._closed:
            for drift, number in zip(self.vectors[place].inputs.views(), self.fragments[place], strict=True):
                model = self._model[number]
                drift.copy_(model)
                torch.sub(as_model_has(self._anchors[number], model), drift, out=drift)
        keeps = self.choice.is_in_background and self.choice.mix == "keep"
        self._taken = {number: self._model[number].detach().to("cpu", copy=True) for number in self._numbers if keeps}
        self._brought = self.samples, self.steps
        return all(is_finite(flat) for place in self._closed for flat in self.vectors[place].inputs.flat)

    @torch.no_grad()
    def go_back(self) -> None:
        """The model is not finite any more: take zeros, and set it to the anchor. An inner optimizer whose state is not
        finite either begins anew, for it would make the next model so, too."""
        for place in self._closed:
            for flat in self.vectors[place].inputs.flat:
                flat.zero_()
        self.reset()
        self.publish()
        if not all(map(_has_finite_values, self.inner.state.values())):
            self.inner.state.clear()
        self._taken = {number: self._model[number].detach().to("cpu", copy=True) for number in self._taken}
        self._brought = self.samples, self.steps

    @property
    def _numbers(self) -> list[int]:
        """Of the parameters whose drift was taken last."""
        return [number for place in self._closed for number in self.fragments[place]]

    def go_on(self) -> None:
        """What was taken is in a round now, and the next inner steps belong to the next epoch."""
        self._in_flight, self.samples, self.steps = self._brought, 0.0, 0

    def take_back(self) -> None:
        """What was taken was in no round: it counts for the next one."""
        self.samples, self.steps = self.samples + self._in_flight[0], self.steps + self._in_flight[1]
        self._in_flight = 0.0, 0

    def reset(self) -> None:
        """Drop what the model has moved: `publish` sets it to the anchor."""
        self._is_stale, self._is_apart = True, False
        self._in_flight, self.samples, self.steps, self._before = (0.0, 0), 0.0, 0, None

    def average(self, timeout: float, over: Callable[[], Future[None]]) -> bytes:
        """Nothing to do before the run's round, which averages what was closed and names the average."""
        return b""

    def use_local(self) -> None:
        """Take this peer's own drift as the average: there was no round."""
        for place in self._closed:
            self.vectors[place].use_local()

    # -- the way out

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[Tensor], max_norm: float | None = None) -> Iterator[None]:
        """Within, the `.grad` of the anchors (`targets`) in this fragment are a copy of the average drift, and those of
        the others None; afterwards what they were.

        Args:
            max_norm: if the norm of the average is larger, it is scaled down to that.
        """
        gradients: list[Tensor | None] = [None] * len(targets)
        for place in self._closed:
            for number, average in zip(self.fragments[place], self.vectors[place].outputs.views(), strict=True):
                gradients[number] = average.clone()
        if max_norm is not None:
            clip([gradient for gradient in gradients if gradient is not None], max_norm, norm=norm_of)
        with in_grad(targets, gradients):
            yield

    @torch.no_grad()
    def remember(self) -> None:
        """The anchors are about to go on without this peer's drift, which is to stay what it is."""
        if self._before is None and (self.has_moved or self.choice.is_in_background):  # then it may move meanwhile
            self._before = [anchor.detach().clone() for anchor in self._anchors]

    def forget(self) -> None:
        """The anchors have not gone on."""
        self._before = None

    @torch.no_grad()
    def publish(self) -> None:
        """Have the model follow the anchors. What it has moved from those that were remembered stays."""
        before, self._before, self._is_stale = self._before, None, True
        self._is_apart &= before is not None
        for number, (model, anchor) in enumerate(zip(self._model, self._anchors, strict=True)):
            if before is None:
                model.copy_(anchor)
            elif not torch.equal(before[number], anchor):
                moved = model.to("cpu", anchor.dtype) - as_model_has(before[number], model)
                model.copy_(moved.add_(anchor))

    @torch.no_grad()
    def apply(self, *, used: bool) -> None:
        """The anchors have made the step of an epoch: have the model go on from there.

        Args:
            used: whether this peer's drift is in that step.
        """
        if not used:
            self.take_back()
            self.publish()
            return
        self._is_stale, self._before = True, None
        mix = self.choice.mix
        self._is_apart = len(self._turns) > 1 or (mix != "keep" and mix > 0)
        for number in self._numbers:
            model, anchor = self._model[number], self._anchors[number]
            if isinstance(mix, int | float) and mix > 0:
                model.copy_(torch.lerp(anchor, model.to("cpu", anchor.dtype), float(mix)))
            elif self._taken:
                moved = model.to("cpu", anchor.dtype) - self._taken[number].to(anchor.dtype)
                model.copy_(moved.add_(anchor))
            else:
                model.copy_(anchor)
        self._taken = {}
        if not self.choice.is_in_background:
            self.samples, self.steps = 0.0, 0
        self._in_flight = 0.0, 0

    # -- saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """The anchors, and what the model's drift from them is made of."""
        return {
            "anchor": [anchor.detach().clone() for anchor in self._anchors],
            "samples": self.samples + self._in_flight[0],
            "steps": self.steps + self._in_flight[1],
            "residuals": [residual.values.clone() for residual in self._residuals()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; the model's parameters are loaded already."""
        self.reset()
        for anchor, saved in zip(self._anchors, state["anchor"], strict=True):
            anchor.copy_(saved)
        self.samples, self.steps = float(state["samples"]), int(state["steps"])
        pairs = zip(self._model, self._anchors, strict=True)
        self._is_apart = any(not torch.equal(model.to("cpu"), anchor.to(model.dtype)) for model, anchor in pairs)
        residuals, given = self._residuals(), state.get("residuals", [])
        if [residual.values.shape for residual in residuals] == [saved.shape for saved in given]:
            for residual, saved in zip(residuals, given, strict=True):
                residual.values.copy_(saved)
        elif residuals and given:
            log.warning("the residuals of error_feedback are those of other fragments: they begin anew")

    def _residuals(self) -> list[Residual]:
        return [residual for vector in self.vectors for residual in vector.residuals if residual is not None]


def _has_finite_values(state: Any) -> bool:
    """Whether an optimizer's state of one parameter has no NaN or infinity."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def as_model_has(anchor: Tensor, model: Tensor) -> Tensor:
    """The anchor with what the model's dtype leaves of it."""
    return anchor if model.dtype == anchor.dtype else anchor.to(model.dtype).to(anchor.dtype)


def fragments_of(given: int | Sequence[Sequence[Tensor]], model: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the parameters in each fragment: with a number of fragments, the layers are dealt in turn.

    Raises:
        ValueError: if there are fewer layers than fragments, or if the lists do not have every parameter once.
    """
    if not isinstance(given, int):
        numbers = {id(parameter): number for number, parameter in enumerate(model)}
        named = [[numbers.get(id(parameter)) for parameter in fragment] for fragment in given]
        found = [number for fragment in named for number in fragment if number is not None]
        if not all(named) or sorted(found) != list(range(len(model))) or len(found) != sum(map(len, named)):
            raise ValueError(
                f"DiLoCo(fragments=…): give lists, none empty, that have each of the {len(model)} trained parameters "
                "once"
            )
        return [[number for number in fragment if number is not None] for fragment in named]
    layers = layers_of(model) if given > 1 else [list(range(len(model)))]
    if len(layers) < given:
        raise ValueError(f"DiLoCo(fragments={given}): the model has {len(layers)} layers with trained parameters")
    dealt: list[list[int]] = [[] for _ in range(given)]
    for turn, layer in enumerate(layers):
        dealt[turn % given] += layer
    return dealt


def layers_of(model: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the parameters of each layer, in their order. A parameter that two modules hold (tied weights)
    makes one layer of both: the modules of a process have no order on which peers could agree."""
    held: dict[int, set[int]] = {}
    for holder in holders_of(model):
        held.setdefault(id(holder.module), set()).add(holder.index)
    layers: list[set[int]] = []
    for numbers in [*held.values(), *({number} for number in range(len(model)))]:
        tied = [layer for layer in layers if layer & numbers]
        layers = [layer for layer in layers if not layer & numbers] + [numbers.union(*tied)]
    return sorted(map(sorted, layers))
