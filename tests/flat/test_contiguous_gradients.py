"""Where gradients are: views that autograd adds to, where autograd put them, and gathered when somebody asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_

from shoal.flat import ContiguousParams
from shoal.flat._torch import call_after_backward, compiler_is_near, version_of
from shoal.flat.gradient_views import LARGE
from tests.flat.test_contiguous_missing_gradients import four_layers, some_layers
from tests.flat.twins import Twins, small_model

WIDE = 300  # 300 x 300 floats are a large gradient


def mixed_model() -> nn.Module:
    """Small and large parameters in turn."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, WIDE), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)
    )


def away(parameters: ContiguousParams) -> list[int]:
    """The parameters whose gradient is not their view."""
    return [
        member.index
        for run in parameters.contiguous()
        for member in run.members
        if member.parameter.grad is not member.view
    ]


@contextmanager
def calls() -> Iterator[list[str]]:
    """The Python functions that are called meanwhile, in this thread."""
    made: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            made.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        yield made
    finally:
        sys.setprofile(None)


def test_the_number_of_calls_in_a_backward_pass_does_not_depend_on_that_of_parameters() -> None:
    counts = []
    for layers in (2, 50):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = optim.AdamW(ContiguousParams(model).contiguous())
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            with calls() as made:
                loss.backward()
            optimizer.step()
        counts.append(len(made))
        assert "GradientViews.place" in made
    assert counts[0] == counts[1]


def test_small_gradients_are_views_from_the_first_backward_pass_on() -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        assert away(parameters) == []


@pytest.mark.parametrize(
    ("optimizer", "options"), [(optim.AdamW, {}), (optim.SGD, {"momentum": 0.9}), (optim.Adam, {})]
)
def test_large_gradients_are_stepped_where_autograd_put_them(
    optimizer: type[optim.Optimizer], options: dict[str, float]
) -> None:
    twins = Twins(optimizer, make=mixed_model, lr=0.01, fused=True, **options)
    large = [index for index, item in enumerate(twins.flat.parameters()) if item.nbytes >= LARGE]
    assert large == [2, 4]
    for seed in range(4):
        twins.backward(seed)
        assert away(twins.parameters) == large
        twins.step()
        assert away(twins.parameters) == (large if seed else []), "before the first step there is no state to cut"
        assert twins.distance() < 1e-6
        twins.zero_grad()
    state = twins.flat_optimizer.state_dict()["state"]
    (run,) = twins.parameters.contiguous()
    assert state.keys() == {0}
    assert all(value.shape in (run.shape, ()) for value in state[0].values())
    theirs = twins.plain_optimizer.state_dict()
    ours = twins.parameters.original_state_dict(twins.flat_optimizer)
    for index, values in theirs["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(ours["state"][index][name], value)
    twins.parameters.assert_buffer_is_valid()


def test_pieces_and_the_whole_run_in_turn_keep_one_step_count() -> None:
    twins = Twins(optim.AdamW, make=mixed_model, fused=True)
    for seed in range(8):
        twins.backward(seed)
        if seed % 3 == 2:  # asks for the flat gradient
            for trained in (twins.plain.parameters(), twins.parameters.contiguous()):
                clip_grad_norm_(trained, 0.01)
            assert away(twins.parameters) == []
        if seed == 4:
            state = twins.flat_optimizer.state_dict()
            twins.flat_optimizer.load_state_dict(state)
        twins.step()
        assert twins.distance() < 1e-5
        twins.zero_grad(set_to_none=seed != 5)
    run = twins.parameters.contiguous()[0]
    assert twins.flat_optimizer.state[run]["step"] == 8


def test_the_flat_gradient_is_right_whenever_it_is_asked_for() -> None:
    twins = Twins(optim.SGD, make=mixed_model, lr=0.01)
    for seed in range(3):
        twins.backward(seed)
        (run,) = twins.parameters.contiguous()
        flat = run.grad
        for member, plain in zip(run.members, twins.plain.parameters(), strict=True):
            assert torch.equal(flat[member.span.slice].view(plain.shape), plain.grad)
        flat.mul_(2)
        for ours, theirs in zip(twins.flat.parameters(), twins.plain.parameters(), strict=True):
            assert torch.equal(ours.grad, 2 * theirs.grad)
        flat.div_(2)


@pytest.mark.parametrize("make", [mixed_model, small_model])
def test_clipping_the_parameters_themselves_reaches_the_step(make: Callable[[], nn.Module]) -> None:
    twins = Twins(optim.AdamW, make=make, fused=True)
    for seed in range(4):
        twins.backward(seed)
        for model, _ in twins.both:
            clip_grad_norm_(model.parameters(), 0.01)
        twins.step()
        assert twins.distance() < 1e-5
        twins.zero_grad()


def test_zero_grad_does_not_gather() -> None:
    twins = Twins(optim.AdamW, make=mixed_model, fused=True)
    twins.train(2)
    twins.backward(5)
    memory = [member.view.clone() for member in twins.parameters.contiguous()[0].members]
    twins.flat_optimizer.zero_grad()
    views = [member.view for member in twins.parameters.contiguous()[0].members]
    assert all(map(torch.equal, memory, views))
    assert all(parameter.grad is None for parameter in twins.flat.parameters())


def test_a_step_that_failed_leaves_the_optimizer_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(optim.AdamW, make=mixed_model, fused=True)
    twins.train(2)
    twins.backward(2)

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_fused_adamw_", fails)
        with pytest.raises(RuntimeError, match="no"):
            twins.flat_optimizer.step()
    assert twins.flat_optimizer.param_groups[0]["params"] == twins.parameters.contiguous()
    assert twins.flat_optimizer.state.keys() == set(twins.parameters.contiguous())


def test_hooks_of_a_step_see_the_optimizer() -> None:
    model = small_model()
    optimizer = optim.AdamW(ContiguousParams(model).contiguous())
    seen: list[object] = []
    optimizer.register_step_pre_hook(lambda given, *_: seen.append(given))
    optimizer.register_step_post_hook(lambda given, *_: seen.append(given))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert seen == [optimizer, optimizer]


def test_options_that_change_and_schedulers_reach_the_step() -> None:
    twins = Twins(optim.AdamW, make=mixed_model, fused=True, lr=0.1)
    schedulers = [optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in twins.both]
    for seed in range(4):
        twins.train(1, first=seed)
        for scheduler in schedulers:
            scheduler.step()
    assert twins.distance() < 1e-5


def test_a_backward_pass_that_failed_leaves_no_gradients_that_are_not_there() -> None:
    model = four_layers()
    parameters = ContiguousParams(model)
    optimizer = optim.AdamW(parameters.contiguous(), weight_decay=0.5, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        some_layers(0, 1, 2, 3)(model, torch.ones(2, 5)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError("no")

    before = [parameter.detach().clone() for parameter in model[0].parameters()]
    with pytest.raises(RuntimeError, match="no"):
        model[3](Fails.apply(model[0](torch.ones(2, 5))[:, :5])).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, model[0].parameters()))
    assert model[0].weight.grad is None
    parameters.assert_buffer_is_valid()


def test_the_first_gradient_may_be_of_another_parameter_from_some_step_on() -> None:
    twins = Twins(optim.Adam, make=four_layers, foreach=False, weight_decay=0.1)
    for seed, used in enumerate([(0, 3), (0, 3), (2, 1), (1, 2), (1,), (0, 1, 2, 3)] * 2):
        twins.backward(seed, some_layers(*used))
        for ours, theirs in zip(twins.flat.parameters(), twins.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
        twins.step()
        twins.assert_equal()
        twins.zero_grad(set_to_none=seed % 4 != 3)


def test_parameters_that_are_frozen_at_first() -> None:
    twins = Twins(optim.Adam, foreach=False)
    for model, _ in twins.both:
        model.requires_grad_(False)
    parameters = twins.parameters = ContiguousParams(twins.flat.named_parameters())
    twins.flat_optimizer = optim.Adam(parameters.contiguous(), foreach=False)
    for model, _ in twins.both:
        model.requires_grad_(True)
    twins.train(4)
    twins.assert_equal()
    twins.backward(9)
    assert away(parameters) == []


def test_gradients_of_inputs_do_not_touch_those_of_parameters() -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    for _ in range(2):
        torch.autograd.grad(model(torch.ones(2, 5)).sum(), list(model.parameters()))
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.ones(2, 5)).sum().backward(inputs=[model[2].weight])
        assert [parameter.grad is None for parameter in model.parameters()] == [True, True, False, True]
        model.zero_grad()
    assert parameters.contiguous()[0].grad is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant: bool) -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(model[0], x.requires_grad_(), use_reentrant=reentrant)
        out: Tensor = torch.utils.checkpoint.checkpoint(model[2], h.tanh(), use_reentrant=reentrant)
        return out

    twins = Twins(optim.Adam, foreach=False)
    for seed in range(4):
        twins.backward(seed, use)
        twins.step()
        twins.assert_equal()
        twins.zero_grad()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [mixed_model, pytest.param(small_model, marks=pytest.mark.long)])
def test_compiled_autograd(make: Callable[[], nn.Module]) -> None:
    twins = Twins(optim.Adam, make=make, fused=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(4, 5)
        for model, optimizer in twins.both:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert twins.distance() < 1e-6
        twins.parameters.assert_buffer_is_valid()
    torch.compiler.reset()


def exchanged(model: nn.Module) -> None:
    one, _, other, _ = model.parameters()
    one.grad, other.grad = other.grad, one.grad


def moved(model: nn.Module) -> None:
    one, _, other, _ = model.parameters()
    one.grad, other.grad = None, one.grad


def shared(model: nn.Module) -> None:
    one, _, other, _ = model.parameters()
    other.grad = one.grad


@pytest.mark.parametrize("give", [exchanged, moved, shared])
def test_a_parameter_may_be_given_the_gradient_of_another(give: Callable[[nn.Module], None]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    twins = Twins(torch.optim.AdamW, make, lr=0.1, foreach=False)
    for seed in range(4):
        twins.zero_grad()
        twins.backward(seed)
        if seed % 2:
            for model, _ in twins.both:
                give(model)
        twins.step()
        twins.assert_equal()


@pytest.mark.parametrize("left", [1, 2])
@pytest.mark.parametrize(("to", "of"), [(0, 1), (1, 0), (2, 0), (0, 2)])
def test_a_gradient_that_was_moved_to_another_parameter_is_added_to(to: int, of: int, left: int) -> None:
    """Its memory is the view of a parameter that has none now, and gets it back in the next backward pass."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))

    twins = Twins(torch.optim.AdamW, make, lr=0.1, foreach=False)
    for seed in range(3):
        twins.zero_grad()
        twins.backward(seed)
        for model, _ in twins.both:
            parameters = list(model.parameters())
            grad, parameters[of].grad = parameters[of].grad, None
            parameters[to].grad = grad
            if left == 1:
                parameters[3 - to - of].grad = None
        twins.backward(seed + 10)
        for one, other in zip(*(model.parameters() for model, _ in twins.both), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        twins.step()
        twins.assert_equal()


def set_by_hand(model: nn.Module) -> None:
    moved(model)
    next(model.parameters()).grad = torch.ones(5, 5)


def looked_at(model: nn.Module) -> None:
    """Where a gradient is missing the flat gradient is zero, and another parameter may have that memory."""
    moved(model)


@pytest.mark.parametrize("give", [exchanged, moved, shared, set_by_hand, looked_at])
def test_a_parameter_may_be_given_the_gradient_of_one_of_another_group(give: Callable[[nn.Module], None]) -> None:
    """Which is gathered by itself, into memory that the other may still need."""
    ends = []
    for flat in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        groups: list[Any] = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
        runs: list[Any] = []
        if flat:
            parameters = ContiguousParams(groups)
            groups = parameters.contiguous()
            runs = [run for group in groups for run in group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
        for seed in range(3):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            model(torch.randn(3, 5)).square().sum().backward()
            assert all(run.grad is not None for run in runs)
            give(model)
            if give is looked_at:
                assert all(run.grad is not None for run in runs)
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_private_names_of_torch_are_there() -> None:
    """Without `get_eval_frame_callback` every step counts as compiled, and without `queue_callback` nothing works."""
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
    assert not compiler_is_near()
    assert callable(call_after_backward)
    view = torch.zeros(3)
    before = version_of(view)
    view.add_(1)
    assert version_of(view) == before + 1


def test_a_newer_home_stops_the_older_one() -> None:
    model = small_model()
    older = ContiguousParams(model)
    model(torch.ones(2, 5)).sum().backward()
    model.zero_grad()
    newer = ContiguousParams(list(model.parameters())[2:])
    model(torch.ones(2, 5)).sum().backward()
    newer.assert_buffer_is_valid()
    assert away(newer) == []
    assert not older.buffer_is_valid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_gradient_of_negative_zeros_is_one(dtype: torch.dtype) -> None:
    """Views are cleared with -0.0, so one that still is -0.0 may have been written to."""
    tensors = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(4)]
    parameters = ContiguousParams(tensors)
    for _ in range(3):
        for tensor in tensors:
            tensor.grad = None
        loss = sum((tensor.real.sum() for tensor in tensors[:2]), torch.zeros(()))
        (loss - 0.0 * tensors[2].real.sum()).backward()  # type: ignore[no-untyped-call]
        assert [tensor.grad is None for tensor in tensors] == [False, False, False, True]
        assert tensors[2].grad is not None
        assert torch.equal(tensors[2].grad, torch.zeros(3, dtype=dtype))
        assert [index for index in away(parameters) if index < 3] == []


def test_an_empty_parameter_without_a_gradient_has_none() -> None:
    tensors = [nn.Parameter(torch.ones(size)) for size in (3, 0, 0, 2)]
    parameters = ContiguousParams(tensors)
    for _ in range(3):
        for tensor in tensors:
            tensor.grad = None
        sum((tensor.sum() for tensor in (tensors[0], tensors[1], tensors[3])), torch.zeros(())).backward()
        assert [tensor.grad is None for tensor in tensors] == [False, False, True, False]
        assert away(parameters) == [2]
