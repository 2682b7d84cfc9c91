"""`step(closure)`: what the wrapped optimizer gets as its closure, in each mode; and optimizers that call it again are
right, or refused with everything as it was."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.optim.loss_steps import ClosureCalledAgain
from tests.optim.closing import (
    Base,
    Clears,
    Hides,
    Holds,
    LookSam,
    Reads,
    ReadsByName,
    Sam,
    SamAfterBackward,
    SamByData,
    SamThatClears,
)
from tests.optim.conftest import Alone
from tests.optim.models import fixed_batch, flat, make_model
from tests.waiting import wait_until

Make = Callable[[Any], torch.optim.Optimizer]
Returns = Callable[[Tensor], Any]


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, returns: Returns = lambda loss: loss
) -> Callable[[], Any]:
    inputs, outputs = (each.to(next(model.parameters()).dtype) for each in fixed_batch(epoch))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((model(inputs) - outputs) ** 2).mean()
        loss.backward()
        return returns(loss)

    return closure


def plainly(make: Make, steps: int, *, backward_before: bool = False, dtype: Any = None) -> tuple[Tensor, list[float]]:
    """The parameters after some steps of the optimizer alone, and what these have returned."""
    model = make_model().to(dtype)
    optimizer = make(model.parameters())
    returned = []
    for number in range(steps):
        closure = closure_of(model, optimizer, number)
        if backward_before:
            closure()
        loss = optimizer.step(closure=closure) if make is ReadsByName else optimizer.step(closure)
        returned.append(float(loss.detach()))  # type: ignore[attr-defined]
    return flat(model), returned


# -- steps with an average


@pytest.mark.parametrize("make", [Reads, ReadsByName])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("returns", [lambda loss: loss, Tensor.item], ids=["tensor", "number"])
def test_one_peer_steps_as_the_optimizer_alone(alone: Alone, make: Make, dtype: torch.dtype, returns: Returns) -> None:
    model = make_model().to(dtype)
    optimizer = alone(model, target_batch_size=64, batch_size_per_step=64, optimizer=make)
    for number in range(4):
        optimizer.step(closure_of(model, optimizer, number, returns))
    # The same numbers by the same operations, but at other addresses: a sum over a gradient may round otherwise.
    torch.testing.assert_close(flat(model), plainly(make, 4, dtype=dtype)[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "modes",
    [
        {"offload_optimizer": True},
        {"delay_optimizer_step": True},
        {"delay_grad_averaging": True},
        {"max_grad_norm": 1e6},
        {"grad_averager_factory": shoal.GradientAverager},
    ],
    ids=lambda modes: next(iter(modes)),
)
def test_the_loss_of_the_epoch_whose_gradients_are_stepped(alone: Alone, modes: dict[str, Any]) -> None:
    """The class notes (loss, gradient) of each step: they belong together, whenever the step is made."""
    noted: list[tuple[float, float]] = []

    class Notes(Reads):
        def update(self, loss: Any = None) -> None:
            noted.append((float(loss), float(self.each[0].grad.sum())))  # type: ignore[union-attr]

    model = make_model()
    modes = {"delay_optimizer_step": True, **modes} if "delay_grad_averaging" in modes else modes
    modes = {"offload_optimizer": True, **modes} if "delay_optimizer_step" in modes else modes
    optimizer = alone(model, target_batch_size=128, batch_size_per_step=64, optimizer=Notes, **modes)
    batches = []
    for number in range(8):
        loss = optimizer.step(closure_of(model, optimizer, number))
        batches.append((float(loss.detach()), float(next(model.parameters()).grad.sum())))  # type: ignore[arg-type, union-attr]
    optimizer.settle()
    assert len(noted) >= 3
    pairs = zip(batches[::2], batches[1::2], strict=True)
    means = [tuple(sum(each) / 2 for each in zip(*pair, strict=True)) for pair in pairs]
    for got, mean in zip(noted, means, strict=False):
        assert got == pytest.approx(mean, rel=1e-5, abs=1e-6)  # float32 means of two


@pytest.mark.parametrize("given", [None, "text", torch.ones(2), torch.tensor(float("nan")), float("inf"), True, 1 + 1j])
def test_what_is_no_loss_is_none(alone: Alone, given: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    class Notes(Reads):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(closure)

    model = make_model()
    optimizer = alone(model, target_batch_size=64, batch_size_per_step=64, optimizer=Notes)
    returned = optimizer.step(closure_of(model, optimizer, 0, lambda _: given))
    assert returned is given
    assert (seen, optimizer.local_epoch) == ([None], 1)
    assert "the closure has returned no finite number" in caplog.text


def test_a_batch_without_a_closure_leaves_the_epoch_without_a_loss(alone: Alone) -> None:
    rates: list[Any] = []

    class Notes(Reads):
        def update(self, loss: Any = None) -> None:
            rates.append(loss)

    model = make_model()
    optimizer = alone(model, target_batch_size=128, batch_size_per_step=64, optimizer=Notes)
    for with_first, with_second in ((True, False), (False, True), (True, True), (False, False)):
        for number, with_closure in enumerate((with_first, with_second)):
            closure = closure_of(model, optimizer, number)
            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    assert [loss is None for loss in rates] == [True, True, False, True]


def test_a_class_without_a_closure_and_those_of_torch_step_as_before(alone: Alone) -> None:
    class Without(Base):
        def step(self) -> None:  # type: ignore[override]
            self.update()

    for make in (Without, torch.optim.AdamW):
        model, twin = make_model(), make_model()
        optimizer = alone(model, target_batch_size=64, batch_size_per_step=64, optimizer=make)
        other = alone(twin, target_batch_size=64, batch_size_per_step=64, optimizer=make)
        for number in range(3):
            optimizer.step(closure_of(model, optimizer, number))
            closure_of(twin, other, number)()
            other.step()
        assert torch.equal(flat(model), flat(twin))


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((optimizer.state_dict()["state"], [dict(g, params=0) for g in optimizer.param_groups]))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("make", "why", "good"),
    [
        (Sam, "a second time", 0),
        (SamAfterBackward, "after it has written to gradients", 0),
        (SamByData, "after it has written to parameters", 0),
        (LookSam, "a second time", 2),
        (Clears, "after it has written to gradients", 0),
        (Hides, "a second time", 0),
        (Holds, "a second time", 0),
    ],
)
@pytest.mark.parametrize("modes", [{}, {"delay_optimizer_step": True, "offload_optimizer": True}], ids=["now", "later"])
def test_a_class_that_evaluates_the_loss_itself_is_refused_with_everything_as_it_was(
    alone: Alone, make: Make, why: str, good: int, modes: dict[str, Any]
) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, batch_size_per_step=64, optimizer=make, **modes)

    def steps(until: int) -> None:
        while optimizer.local_epoch < until:
            optimizer.step(closure_of(model, optimizer, optimizer.local_epoch))
            optimizer.settle()

    steps(good)
    before, state = flat(model), state_of(optimizer.optimizer)
    held = optimizer.optimizer.held if isinstance(optimizer.optimizer, Holds) else None
    name = make.__name__  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(ClosureCalledAgain, match=rf"{name} calls its closure {why}.*DiLoCo.*use_local_updates"):
            steps(good + 1)
        assert torch.equal(flat(model), before)
        assert same(state_of(optimizer.optimizer), state)
        assert held is None or not any(held.state.values())
        assert optimizer.local_epoch == good


def test_hooks_before_the_step_may_write_gradients(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, batch_size_per_step=64, optimizer=Reads)

    def halve(*_: object) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    optimizer.optimizer.register_step_pre_hook(halve)
    optimizer.step(closure_of(model, optimizer, 0))
    assert optimizer.local_epoch == 1


# -- steps of this peer alone


@pytest.mark.parametrize(
    "make", [Reads, ReadsByName, Sam, SamAfterBackward, SamByData, LookSam, lbfgs, torch.optim.SGD]
)
@pytest.mark.parametrize(
    "modes",
    [
        {"use_local_updates": True, "target_batch_size": 10**6},
        {"outer": shoal.DiLoCo(inner_steps=1000)},
        {"outer": shoal.DiLoCo(inner_steps=1000), "offload_optimizer": True},
    ],
    ids=["local updates", "DiLoCo", "DiLoCo on the host"],
)
def test_a_local_step_calls_the_closure_as_the_optimizer_alone(
    alone: Alone, make: Make, modes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.optim.settings.is_on_host", lambda params: False)  # as on a device
    model = make_model()
    optimizer = alone(model, batch_size_per_step=64, optimizer=make, **modes)
    before, returned = make is SamAfterBackward or make is SamByData, []
    for number in range(7):
        closure = closure_of(model, optimizer, number)
        if before:
            closure()
        returned.append(float(optimizer.step(closure).detach()))  # type: ignore[union-attr]
    expected, losses = plainly(make, 7, backward_before=before)
    # As above; the line search of LBFGS multiplies what one sum has rounded.
    tolerance = 1e-4 if make is lbfgs else 1e-6
    torch.testing.assert_close(flat(model), expected, rtol=tolerance, atol=tolerance)
    assert returned == pytest.approx(losses, rel=tolerance)
    assert optimizer.local_progress.samples_accumulated == 7 * 64 or optimizer.outer_optimizer is not None


def test_an_inner_optimizer_on_the_host_clears_the_gradients_of_the_model(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.optim.settings.is_on_host", lambda params: False)  # as on a device
    model, twin = make_model(), make_model()
    outer = shoal.DiLoCo(inner_steps=1000)
    ours = alone(model, batch_size_per_step=64, optimizer=SamThatClears, outer=outer, offload_optimizer=True)
    plain = SamThatClears(twin.parameters())
    inputs, outputs = fixed_batch(0)

    def closure(model: nn.Module) -> Tensor:
        loss = ((model(inputs) - outputs) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        ours.step(partial(closure, model))
        plain.step(partial(closure, twin))
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-6, atol=1e-6)  # as above


def test_a_closure_of_a_local_step_may_ask_for_the_state_and_newcomers_wait_for_the_end(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, batch_size_per_step=64, target_batch_size=10**6, use_local_updates=True, optimizer=Sam)
    optimizer.step(closure_of(model, optimizer, 0))
    copies: list[Any] = []
    newcomer = threading.Thread(target=lambda: copies.append(optimizer._state.copy_for_newcomer()))
    closure, within = closure_of(model, optimizer, 1), []

    def asking() -> Any:
        within.append(optimizer.state_dict())
        if len(within) == 2:  # the parameters are moved now
            newcomer.start()
            newcomer.join(0.2)
            assert not copies
        return closure()

    optimizer.step(asking)
    newcomer.join(30)
    (snapshot,) = copies
    (memory,) = optimizer._state.memory.flat
    assert torch.equal(snapshot.buffers[0][: memory.numel()], memory)


@pytest.mark.parametrize(
    "modes", [{"use_local_updates": True, "target_batch_size": 64}, {"outer": shoal.DiLoCo(inner_steps=4)}]
)
def test_what_goes_wrong_in_a_local_step(alone: Alone, modes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = alone(model, batch_size_per_step=8, optimizer=lbfgs, **modes)
    before = flat(model)
    with pytest.raises(ValueError, match=r"the step of a LBFGS calls its closure: call step\(closure\)"):
        optimizer.step()

    def raising() -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(raising)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0  # type: ignore[comparison-overlap, arg-type]
    assert "no parameter has a gradient" in caplog.text
    scaler = shoal.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(1))
    with pytest.raises(ClosureCalledAgain, match=r"a second time.*with cluster= or grad_scaler=.*are as before"):
        optimizer.step(closure_of(model, optimizer, 0), grad_scaler=scaler)
    assert torch.equal(flat(model), before)
    assert optimizer.tracker.local_progress.samples_accumulated == 0
    optimizer.step(closure_of(model, optimizer, 0))
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize(
    "modes",
    [
        {"use_local_updates": True, "target_batch_size": 64},
        {"outer": shoal.DiLoCo(), "target_batch_size": 65},
        {"target_batch_size": 64},
    ],
    ids=["local updates", "DiLoCo", "epochs"],
)
def test_the_scaler_sees_what_the_closure_leaves(alone: Alone, modes: dict[str, Any]) -> None:
    """`step` unscales the gradients, and the loss is what the closure returns."""
    model, scaler = make_model(), shoal.GradScaler("cpu", init_scale=16.0)
    optimizer = alone(model, batch_size_per_step=64, optimizer=Reads, **modes)
    inputs, outputs = fixed_batch(0)

    def closure() -> Tensor:
        loss = ((model(inputs) - outputs) ** 2).mean()
        scaler.scale(loss).backward()
        return loss

    optimizer.step(closure, grad_scaler=scaler)
    # Powers of two are exact; a sum over a gradient may round otherwise.
    torch.testing.assert_close(flat(model), plainly(Reads, 1)[0], rtol=1e-6, atol=1e-8)


# -- several peers


@contextlib.contextmanager
def running(count: int, make: Make, target: int, given: dict[str, Any]) -> Iterator[list[Any]]:
    """Peers of one run in this process: each has a model, an optimizer and the reports of its epochs."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(shoal.DHT(start=True))
        made: list[Any] = []

        def join() -> None:
            dht = first if not made else stack.enter_context(shoal.DHT(first.get_visible_maddrs(), start=True))
            model = make_model()
            optimizer = shoal.Optimizer(
                dht=dht, run_id="closures", params=model.parameters(), optimizer=make, target_batch_size=target,
                matchmaking_time=20.0, averaging_timeout=30.0, **given,
            )  # fmt: skip
            stack.callback(optimizer.shutdown)
            reports: list[Any] = []
            optimizer.on_event = reports.append
            made.append((model, optimizer, reports))

        for _ in range(count):
            join()
        yield [made, join]


def epoch(peer: Any, number: int, batch_size: int, with_closure: bool) -> None:
    model, optimizer, _ = peer
    before = optimizer.local_epoch
    closure = closure_of(model, optimizer, number)
    if with_closure:
        optimizer.step(closure, batch_size=batch_size)
    else:
        closure()
        optimizer.step(batch_size=batch_size)
    wait_until(lambda: (optimizer.step(batch_size=0), optimizer.local_epoch > before)[1])


def test_peers_step_with_the_mean_loss_of_the_run_and_a_newcomer_downloads_once() -> None:
    seen: dict[int, list[float | None]] = {}

    class Notes(Reads):
        def update(self, loss: Any = None) -> None:
            seen.setdefault(id(self.param_groups[0]["params"][0]), []).append(None if loss is None else float(loss))
            super().update(loss)

    with running(2, Notes, 64, {}) as (made, join), ThreadPoolExecutor(3) as pool:

        def epochs(count: int, sizes: list[int], closures: list[bool]) -> None:
            for _ in range(count):
                jobs = [
                    pool.submit(epoch, peer, 10 * peer[1].local_epoch + number, size, with_closure)
                    for number, (peer, size, with_closure) in enumerate(zip(made, sizes, closures, strict=True))
                ]
                [job.result() for job in jobs]
                assert len({flat(model).numpy().tobytes() for model, *_ in made}) == 1

        losses = [float(closure_of(made[0][0], made[0][1], number)().detach()) for number in (0, 1)]
        for model, *_ in made:
            model.zero_grad()
        epochs(1, [16, 48], [True, True])
        first, second = seen.values()
        assert first == second
        assert first[0] == pytest.approx(0.25 * losses[0] + 0.75 * losses[1])
        epochs(1, [16, 48], [True, False])
        assert first == second
        assert first[-1] is None, "a peer with samples gave none"
        epochs(2, [16, 48], [True, True])
        join()
        made[2][1].step(batch_size=0)
        epochs(3, [16, 16, 32], [True, True, True])
        assert len({tuple(each[-3:]) for each in seen.values()}) == 1
        assert None not in first[-3:]
        downloads = [report for report in made[2][2] if isinstance(report, shoal.DownloadReport)]
        assert len(downloads) == 1
