"""Parameters that get other memory, or are replaced, after the optimizer was made: training goes on, or says which."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, fused, make_model
from tests.waiting import wait_until

Alone = Callable[..., shoal.Optimizer]
EPOCHS = 3

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reused": {"reuse_grad_buffers": True},
    "offloaded": {"offload_optimizer": True},
    "delayed": {"delay_optimizer_step": True},
    "local": {"use_local_updates": True},
}
in_every_mode = pytest.mark.parametrize("mode", MODES)


def make(alone: Alone, model: nn.Module, mode: str) -> shoal.Optimizer:
    return alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], **MODES[mode])


def train(model: nn.Module, optimizer: shoal.Optimizer, epoch: int, mode: str) -> None:
    """One epoch, applied when this returns."""
    backward(model, *fixed_batch(epoch))
    optimizer.step(batch_size=64)
    optimizer.state_dict()  # waits for what is in the background
    assert optimizer.local_epoch == epoch + 1
    if mode != "reused":
        optimizer.zero_grad()


def trained_by_torch(changes: Callable[[nn.Module, int], None]) -> torch.Tensor:
    """The same with nothing but torch; `changes` is called before each epoch."""
    model = make_model()
    local = fused(OPTIMIZERS["adamw"](model.parameters()))
    for epoch in range(EPOCHS):
        changes(model, epoch)
        backward(model, *fixed_batch(epoch))
        local.step()
    return flat(model)


def trained_by_shoal(alone: Alone, mode: str, changes: Callable[[nn.Module, int], None]) -> torch.Tensor:
    model = make_model()
    optimizer = make(alone, model, mode)
    reports: list[Any] = []
    optimizer.on_event = reports.append
    for epoch in range(EPOCHS):
        changes(model, epoch)
        train(model, optimizer, epoch, mode)
    assert len({report.state_digest for report in reports}) == EPOCHS, "the digest froze"
    return flat(model)


def clone(model: nn.Module, epoch: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def set_data(model: nn.Module, epoch: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def load(model: nn.Module, epoch: int, *, assign: bool) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=assign)


def assign(model: nn.Module, epoch: int) -> None:
    load(model, epoch, assign=True)


def write(model: nn.Module, epoch: int) -> None:
    load(model, epoch, assign=False)


@in_every_mode
def test_training_goes_on_with_the_same_values_in_other_memory(alone: Alone, mode: str) -> None:
    assert torch.equal(trained_by_shoal(alone, mode, clone), trained_by_torch(lambda model, epoch: None))


@in_every_mode
@pytest.mark.parametrize("changes", [set_data, assign, write], ids=lambda function: function.__name__)
def test_training_goes_on_with_what_was_set(alone: Alone, mode: str, changes: Callable[[nn.Module, int], None]) -> None:
    assert torch.equal(trained_by_shoal(alone, mode, changes), trained_by_torch(write))


@in_every_mode
def test_assigning_a_checkpoint_keeps_the_parameters(alone: Alone, mode: str) -> None:
    model = make_model()
    optimizer = make(alone, model, mode)
    before = list(model.parameters())
    assign(model, 0)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    optimizer.shutdown()


def test_without_an_optimizer_torch_replaces_them() -> None:
    model = make_model()
    before = next(model.parameters())
    assign(model, 0)
    assert next(model.parameters()) is not before


def replace_one(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(flat(model[2])[:-20].view(20, 20))


@in_every_mode
def test_another_parameter_in_a_module_is_refused_by_name(alone: Alone, mode: str) -> None:
    model = make_model()
    optimizer = make(alone, model, mode)
    train(model, optimizer, 0, mode)
    replace_one(model)
    backward(model, *fixed_batch(1))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter 2 \('weight' of a Linear\) was replaced.*before you make"):
            optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 1


def test_the_first_step_names_it_as_the_user_did(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, params=model.named_parameters(), target_batch_size=128, optimizer=OPTIMIZERS["sgd"])
    replace_one(model)
    backward(model, *fixed_batch(0))
    with pytest.raises(ValueError, match=r"parameter 2 \('2\.weight'\) was replaced"):
        optimizer.step(batch_size=64)


def test_a_model_whose_parameters_were_all_replaced_is_named_though_it_brings_no_gradient(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=128, optimizer=OPTIMIZERS["sgd"])
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=32)
    optimizer.zero_grad()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    backward(model, *fixed_batch(0))
    with pytest.raises(ValueError, match=r"parameter 0 .*was replaced"):
        optimizer.step(batch_size=32)


@in_every_mode
def test_a_model_that_was_converted_is_refused_by_name(alone: Alone, mode: str) -> None:
    model = make_model()
    optimizer = make(alone, model, mode)
    says = r"parameter 0 \('weight' of a Linear\) is float64 .* now, and was float32 .*before"
    for epoch in range(2):
        model.double()
        inputs, outputs = fixed_batch(0)
        backward(model, inputs.double(), outputs.double())
        with pytest.raises(ValueError, match=says):
            optimizer.step(batch_size=64)
        model.float()  # and now it fits again
        train(model, optimizer, epoch, mode)


def test_an_extra_tensor_that_was_replaced_is_refused_by_name(alone: Alone) -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    buffers = list(model.buffers())
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], extra_tensors=buffers)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 1
    model.float()  # changes nothing
    model._apply(
        lambda tensor: tensor.clone()
    )  # as a move to a device does: it keeps parameters, and makes new buffers
    backward(model, *fixed_batch(1))
    with pytest.raises(ValueError, match=r"extra tensor 0 \('running_mean' of a BatchNorm1d\) was replaced"):
        optimizer.step(batch_size=64)


class Counting(nn.Module):
    """Makes a new buffer in each forward pass."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.layer(inputs)  # type: ignore[no-any-return]


@pytest.mark.long
def test_what_looks_at_buffers_does_not_break_compiled_graphs(alone: Alone) -> None:
    shared = nn.BatchNorm1d(4)
    alone(shared, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], extra_tensors=list(shared.buffers()))
    model = Counting()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for epoch in range(2):
        backward(compiled, *fixed_batch(epoch))
        optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 2
    assert model.calls == 2


def test_who_sets_other_values_downloads_the_runs_state(dht: shoal.DHT) -> None:
    """An epoch later: the digest in its JOIN is that of what its last step has made."""
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as elsewhere:
        models = [make_model(), make_model()]
        made = [
            shoal.Optimizer(
                dht=place,
                run_id="replaced",
                target_batch_size=64,
                params=model.parameters(),
                optimizer=OPTIMIZERS["sgd"],
            )
            for place, model in zip((dht, elsewhere), models, strict=True)
        ]
        reports: list[list[Any]] = [[], []]
        for optimizer, heard in zip(made, reports, strict=True):
            optimizer.on_event = heard.append

        def train_until(epoch: int) -> None:
            def loop(model: nn.Module, optimizer: shoal.Optimizer) -> None:
                while optimizer.local_epoch < epoch:
                    backward(model, *fixed_batch(optimizer.local_epoch))
                    optimizer.step(batch_size=32)

            threads = [threading.Thread(target=loop, args=pair) for pair in zip(models, made, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)

        wait_until(lambda: all(len(optimizer._run.swarm.peer.view.connected()) == 2 for optimizer in made))
        train_until(2)
        set_data(models[1], 2)
        train_until(3)
        later = [report for heard in reports for report in heard if report.epoch > 1]
        assert not any(isinstance(report, shoal.DownloadReport) for report in later), later
        train_until(4)
        kinds = [type(report) for heard in reports for report in heard if report.epoch == 4]
        assert shoal.DownloadReport in kinds, reports
        assert made[0].tracker.global_epoch == 4
        assert torch.equal(flat(models[0]), flat(models[1]))
        for optimizer in made:
            optimizer.shutdown()


@pytest.mark.parametrize("offload", [False, True])
def test_an_averager_of_states_by_itself_trains_what_the_model_has(dht: shoal.DHT, offload: bool) -> None:
    model = make_model()
    averager = shoal.TrainingStateAverager(
        dht=dht,
        prefix=f"replaced {offload}",
        start=True,
        params=model.parameters(),
        optimizer=OPTIMIZERS["sgd"],
        offload_optimizer=offload,
    )
    assign(model, 0)
    start = flat(model)
    backward(model, *fixed_batch(0))
    averager.step(optimizer_step=True)
    assert not torch.equal(flat(model), start)
    replace_one(model)
    backward(model, *fixed_batch(0))
    with pytest.raises(ValueError, match="parameter 2 was replaced: a module has another tensor as its 'weight' now"):
        averager.step(optimizer_step=True)
    averager.shutdown()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "local"])
def test_the_same_memory_with_other_strides_or_another_shape(alone: Alone, mode: str) -> None:
    """`p.data = p.data.t()` moves values; a slice is refused by name."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    optimizer = alone(model, target_batch_size=4, optimizer=OPTIMIZERS["sgd"], **MODES[mode])
    local = OPTIMIZERS["sgd"](plain.parameters())
    for _ in range(2):
        model.weight.data, plain.weight.data = model.weight.data.t(), plain.weight.data.t()
        for each, stepper in ((model, optimizer), (plain, local)):
            each(torch.arange(16.0).view(4, 4)).square().mean().backward()
            stepper.step(batch_size=4) if stepper is optimizer else stepper.step()
            if not (mode == "reused" and stepper is optimizer):
                stepper.zero_grad()
        optimizer.settle()
        torch.testing.assert_close(model.weight, plain.weight)
    model.weight.data = model.weight.data[:2]
    with pytest.raises(ValueError, match=r"'weight'.* is float32 of shape \(2, 4\)"):
        optimizer._state.take_over()
