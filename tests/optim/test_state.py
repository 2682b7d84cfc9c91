"""A state as a newcomer gets it: all of it arrives, in torch's types, and what does not fit changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from shoal.compression import NoCompression
from shoal.flat import Layout
from shoal.optim.state import TrainingState
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import FrozenState, encoded
from shoal.transfer.transfer import Downloaded
from tests.optim.models import backward, fixed_batch, flat, make_model

TIP = Tip.genesis("run").after(bytes(32), 5.0)


def downloaded(snapshot: FrozenState, **scalars: Any) -> Downloaded:
    """The snapshot as it arrives; `scalars` are put in place of its own."""
    raw = msgspec.msgpack.decode(snapshot.scalars) | scalars
    given = replace(snapshot, scalars=msgspec.msgpack.encode(raw))
    manifest = encoded(given).manifest
    return Downloaded(manifest, [buffer.clone() for buffer in given.buffers], False, given.scalars, {}, {}, 0, 0.0)


Made = tuple[nn.Sequential, TrainingState]


def trained(epochs: int, seed: int = 0, **options: Any) -> Made:
    """A model and its state after some epochs."""
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3], gamma=0.5)
    state = TrainingState(optimizer, schedule, [torch.full((3,), float(seed))])
    for epoch in range(epochs):
        backward(model, *fixed_batch(epoch))
        optimizer.step()
        schedule.step()
        state.adopt_statistics()
    return model, state


def everything(made: Made) -> list[torch.Tensor]:
    model, state = made
    statistics = [
        value
        for parameter in state.parameters
        for _, value in sorted(state.optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    return [flat(model), *(tensor.clone() for tensor in [*statistics, *state.extra_tensors])]


def test_all_of_it_arrives_and_training_goes_on_alike() -> None:
    donor = trained(2)
    newcomer = trained(0, seed=5)
    snapshot = donor[1].snapshot(TIP, NoCompression())
    assert snapshot.tip == TIP
    newcomer[1].load(downloaded(snapshot))
    for _ in range(2):
        for mine, theirs in zip(everything(newcomer), everything(donor), strict=True):
            assert torch.equal(mine, theirs)  # a copy, and the same kernels afterwards
        assert newcomer[1].digest() == donor[1].digest()
        assert newcomer[1].optimizer.param_groups[0]["lr"] == donor[1].optimizer.param_groups[0]["lr"]
        assert newcomer[1].optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        for model, state in (donor, newcomer):
            backward(model, *fixed_batch(7))
            state.optimizer.step()
            assert state.scheduler is not None
            state.scheduler.step()
    schedule = newcomer[1].scheduler
    assert isinstance(schedule, torch.optim.lr_scheduler.MultiStepLR)
    assert isinstance(schedule.milestones, Counter)
    assert schedule.last_epoch == 4


def test_a_snapshot_is_of_one_moment() -> None:
    donor = trained(1)
    before = everything(donor)
    state = downloaded(donor[1].snapshot(TIP, NoCompression()))
    with torch.no_grad():
        for parameter in donor[0].parameters():
            parameter.zero_()
    donor[1].optimizer.step()
    newcomer = trained(0, seed=5)
    newcomer[1].load(state)
    assert all(torch.equal(a, b) for a, b in zip(everything(newcomer), before, strict=True))


def test_statistics_that_the_donor_does_not_have_are_dropped() -> None:
    newcomer = trained(2, seed=5)
    newcomer[1].load(downloaded(trained(0)[1].snapshot(TIP, NoCompression())))
    assert not newcomer[1].optimizer.state


def test_how_a_step_is_computed_is_each_peers_own() -> None:
    donor, newcomer = trained(1, foreach=True), trained(0, foreach=False)
    newcomer[1].load(downloaded(donor[1].snapshot(TIP, NoCompression())))
    assert newcomer[1].optimizer.param_groups[0]["foreach"] is False


def test_a_learning_rate_in_a_tensor() -> None:
    donor, newcomer = trained(0), trained(0, seed=5)
    for made, rate in ((donor, 0.25), (newcomer, 0.5)):
        made[1].optimizer.param_groups[0]["lr"] = torch.tensor(rate)
    newcomer[1].load(downloaded(donor[1].snapshot(TIP, NoCompression())))
    assert newcomer[1].optimizer.param_groups[0]["lr"].item() == 0.25


def test_what_cannot_be_sent_is_said() -> None:
    donor = trained(0)
    donor[1].optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(ValueError, match=r"parameter group 0: 'hook' is a builtins.object"):
        donor[1].snapshot(TIP, NoCompression())


def other_model(_: Made) -> Downloaded:
    model = make_model(width=21)
    made = TrainingState(torch.optim.SGD(model.parameters(), lr=1.0), None, [])
    return downloaded(made.snapshot(TIP, NoCompression()))


def test_a_newcomer_is_sent_parameters_and_statistics_and_nothing_else() -> None:
    """The reference's donors send their gradient buffers too, which are thrown away."""
    model, state = trained(1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tensors = 3 * parameters + 6 + sum(extra.numel() for extra in state.extra_tensors)  # AdamW's two, step counts
    padding = 16 * (4 * 6 + len(state.extra_tensors))
    buffers = downloaded(state.snapshot(TIP, NoCompression())).buffers
    assert tensors <= sum(buffer.numel() for buffer in buffers) <= tensors + padding


def other_dtype(_: Made) -> Downloaded:
    model = make_model().double()
    made = TrainingState(torch.optim.SGD(model.parameters(), lr=1.0), None, [torch.zeros(3)])
    return downloaded(made.snapshot(TIP, NoCompression()), scheduler={})


def forged(**scalars: Any) -> Callable[[Made], Downloaded]:
    return lambda made: downloaded(made[1].snapshot(TIP, NoCompression()), **scalars)


def wrong_layout(made: Made) -> Downloaded:
    snapshot = made[1].snapshot(TIP, NoCompression())
    layout = msgspec.msgpack.encode(Layout.of([torch.zeros(5)]).to_wire())
    return downloaded(replace(snapshot, layout=layout))


GROUP = {"lr": 0.1, "betas": [0.9, 0.99]}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (other_model, "0 extra tensors; this peer has 6 and 1"),
        (other_dtype, r"torch.float64.*torch.float32.*same model"),
        (forged(tree=b"", groups=[GROUP, GROUP]), "2 parameter groups, this peer 1"),
        (forged(tree=b"", groups=[{"lr": "much"}]), "lr is 'much', and 0.0"),
        (forged(tree=b"", groups=[{"betas": 3}]), "betas is 3"),
        (forged(groups=5), "Expected `array`"),
        (forged(statistics=[[99, "exp_avg"]] * 18), "parameter that does not exist"),
        (forged(tree=b"", values=[[99, "step", 1]]), "parameter that does not exist"),
        (forged(statistics=[]), "parameters and 1 extra tensors; this peer has 6 and 1"),
        (forged(extras=0), "0 extra tensors"),
        (forged(scheduler=None), "scheduler"),
        (forged(scheduler={"last_epoch": "late"}), "last_epoch is 'late'"),
        (forged(scheduler={"last_epoch": msgspec.Raw(b"\x91" * 200_000 + b"\xc0")}), "nested too deeply"),
        (wrong_layout, "does not describe its buffers"),
    ],
)
def test_what_does_not_fit_changes_nothing(make: Callable[[Made], Downloaded], reason: str) -> None:
    made = trained(1)
    state = make(trained(1, seed=9))
    before, rate = everything(made), made[1].optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=reason):
        made[1].load(state)
    assert all(torch.equal(a, b) for a, b in zip(everything(made), before, strict=True))
    assert made[1].optimizer.param_groups[0]["lr"] == rate
