"""What every kind of `Work` promises, on plain tensors: no swarm, no run, no processes."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.averaging.exchange import Vector
from shoal.compression import NoCompression
from shoal.flat import FlatBuffer
from shoal.optim.accumulator import EpochGradients
from shoal.optim.closures import Closure
from shoal.optim.drift import Anchors, Drift, Inner
from shoal.optim.grad_averager import AveragerSum
from shoal.optim.gradients import Gradients
from shoal.optim.local_steps import LocalSteps
from shoal.optim.pieces import Pieces
from shoal.optim.result import StepResult
from shoal.optim.work import Batch, Work
from shoal.swarm.protocol.loss import Loss, LossKind
from shoal.swarm.protocol.tip import Tip

INNER, OUTER = 0.125, 0.5  # learning rates that multiply exactly
GENESIS = Tip.genesis("work")


class Plain(Pieces):
    """The model's own parameters, wherever they are."""

    def __init__(self, model: Sequence[Tensor]) -> None:
        self.model, self.done = model, list[str]()
        self.in_backward = [p for p in model if p.requires_grad], [p for p in model if not p.requires_grad]

    def name_of(self, what: int | Tensor) -> str:
        return "the first layer"

    def check(self) -> None:
        self.done.append("check")

    def check_groups(self) -> None:
        self.done.append("check groups")

    def gather(self, *, anew: bool = False) -> None:
        self.done.append("gather")

    def spread(self) -> None:
        self.done.append("spread")


@dataclass
class Steps:
    """Stands in for the state: steps `optimizer`, and keeps what it was given."""

    optimizer: torch.optim.Optimizer
    pairs: Sequence[tuple[Tensor, Tensor]]  # what it steps, and the model
    gradients: list[Tensor | None] = field(default_factory=list)
    averages: int = 0
    loaded: list[dict[str, Any]] = field(default_factory=list)

    def step(self, gradients: AbstractContextManager[None], result: StepResult) -> None:
        with gradients:
            self.gradients = [None if own.grad is None else own.grad.clone() for own, _ in self.pairs]
            self.optimizer.step()

    def take_average(self, result: StepResult) -> None:
        self.averages += 1

    def load_stepped(self, given: dict[str, Any]) -> None:
        self.loaded.append(given)

    @torch.no_grad()
    def follow_model(self) -> None:
        for own, model in self.pairs:
            own.copy_(model)


@dataclass
class Made:
    work: Work
    model: list[nn.Parameter]
    frozen: nn.Parameter
    pieces: Plain
    state: Steps
    adds_up: bool = False  # whether `.grad` itself accumulates
    averager: AveragerSum | None = None

    def backward(self, value: float) -> None:
        """Each element gets the gradient `value`; autograd adds it to what is there."""
        for parameter in self.model:
            if not self.adds_up:
                parameter.grad = None
        with torch.enable_grad():
            torch.stack([value * parameter.sum() for parameter in self.model]).sum().backward()

    def batch(self, value: float, samples: float, **given: Any) -> bool:
        self.backward(value)
        return self.work.add(Batch(samples, **given))

    def average_alone(self, epoch: int = 0) -> None:
        """A round in which nobody else is, with what was closed."""
        if self.averager is not None:
            self.averager.begin()
        for vector in self.work.vectors(epoch):
            vector.use_local()

    def end(self, epoch: int = 0) -> None:
        """End an epoch, in which this rank is alone."""
        is_in_background = isinstance(self.work, Drift) and self.work.choice.is_in_background
        assert self.work.freeze()
        if is_in_background:
            self.work.go_on()
        self.average_alone(epoch)
        self.work.step(self.state, StepResult(GENESIS.after(bytes(32), 1.0)))
        self.work.apply(used=True, is_accumulating=is_in_background)
        self.work.begin(epoch + 1)

    @property
    def values(self) -> list[float]:
        """Of each parameter, the value of its elements, which are all equal."""
        assert all(bool((parameter == parameter.view(-1)[0]).all()) for parameter in self.model)
        return [float(parameter.detach().view(-1)[0]) for parameter in self.model]


def model_of() -> tuple[list[nn.Parameter], nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2, 2))], nn.Parameter(
        torch.ones(2), requires_grad=False
    )


def gradients(parts: int = 1, *, reuse: bool = False, **given: Any) -> Made:
    model, frozen = model_of()
    pieces, optimizer = Plain([*model, frozen]), torch.optim.SGD(model, lr=OUTER)
    targets = [[each] for each in model] if parts == 2 else [model]
    sums = [EpochGradients(part, NoCompression(), reuse=reuse, **given) for part in targets]
    work = Gradients(optimizer, pieces, sums, targets, optimizer, reuse=reuse, is_exact=parts == 2)
    return Made(work, model, frozen, pieces, Steps(optimizer, [(each, each) for each in model]), adds_up=reuse)


_dht: list[shoal.DHT] = []  # one for all, see `dht`


def of_averager() -> Made:
    model, frozen = model_of()
    pieces, optimizer = Plain([*model, frozen]), torch.optim.SGD(model, lr=OUTER)
    total = AveragerSum(shoal.GradientAverager, model, dht=_dht[0], prefix="work", min_group_size=1)
    work = Gradients(optimizer, pieces, [total], [model], optimizer)
    state = Steps(optimizer, [(each, each) for each in model])
    return Made(work, model, frozen, pieces, state, averager=total)


def local_steps() -> Made:
    model, frozen = model_of()
    pieces, optimizer = Plain([*model, frozen]), torch.optim.SGD(model, lr=INNER)

    def make(closure: Closure | None) -> None:
        optimizer.step()

    work = LocalSteps(optimizer, pieces, optimizer, make)
    return Made(work, model, frozen, pieces, Steps(optimizer, [(each, each) for each in model]))


def drift(*, on_host: bool = False, **given: Any) -> Made:
    model, frozen = model_of()
    anchors = [nn.Parameter(each.detach().clone()) for each in model]
    outer = torch.optim.SGD(anchors, lr=OUTER)
    if on_host:
        memory = FlatBuffer.adopt(model)
        host = [nn.Parameter(each.detach().clone()) for each in model]
        inner = Inner(torch.optim.SGD(host, lr=INNER), None, host, memory)
    else:
        inner = Inner(torch.optim.SGD(model, lr=INNER))
    pieces = Plain([*model, frozen])
    if given.get("fragments") == 2:
        given["fragments"] = [[model[0]], [model[1]]]
    choice = shoal.DiLoCo(**given)
    work = Drift(inner.optimizer, pieces, choice, inner, model, Anchors(anchors, outer), NoCompression(), watched=model)
    return Made(work, model, frozen, pieces, Steps(outer, list(zip(anchors, model, strict=True))))


KINDS: dict[str, Callable[[], Made]] = {
    "gradients": gradients,
    "of two parts": lambda: gradients(2),
    "in .grad": lambda: gradients(reuse=True),
    "apart": lambda: gradients(apart=True),
    "of an averager": of_averager,
    "local steps": local_steps,
    "drift": drift,
    "drift in fragments": lambda: drift(fragments=2),
    "drift mixed": lambda: drift(mix=0.5),
    "drift kept": lambda: drift(mix="keep", overlap="free"),
    "drift overlapping": lambda: drift(inner_steps=2, overlap=1),
    "drift on the host": lambda: drift(on_host=True),
}
GRADIENTS = list(KINDS)[:5]
IN_BACKGROUND = ["in .grad", "apart", "of an averager", "local steps", "drift kept", "drift overlapping"]
MEANS = {"in .grad": 2.5}  # of the batches of `twice`; a weighted mean elsewhere


@pytest.fixture(scope="module", autouse=True)
def dht() -> Iterator[None]:
    with shoal.DHT(start=True) as dht:
        _dht.append(dht)
        yield
        _dht.clear()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """As in `Optimizer.step`."""
    with torch.no_grad():
        yield


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(kind: str) -> Made:
    return KINDS[kind]()


def is_drift(made: Made) -> bool:
    return isinstance(made.work, Drift)


def twice(made: Made) -> None:
    """Two batches, of unlike numbers of samples."""
    assert made.batch(1.0, 2.0)
    assert made.batch(4.0, 6.0)


# -- within an epoch


def test_samples_are_counted_until_a_reset(made: Made) -> None:
    assert made.work.samples == made.work.progress == 0.0
    twice(made)
    assert made.work.samples == 8.0
    assert made.work.progress == (2.0 if made.work.steps_per_epoch else 8.0)
    made.work.reset()
    assert made.work.samples == made.work.progress == 0.0
    assert made.batch(1.0, 2.0)
    assert made.work.samples == 2.0


def test_a_batch_without_gradients_does_not_count(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    before = made.values
    for _ in range(2):
        assert not made.work.add(Batch(4.0))
    assert (made.work.samples, made.values) == (0.0, before)
    assert caplog.text.count("step was told of 4 samples, and no parameter has a gradient") == 1
    assert made.batch(1.0, 2.0)


def test_a_frozen_parameter_with_a_gradient_is_refused(made: Made) -> None:
    before = made.values
    made.frozen.grad = torch.ones(2)
    with pytest.raises(ValueError, match="was frozen"):
        made.batch(1.0, 2.0)
    assert (made.work.samples, made.values) == (0.0, before)


def test_the_parameters_are_checked_once_in_an_epoch(made: Made) -> None:
    twice(made)
    assert made.pieces.done.count("check") == 1
    made.end()
    made.batch(1.0, 2.0)
    assert made.pieces.done.count("check") == 2


class Scaler:
    """Stands in for a `GradScaler`."""

    def __init__(self, *, overflows: bool) -> None:
        self._overflows, self.released = overflows, 0

    def admits(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._overflows

    def get_scale(self) -> float:
        return 4.0

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        self.released += 1


def test_a_batch_that_overflows_does_not_count(kind: str, made: Made) -> None:
    assert made.batch(1.0, 2.0)
    before = made.values
    assert not made.batch(1e30, 6.0, scaler=Scaler(overflows=True))
    assert made.values == before
    assert made.work.samples == (0.0 if made.adds_up else 2.0), "autograd has added it to the others in .grad"


def test_the_sum_in_grad_is_unscaled_at_its_end() -> None:
    made, scaler = gradients(reuse=True), Scaler(overflows=False)
    made.batch(4.0, 2.0, scaler=scaler)
    made.end()
    assert made.values == [-OUTER, 1.0 - OUTER]
    assert scaler.released == 1


def test_a_skipped_batch_is_in_no_sum(kind: str, made: Made) -> None:
    assert made.batch(1.0, 2.0)
    made.backward(100.0)
    made.work.skip()
    assert made.work.samples == (0.0 if made.adds_up else 2.0)
    assert made.batch(1.0, 2.0)
    before = made.values
    made.end()
    if not is_drift(made) and kind != "local steps":
        assert made.values == [value - OUTER for value in before]


def test_gradients_that_were_cleared_are_told_of_by_name() -> None:
    for then in (lambda made: made.batch(1.0, 2.0), lambda made: made.work.freeze()):
        made = gradients(reuse=True)
        made.batch(1.0, 2.0)
        made.model[1].grad = None
        with pytest.raises(ValueError, match=r"that of the first layer was cleared"):
            then(made)
        assert made.work.samples == 0.0


# -- into a round


def test_all_bring_something_finite(made: Made) -> None:
    twice(made)
    assert made.work.freeze()
    assert all(bool(torch.isfinite(flat).all()) for v in made.work.vectors(0) for flat in v.inputs.flat)
    assert made.work.samples == 8.0, "it stays accumulated until it was used"


def test_who_has_no_samples_brings_nothing(made: Made) -> None:
    assert made.work.freeze()
    assert inputs_of(made.work.vectors(0)) == {0.0} or not made.work.vectors(0)


def inputs_of(vectors: Sequence[Vector]) -> set[float]:
    return {value for vector in vectors for flat in vector.inputs.flat for value in flat.tolist()}


def test_what_is_not_finite_is_dropped(kind: str, made: Made, caplog: pytest.LogCaptureFixture) -> None:
    made.batch(math.inf, 2.0)
    is_finite = made.work.freeze()
    if kind == "local steps":
        assert is_finite, "it brings nothing"
        return
    assert not is_finite
    made.work.drop()
    assert inputs_of(made.work.vectors(0)) in ({0.0}, set())
    assert (made.work.samples, made.work.loss) == (0.0, None)
    if is_drift(made):
        assert made.values == [0.0, 1.0], "it goes back to the anchor"
    made.work.reset()
    made.work.begin(1)
    assert made.batch(1.0, 2.0)
    made.end(1)
    assert all(map(math.isfinite, made.values))


def test_vectors_of_all_epochs(kind: str, made: Made) -> None:
    turns = made.work.all_vectors
    assert len(turns) == {"drift in fragments": 2, "local steps": 0}.get(kind, 1)
    count = {"of two parts": 2, "of an averager": 0, "local steps": 0}.get(kind, 1)
    assert all(len(turn) == count for turn in turns)
    for epoch in range(4 if turns else 0):
        assert list(made.work.vectors(epoch)) == list(turns[epoch % len(turns)])


@pytest.mark.parametrize("kind", IN_BACKGROUND, indirect=True)
def test_the_next_epoch_does_not_change_what_is_in_a_round(made: Made) -> None:
    twice(made)
    made.work.freeze()
    if made.averager is not None:
        made.averager.begin()
    brought = [flat.clone() for vector in made.work.vectors(0) for flat in vector.inputs.flat]
    made.work.go_on()
    assert made.work.samples == 0.0
    assert made.batch(2.0, 5.0)
    assert made.work.samples == 5.0
    now = [flat for vector in made.work.vectors(0) for flat in vector.inputs.flat]
    assert all(map(torch.equal, brought, now))


@pytest.mark.parametrize("kind", IN_BACKGROUND, indirect=True)
def test_a_round_that_failed_is_tried_again(made: Made) -> None:
    """With what was brought; the drift is taken once more, with all steps since."""
    twice(made)
    made.work.freeze()
    made.work.go_on()
    made.batch(2.0, 5.0)
    assert made.work.again(8.0) == ((13.0 if is_drift(made) else 8.0), True)
    assert made.work.samples == (0.0 if is_drift(made) else 5.0)


@pytest.mark.parametrize("kind", IN_BACKGROUND, indirect=True)
def test_what_was_in_no_round_is_taken_back(made: Made) -> None:
    """Gradients belong to the state on which they were computed, and are lost with it."""
    twice(made)
    made.work.freeze()
    made.work.go_on()
    made.batch(2.0, 5.0)
    made.work.take_back()
    assert made.work.samples == (13.0 if is_drift(made) else 5.0)
    assert made.work.progress == (3.0 if made.work.steps_per_epoch else made.work.samples)


# -- out of a round


def moved(kind: str) -> float:
    """How far an epoch with the batches of `twice` moves the model of a peer that is alone."""
    if kind == "local steps":
        return INNER * 5.0
    if not kind.startswith("drift"):
        return OUTER * MEANS.get(kind, 3.25)
    anchor = OUTER * INNER * 5.0
    return (anchor + INNER * 5.0) / 2 if kind == "drift mixed" else anchor


def test_an_epoch_alone(kind: str, made: Made) -> None:
    twice(made)
    made.end()
    second = INNER * 5.0 if kind == "drift in fragments" else moved(kind)  # it had no turn
    assert made.values == [-moved(kind), 1.0 - second]
    assert made.work.samples == 0.0
    assert made.state.averages == (kind == "local steps")
    assert made.work.result_may_wait == (kind == "drift overlapping")


def test_gradients_are_where_they_were_after_the_step(made: Made) -> None:
    twice(made)
    made.work.freeze()
    made.average_alone()
    own = [each for each, _ in made.state.pairs]
    before = [each.grad for each in own]
    made.work.step(made.state, StepResult(GENESIS.after(bytes(32), 1.0)))
    assert all(now.grad is was for now, was in zip(own, before, strict=True))


def test_an_average_is_scaled_for_the_step(kind: str, made: Made) -> None:
    if kind == "local steps":
        return
    twice(made)
    made.work.freeze()
    made.average_alone()
    for factor in (1.0, 0.25, 1.0):  # the average itself stays
        made.work.step(made.state, StepResult(GENESIS.after(bytes(32), 1.0), factor=factor))
        mean = INNER * 5.0 if is_drift(made) else MEANS.get(kind, 3.25)
        found = made.state.gradients[0]
        assert found is not None
        assert found.tolist() == [factor * mean] * 3


def test_a_parameter_that_got_no_gradient_gets_none(kind: str, made: Made) -> None:
    if kind not in ("gradients", "of two parts", "in .grad", "apart", "drift in fragments"):
        return
    with torch.enable_grad():
        (made.model[0].sum() * 2.0).backward()
    made.work.add(Batch(2.0))
    made.end()
    assert made.state.gradients[1] is None
    assert made.values[1] == 1.0


def test_the_norm_of_each_part(kind: str, made: Made) -> None:
    twice(made)
    made.work.freeze()
    made.average_alone()
    mean = INNER * 5.0 if is_drift(made) else MEANS.get(kind, 3.25)
    counts = {"of two parts": [3, 4], "drift in fragments": [3], "local steps": []}.get(kind, [7])
    assert made.work.norms() == pytest.approx([mean * count**0.5 for count in counts], rel=1e-12)


def test_an_average_without_this_rank_loses_no_drift(made: Made) -> None:
    """A peer that has missed a round steps with the others' average. Here that is zero."""
    twice(made)
    before = made.values
    made.work.freeze()
    for vector in made.work.vectors(0):
        for flat in vector.outputs.flat:
            flat.zero_()
    made.work.remember()
    made.work.step(made.state, StepResult(GENESIS.after(bytes(32), 1.0)))
    if made.averager is None:
        made.work.apply(used=False, is_accumulating=False)
        assert made.values == before
        assert made.work.samples == (8.0 if is_drift(made) else 0.0)


@pytest.mark.parametrize("keeps", [False, True])
def test_on_another_state(made: Made, keeps: bool) -> None:
    twice(made)
    made.work.freeze()
    made.work.go_on()
    made.batch(1.0, 4.0)
    made.work.restart(keeps=keeps)
    assert made.work.samples == (12.0 if is_drift(made) and keeps else 0.0)
    assert made.work.has_moved == (is_drift(made) and keeps)


def test_another_state_gets_the_drift_that_was_remembered(made: Made) -> None:
    twice(made)
    drifted = [value - start for value, start in zip(made.values, (0.0, 1.0), strict=True)]
    copied = made.work.copy_to_keep()
    assert bool(copied) == is_drift(made)
    made.work.remember(copied)
    with torch.no_grad():
        for own, _ in made.state.pairs:
            own.fill_(10.0)
    made.work.publish()
    if is_drift(made):
        assert made.values == [10.0 + each for each in drifted]
        made.work.restart(keeps=False)
        made.work.publish()
    assert made.values == [10.0, 10.0]


@pytest.mark.parametrize("used", [False, True])
def test_a_state_unlike_that_of_the_others(made: Made, used: bool) -> None:
    twice(made)
    before = made.values
    made.work.abandon(used=used)
    if is_drift(made) and used:
        assert (made.values, made.work.samples) == ([0.0, 1.0], 0.0), "the others' state has it"
    else:
        assert (made.values, made.work.samples) == (before, 8.0)


def test_others_have_this_ranks_contribution(kind: str, made: Made) -> None:
    twice(made)
    made.work.freeze()
    made.work.use_theirs()
    assert made.work.has_moved == (kind in ("drift in fragments", "drift mixed", "drift overlapping", "drift kept"))
    made.work.restart(keeps=True)
    if kind in ("drift", "drift on the host"):
        assert made.values == [0.0, 1.0]


@pytest.mark.parametrize("used", [None, False, True])
def test_the_last_step_of_an_optimizer_that_was_shut_down(made: Made, used: bool | None) -> None:
    twice(made)
    made.work.freeze()
    made.average_alone()
    made.work.go_on()
    before = made.values
    if used is not None:
        made.work.step(made.state, StepResult(GENESIS.after(bytes(32), 1.0)))
    stepped = [float(own.detach().view(-1)[0]) for own, _ in made.state.pairs]
    made.work.apply_last(used=used)
    if is_drift(made) and used is None:
        assert made.values == before
    elif not is_drift(made):
        assert made.values == stepped


def test_only_a_drift_that_overlaps_waits_for_its_steps(kind: str, made: Made) -> None:
    assert made.work.result_is_due == (kind != "drift overlapping")
    made.batch(1.0, 2.0)
    assert made.work.result_is_due
    assert made.work.has_its_part == (kind == "drift overlapping"), "the first epoch has one step less"
    made.batch(1.0, 2.0)
    assert made.work.has_its_part == (made.work.steps_per_epoch is not None)


# -- losses


@pytest.mark.parametrize("kind", GRADIENTS, indirect=True)
def test_the_mean_loss_of_all_samples(made: Made) -> None:
    for value, samples in ((1.0, 2.0), (5.0, 6.0)):
        made.batch(1.0, samples, closure=Closure(None, torch.tensor(value)))
    assert made.work.freeze()
    assert made.work.loss == Loss(4.0, LossKind.FLOAT32)
    made.work.go_on()
    made.batch(1.0, 2.0)
    assert made.work.freeze()
    assert made.work.loss is None, "these samples have none"


@pytest.mark.parametrize("kind", GRADIENTS, indirect=True)
def test_no_loss_if_some_samples_have_none_or_they_are_dropped(made: Made) -> None:
    made.batch(1.0, 2.0, closure=Closure(None, 1.0))
    made.batch(1.0, 2.0)
    assert made.work.freeze()
    assert made.work.loss is None
    made.work.reset()
    made.batch(1.0, 2.0, closure=Closure(None, 1.0))
    assert made.work.freeze()
    assert made.work.loss is not None
    made.work.drop()
    assert made.work.loss is None
    made.batch(1.0, 2.0, closure=Closure(None, 3.0))
    assert made.work.freeze()
    assert made.work.loss == Loss(3.0, LossKind.NUMBER)


def test_a_closure_that_is_called_in_the_step(kind: str, made: Made) -> None:
    """Only work that steps at once gets one; the gradients are those that it leaves."""
    if not is_drift(made):
        return

    def compute() -> Tensor:
        made.backward(2.0)
        return torch.tensor(7.0)

    closure = Closure(compute)
    assert made.work.add(Batch(3.0, closure=closure))
    assert (made.values[0], made.work.samples, float(closure.result())) == (-2.0 * INNER, 3.0, 7.0)
    empty = Closure(lambda: None)
    for parameter in made.model:
        parameter.grad = None
    assert not made.work.add(Batch(3.0, closure=empty))
    assert made.work.samples == 3.0


# -- what peers compare, and what is saved


def test_what_peers_compare(kind: str, made: Made) -> None:
    alike = KINDS[kind]()
    assert (alike.work.terms(), alike.work.schemas()) == (made.work.terms(), made.work.schemas())
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in made.work.terms().items())
    assert all(isinstance(schema, bytes) for schema in made.work.schemas())
    if kind == "drift in fragments":
        assert made.work.schemas() != drift().work.schemas()


def test_what_is_saved_continues_to_the_bit(kind: str, made: Made) -> None:
    twice(made)
    made.end()
    made.batch(0.5, 2.0)
    saved, given = copy.deepcopy(made.work.saved()), copy.deepcopy(made.work.wrapped.state_dict())
    other = KINDS[kind]()
    other.batch(9.0, 1.0)
    with torch.no_grad():
        for mine, theirs in zip(other.model, made.model, strict=True):
            mine.copy_(theirs)
    other.work.begin(1)
    other.work.load_saved(other.state, given, saved)
    if not is_drift(made):
        assert (saved, other.state.loaded) == ({}, [given])
        return
    assert other.state.loaded == []
    assert (other.work.samples, other.work.has_moved) == (made.work.samples, True)
    for each in (made, other):
        each.batch(3.0, 2.0)
        each.end(1)
    assert other.values == made.values
    other.work.load_saved(other.state, given, {})  # without what it had saved, the model is the anchor
    assert (other.work.samples, other.work.has_moved) == (0.0, False)
    assert [float(own.detach().view(-1)[0]) for own, _ in other.state.pairs] == other.values


def test_checkpoints_that_users_load_into_the_model_alone(kind: str, made: Made) -> None:
    """Inner steps have no meaning on them; other work continues from what it finds."""
    made.work.refuse_load()
    assert not made.work.was_loaded
    assert made.work.is_at_start == is_drift(made)
    made.batch(1.0, 2.0)
    assert not made.work.is_at_start
    assert made.work.follows_model != is_drift(made)


def test_the_log_has_nothing_more(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        twice(made)
        made.end()
    assert caplog.messages == []
