"""Work whose result is the drift of the model: how far inner steps have moved it from the anchor (DiLoCo)."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.exchange import Vector
from shoal.averaging.residual import Residual
from shoal.cluster.whole import local
from shoal.compression import Compression, TensorRole, plan_codecs
from shoal.flat import (
    FlatBuffer,
    Layout,
    MemoryWatch,
    after_loading,
    before_loading,
    holders_of,
    is_finite,
    members_of,
    names_of_members,
    pick_kernels,
    without_hooks,
)
from shoal.optim._torch import foreach_mul_, mark_as_stepped
from shoal.optim.accumulator import in_grad
from shoal.optim.as_saved import load_as_saved
from shoal.optim.closures import Closure
from shoal.optim.diloco import DiLoCo
from shoal.optim.exact_norm import norm_of
from shoal.optim.loads import Loads, hash_of
from shoal.optim.loss_steps import LossSteps
from shoal.optim.pieces import Pieces
from shoal.optim.result import StepResult
from shoal.optim.work import Batch, Loadable, Stepper, Work
from shoal.outer import ExactSGD

log = logging.getLogger(__name__)

BLOCK_ELEMENTS = 1 << 17  # of the blocks in which the model follows its anchor


class InnerSchedule:
    """A scheduler of the inner optimizer. Its position follows from the run's progress and not from this peer's own
    steps, so a newcomer has the same learning rate as the others.

    Args:
        scheduler: a scheduler that has not been stepped yet.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler, self._at = scheduler, 0
        self._begin = copy.deepcopy(scheduler.state_dict())
        self._rates = [group["lr"] for group in scheduler.optimizer.param_groups]

    def rewind(self) -> None:
        """Go back to the beginning. The learning rates go back, too, because many schedulers multiply the present
        rate."""
        self.scheduler.load_state_dict(copy.deepcopy(self._begin))
        for group, rate in zip(self.scheduler.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._at = 0

    def follow(self, position: int) -> None:
        """Step the scheduler until it has made `position` steps. If it has made more, start from its beginning."""
        if position < self._at:
            self.rewind()
        if position > self._at:
            mark_as_stepped(self.scheduler.optimizer)  # other peers may have made these steps
        for _ in range(position - self._at):
            self.scheduler.step()
        self._at = position


@dataclass(frozen=True, slots=True)
class Inner:
    """The user's own optimizer, which makes the inner steps.

    Attributes:
        optimizer: the optimizer.
        scheduler: its scheduler, or None.
        on_host: if it steps copies on the host, the copies of the trained parameters.
        memory: the flat memory of the model, if there are such copies.
    """

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    on_host: Sequence[Tensor] = ()
    memory: FlatBuffer | None = None


@dataclass(frozen=True, slots=True)
class Anchors:
    """The common state of all peers, from which each model drifts.

    Attributes:
        trained: the anchor of each trained parameter, on the host; in float32 if the parameter's dtype is less exact.
        optimizer: the optimizer of the anchors.
        frozen: the frozen parameters of the model that are part of the state, each with the copy of it.
    """

    trained: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    frozen: Sequence[tuple[Tensor, Tensor]] = ()


class Drift(Work):
    """The anchor minus the model: how far inner steps have moved the model from the anchor. Nothing is lost when a
    round fails, because the model stays where it is.

    "To take the drift" means to compute it into the memory that the round reads. A fragment is a part of the model that
    rounds average in its turn. Parameters have numbers: their places in `model`.

    Args:
        shoal_optimizer, pieces: see `Work`. The pieces are what inner steps move.
        choice: the user's options.
        inner: makes the inner steps.
        model: the trained pieces.
        anchors: their anchors.
        compression: the codec of drifts in a round.
        error_feedback: see `Vector`.
        turns: for each fragment, the numbers of the parameters in each of its vectors. By default the fragments of
            `choice`, each in one vector.
        watched: the trained parameters of the model, into which users load checkpoints.

    Attributes:
        fragments: for each vector, the numbers of its parameters.
        samples, steps: the samples and inner steps since the drift was last taken.
        is_exact: whether the outer optimizer makes the same bits on every machine.
    """

    samples = 0.0
    is_exact = False
    has_anchor = steps_at_once = True
    called = ("inner steps", "it goes back to the anchor, and joins without them")

    def __init__(
        self,
        shoal_optimizer: torch.optim.Optimizer,
        pieces: Pieces,
        choice: DiLoCo,
        inner: Inner,
        model: Sequence[Tensor],
        anchors: Anchors,
        compression: Compression,
        error_feedback: float | None = None,
        *,
        turns: Sequence[Sequence[Sequence[int]]] | None = None,
        watched: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(shoal_optimizer, pieces)
        self.choice = choice
        self.wrapped = self.inner = inner.optimizer
        self._model, self._anchors = list(model), list(anchors.trained)
        self._outer, self._frozen = anchors.optimizer, anchors.frozen
        self.schedule = None if inner.scheduler is None else InnerSchedule(inner.scheduler)
        self.is_exact = all(isinstance(member, ExactSGD) for member in members_of(self._outer))
        self._inner_steps = LossSteps(self.inner, of_epochs=False)
        if turns is None:
            turns = [[numbers] for numbers in fragments_of(choice.fragments, self._model)]
        self.fragments = [list(numbers) for turn in turns for numbers in turn]
        places = iter(range(len(self.fragments)))
        self._turns = [[next(places) for _ in turn] for turn in turns]
        pinned = any(tensor.device.type == "cuda" for tensor in model)
        self._vectors: list[Vector] = []
        for numbers in self.fragments:
            layout = Layout.of([self._anchors[number] for number in numbers]).on("cpu")
            codecs = plan_codecs(compression, layout, TensorRole.GRADIENT)
            self._vectors.append(Vector(layout, codecs, pinned=pinned, error_feedback=error_feedback))
        self._on_host, self._memory = list(inner.on_host), inner.memory
        self._is_stale = True  # whether the parameters in `_on_host` are older than the model's
        self._places = list(map(Tensor.data_ptr, self._model))  # in that memory
        self._watch = MemoryWatch()  # of the model since the last inner step, if `_on_host` has copies of it
        self._loads = Loads(watched, lambda: hash_of(local(tensor).detach().contiguous() for tensor in watched))
        self._is_apart = False  # whether the model may differ from the anchors even without new inner steps
        self.samples, self.steps = 0.0, 0
        self._brought = self._in_flight = (0.0, 0)
        self._epoch = 0
        self._taken_in = self._turns[0]  # the numbers of the vectors into which the drift was taken last
        self._taken: dict[int, Tensor] = {}  # the model at that time, on the host, if `mix="keep"` needs it
        self._before: list[Tensor] | None = None  # the old anchors, if the model has not followed the new ones yet
        self._scratch = torch.empty(3, BLOCK_ELEMENTS * 16, dtype=torch.uint8, device="cpu")

    # -- inner steps

    @property
    def steps_per_epoch(self) -> int | None:  # type: ignore[override]
        """See `Work`."""
        of_epoch = self.choice.steps_per_epoch
        return None if of_epoch is None else of_epoch - (0 if self._epoch else self.choice.delay)

    @property
    def progress(self) -> float:
        """See `Work`."""
        return self.samples if self.choice.inner_steps is None else float(self.steps)

    @property
    def has_moved(self) -> bool:  # type: ignore[override]
        """Whether the model may have a drift that no round has averaged: from inner steps, from fragments that had no
        turn since, or from the share of the last drift that `mix` has left."""
        return self._is_apart or self.steps + self._in_flight[1] > 0

    @property
    def is_at_start(self) -> bool:  # type: ignore[override]
        """Whether this rank has no part in any step yet. Then the model is the anchor."""
        return not self._epoch and not self.has_moved

    @property
    def result_is_due(self) -> bool:  # type: ignore[override]
        """See `Work`: with `DiLoCo(overlap=n)`, after n inner steps."""
        return self.steps >= self.choice.delay

    @property
    def result_may_wait(self) -> bool:  # type: ignore[override]
        """See `Work`."""
        return self.choice.delay > 0

    @property
    def follows_model(self) -> bool:  # type: ignore[override]
        """See `Work`. Later on, what the model has more is drift."""
        return self.is_at_start

    def _use(self, batch: Batch) -> None:
        self._admit(batch.scaler)
        self._pieces.check_groups()
        self.accumulate(batch.samples, batch.closure)

    def accumulate(self, samples: float, closure: Closure | None = None) -> None:
        """Make a step of the inner optimizer with the parameters' `.grad`, the mean over so many samples, or with those
        that `closure` leaves, see `LossSteps`."""
        with self.of_wrapped():
            if self._on_host or all(parameter.device.type == "cpu" for parameter in self._model):
                pick_kernels(self.inner)
            if closure is None:
                self.inner.step()
            else:
                self._inner_steps.make(closure, self._in_model)
                self._put_gradients()
        self._pieces.model_was_changed()
        self.samples += samples
        self.steps += 1
        self._follow_schedule()

    @contextlib.contextmanager
    def _in_model(self) -> Iterator[None]:
        """A call of the closure, which computes with the model: within this context, the model has the parameters and
        gradients of the inner optimizer; afterwards that has the model's."""
        with torch.no_grad():
            for model, host in zip(self._model, self._on_host, strict=False):
                model.copy_(host)
        self._put_gradients()
        yield
        for model, host in zip(self._model, self._on_host, strict=False):
            host.grad = None if model.grad is None else model.grad.to("cpu")

    @contextlib.contextmanager
    def of_wrapped(self) -> Iterator[None]:
        """See `Work`."""
        if self._on_host:
            self._take_to_host()
        yield
        for model, host in zip(self._model, self._on_host, strict=False):  # `_on_host` may be empty
            model.copy_(host)
        if self._memory is not None and self._is_in_memory:
            self._watch.keep(self._memory.flat)

    def _put_gradients(self) -> None:
        """Set the model's gradients to those of the inner optimizer on the host, which may have cleared them."""
        for model, host in zip(self._model, self._on_host, strict=False):
            model.grad = None if host.grad is None else host.grad.to(model.device, copy=True)

    def _take_to_host(self) -> None:
        memory = self._memory if self._is_in_memory else None
        is_stale = self._is_stale or memory is None or self._watch.is_written(memory.flat)  # by the user
        for host, model in zip(self._on_host, self._model, strict=True):
            if is_stale:
                host.copy_(model)
            host.grad = None if model.grad is None else model.grad.to("cpu")
        self._is_stale = False

    @property
    def _is_in_memory(self) -> bool:
        """Whether the model is where it was: users may have given parameters other memory."""
        return list(map(Tensor.data_ptr, self._model)) == self._places

    def begin(self, epoch: int) -> None:
        """See `Work`."""
        self._epoch = epoch
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        if self.schedule is None:
            return
        steps = self.steps_per_epoch
        made = 0 if steps is None else min(self.steps, steps)
        self.schedule.follow(self._epoch if steps is None else self.choice.steps_before(self._epoch) + made)

    # -- loaded by the user

    @property
    def was_loaded(self) -> bool:  # type: ignore[override]
        """See `Work`."""
        if not self._loads.changed_the_model:
            return False
        if self.is_at_start:
            self._loads.settle()
            return False
        return True

    def refuse_load(self) -> None:
        """See `Work`."""
        if self.was_loaded:
            raise RuntimeError(
                "a checkpoint was loaded into the model (load_state_dict) after the first inner step. DiLoCo would "
                "take its values for the result of inner steps, and one peer alone can't move the anchor that all "
                'share. Call one of these next: optimizer.load_state_dict(saved["optimizer"]), with the state that '
                "was saved with the model; "
                "optimizer.load_state_dict(optimizer.optimizer.state_dict()), to make the loaded values the anchor; "
                "optimizer.load_state_from_peers(), to continue from the run's state. Or load the old values back"
            )

    def settle_load(self) -> None:
        """See `Work`."""
        self._loads.settle()

    # -- the way into a round

    def vectors(self, epoch: int) -> Sequence[Vector]:
        """See `Work`."""
        return [self._vectors[place] for place in self._turns[epoch % len(self._turns)]]

    @property
    def all_vectors(self) -> Sequence[Sequence[Vector]]:
        """See `Work`."""
        return [self.vectors(turn) for turn in range(len(self._turns))]

    @torch.no_grad()
    def freeze(self) -> bool:
        """See `Work`: take the drift of this epoch's fragment for its rounds."""
        self._pieces.gather()
        self._taken_in = self._turns[self._epoch % len(self._turns)]
        for place in self._taken_in:
            for drift, number in zip(self._vectors[place].inputs.views(), self.fragments[place], strict=True):
                model = self._model[number]
                drift.copy_(model)
                torch.sub(as_model_has(self._anchors[number], model), drift, out=drift)
        if not self.has_moved:  # what the user has written since is not lost, even if no inner step follows
            self._is_apart = any(bool(flat.any()) for flat in self._flat)
        keeps = self.choice.is_in_background and self.choice.mix == "keep"
        self._taken = {number: self._model[number].detach().to("cpu", copy=True) for number in self._numbers if keeps}
        self._brought = self.samples, self.steps
        return all(is_finite(flat) for flat in self._flat)

    @property
    def _flat(self) -> list[Tensor]:
        """The memory into which the drift was taken last."""
        return [flat for place in self._taken_in for flat in self._vectors[place].inputs.flat]

    @torch.no_grad()
    def drop(self) -> None:
        """See `Work`: take zeros as the drift, and set the model to the anchor. If the inner optimizer's state is not
        finite either, drop it, because it would spoil the model again."""
        for flat in self._flat:
            flat.zero_()
        self.reset()
        self._follow_anchors()
        if not all(map(_has_finite_values, self.inner.state.values())):
            self.inner.state.clear()
        self._taken = {number: self._model[number].detach().to("cpu", copy=True) for number in self._taken}
        self._brought = self.samples, self.steps

    @property
    def _numbers(self) -> list[int]:
        """The numbers of the parameters whose drift was taken last."""
        return [number for place in self._taken_in for number in self.fragments[place]]

    def go_on(self) -> None:
        """See `Work`. The next inner steps belong to the next epoch."""
        self._in_flight, self.samples, self.steps = self._brought, 0.0, 0

    def take_back(self) -> None:
        """See `Work`."""
        self.samples, self.steps = self.samples + self._in_flight[0], self.steps + self._in_flight[1]
        self._in_flight = 0.0, 0

    def reset(self) -> None:
        """Drop the drift: the next `publish` sets the model to the anchor."""
        self._is_stale, self._is_apart = True, False
        self._in_flight, self.samples, self.steps, self._before = (0.0, 0), 0.0, 0, None

    # -- the way out

    def norms(self) -> list[float]:
        """See `Work`."""
        return [norm_of(self._vectors[place].outputs.views()) for place in self._taken_in]

    def step(self, state: Stepper, result: StepResult) -> None:
        """See `Work`."""
        state.step(self._as_grad(result.factor), result)

    @contextlib.contextmanager
    def _as_grad(self, factor: float) -> Iterator[None]:
        """Within, the `.grad` of the anchors in this fragment are a copy of the average drift, times `factor`, and
        those of the other anchors are None. Afterwards all `.grad` are what they were."""
        gradients: list[Tensor | None] = [None] * len(self._anchors)
        for place in self._taken_in:
            for number, average in zip(self.fragments[place], self._vectors[place].outputs.views(), strict=True):
                gradients[number] = average.clone()
        if factor < 1.0:
            foreach_mul_([gradient for gradient in gradients if gradient is not None], factor)
        with in_grad(self._anchors, gradients):
            yield

    def remember(self, anchors: Sequence[Tensor] = ()) -> None:
        """See `Work`.

        Args:
            anchors: what `copy_to_keep` has returned; by default it is called now.
        """
        # In the background modes, the model may move until `publish`.
        if self._before is None and (self.has_moved or self.choice.is_in_background):
            self._before = list(anchors) or self.copy_to_keep()

    def copy_to_keep(self) -> list[Tensor]:
        """See `Work`."""
        return [anchor.detach().clone() for anchor in self._anchors]

    @torch.no_grad()
    def publish(self) -> None:
        """See `Work`. If old anchors were remembered, the drift from these is added."""
        self._pieces.gather()
        for frozen, kept in self._frozen:
            frozen.copy_(kept)
        self._follow_anchors()

    @torch.no_grad()
    def _follow_anchors(self) -> None:
        self._pieces.spread()
        before, self._before, self._is_stale = self._before, None, True
        self._is_apart &= before is not None
        for number, (model, anchor) in enumerate(zip(self._model, self._anchors, strict=True)):
            if before is None:
                model.copy_(anchor)
            elif not torch.equal(before[number], anchor):
                for block in self._blocks(number):
                    block.values.sub_(block.as_model_has(before[number])).add_(block.of(anchor))
                    block.write()

    @torch.no_grad()
    def apply(self, *, used: bool, is_accumulating: bool) -> None:
        """See `Work`."""
        self._pieces.gather()
        if not used:
            self.take_back()
            self._follow_anchors()
            return
        self._is_stale, self._before = True, None
        mix = self.choice.mix
        self._is_apart = len(self._turns) > 1 or (mix != "keep" and mix > 0)
        for number in self._numbers:
            model, anchor = self._model[number], self._anchors[number]
            if isinstance(mix, int | float) and mix > 0:
                for block in self._blocks(number):
                    torch.lerp(block.of(anchor), block.values, float(mix), out=block.values)
                    block.write()
            elif self._taken:
                for block in self._blocks(number):
                    block.values.sub_(block.as_model_has(self._taken[number])).add_(block.of(anchor))
                    block.write()
            else:
                model.copy_(anchor)
        self._taken = {}
        if not self.choice.is_in_background:
            self.samples, self.steps = 0.0, 0
        self._in_flight = 0.0, 0
        self._pieces.spread()

    def abandon(self, *, used: bool) -> None:
        """See `Work`. If the average has this rank's drift, the others' state has it, too."""
        if used:
            self.reset()
            self.publish()

    def apply_last(self, *, used: bool | None) -> None:
        """See `Work`."""
        if used is not None:
            self.apply(used=used, is_accumulating=True)

    def use_theirs(self) -> None:
        """See `Work`."""
        self.apply(used=True, is_accumulating=True)

    def restart(self, *, keeps: bool) -> None:
        """See `Work`."""
        if keeps:
            self.take_back()
        else:
            self.reset()

    def again(self, samples: float) -> tuple[float, bool]:
        """See `Work`: take the drift once more, with the inner steps made since."""
        self.take_back()
        is_finite = self.freeze()
        samples = self.samples
        self.go_on()
        return samples, is_finite

    def _blocks(self, number: int) -> Iterator[_Block]:
        """The blocks of a parameter of the model, for a change that needs no memory of its own."""
        model = self._model[number].detach().view(-1)
        for start in range(0, model.numel(), BLOCK_ELEMENTS):
            yield _Block(model, slice(start, start + BLOCK_ELEMENTS), self._anchors[number].dtype, self._scratch)

    # -- saved and loaded

    def terms(self) -> dict[str, str]:
        """See `Work`."""
        return {"outer optimizer": names_of_members(self._outer)}

    def schemas(self) -> list[bytes]:
        """See `Work`."""
        return [*super().schemas(), repr(self.fragments).encode()]

    def saved(self) -> dict[str, Any]:
        """See `Work`."""
        return {"outer": copy.deepcopy(self._outer.state_dict()), "drift": self.state_dict()}

    def load_saved(self, state: Loadable, given: dict[str, Any], ours: dict[str, Any]) -> None:
        """See `Work`. If the dict has no anchor, the anchor becomes the model's parameters, and what the outer
        optimizer and `error_feedback` keep begins anew."""
        # The hooks of both come before anything changes: one that raises leaves everything as it was.
        outer = before_loading(self._outer, ours["outer"]) if "drift" in ours else None
        load_as_saved(self.inner, given)
        if self.schedule is not None:
            self.schedule.rewind()
        self.reset()
        state.follow_model()
        if outer is not None:
            with without_hooks(self._outer):
                self._outer.load_state_dict(outer)
            after_loading(self._outer)
            self.load_state_dict(ours["drift"])
        else:
            self._outer.state.clear()
            self.forget_residuals()

    def state_dict(self) -> dict[str, Any]:
        """The anchors, the samples and steps behind the drift, and the residuals of `error_feedback`."""
        return {
            "anchor": [anchor.detach().clone() for anchor in self._anchors],
            "samples": self.samples + self._in_flight[0],
            "steps": self.steps + self._in_flight[1],
            "residuals": [residual.values.clone() for residual in self._residuals()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned. Load the model's parameters before."""
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

    @torch.no_grad()
    def forget_residuals(self) -> None:
        """Begin anew with `error_feedback`: what was not sent yet belongs to another anchor."""
        for residual in self._residuals():
            residual.values.zero_()

    def _residuals(self) -> list[Residual]:
        return [residual for vector in self._vectors for residual in vector.residuals if residual is not None]


class _Block:
    """A block of a parameter of the model, in the dtype of its anchor on the host. It lies in given memory, so that
    nothing fails in the middle of a change because there is no memory.

    Args:
        model: the parameter, as a 1-D tensor.
        span: the elements of the block.
        dtype: the dtype of the anchor.
        scratch: the memory, for three blocks.

    Attributes:
        values: the values of the block, to be changed in place. `write` sets the parameter to them.
    """

    def __init__(self, model: Tensor, span: slice, dtype: torch.dtype, scratch: Tensor) -> None:
        self._model, self._span = model[span], span
        count = self._model.numel()
        self._rounded, exact, self._other = (
            memory.view(each)[:count] for memory, each in zip(scratch, (model.dtype, dtype, dtype), strict=True)
        )
        self._is_alike = model.dtype == dtype
        # From a device in two steps, because torch would make a copy to convert it.
        is_here = self._is_alike and model.device.type == "cpu"
        self.values = self._model if is_here else exact.copy_(self._rounded.copy_(self._model))

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor of the parameter's shape, as a view."""
        return tensor.view(-1)[self._span]

    def as_model_has(self, tensor: Tensor) -> Tensor:
        """These elements, rounded to the model's dtype, in the anchor's dtype; until the next call."""
        part = self.of(tensor)
        return part if self._is_alike else self._other.copy_(self._rounded.copy_(part))

    def write(self) -> None:
        """Set these elements of the parameter to the values."""
        if self.values is not self._model:
            self._model.copy_(self._rounded.copy_(self.values))


def _has_finite_values(state: Any) -> bool:
    """Whether an entry of an optimizer's state, of a parameter or of none, has no NaN or infinity."""
    values = state.values() if isinstance(state, Mapping) else [state]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def as_model_has(anchor: Tensor, model: Tensor) -> Tensor:
    """The anchor, rounded to the model's dtype, in the anchor's dtype."""
    return anchor if model.dtype == anchor.dtype else anchor.to(model.dtype).to(anchor.dtype)


def fragments_of(given: int | Sequence[Sequence[Tensor]], model: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the parameters in each fragment.

    Args:
        given: the number of fragments, to which the layers are dealt in turn; or a list of parameters for each.
        model: the trained parameters of the model.

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
    """The numbers of the parameters of each layer, in order. If two modules hold the same parameter (tied weights),
    they count as one layer, because the modules of a process have no order on which peers could agree."""
    held: dict[int, set[int]] = {}
    for holder in holders_of(model):
        held.setdefault(id(holder.module), set()).add(holder.index)
    layers: list[set[int]] = []
    for numbers in [*held.values(), *({number} for number in range(len(model)))]:
        tied = [layer for layer in layers if layer & numbers]
        layers = [layer for layer in layers if not layer & numbers] + [numbers.union(*tied)]
    return sorted(map(sorted, layers))
