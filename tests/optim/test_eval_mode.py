"""`train()` and `eval()` of a wrapped optimizer, as schedule-free ones have them: they change the model's parameters in
every mode, and what this peer is to others is what it is in train mode."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.optim.averaging_sgd import BETA, AveragingSGD
from tests.optim.models import backward, fixed_batch, flat, make_model

MODES: dict[str, dict[str, Any]] = {
    "at once": {},
    "in place": {"reuse_grad_buffers": True},
    "on the host": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True, "offload_optimizer": True},
    "delayed": {"delay_grad_averaging": True, "delay_optimizer_step": True, "offload_optimizer": True},
    "local updates": {"use_local_updates": True, "delay_state_averaging": False},
    "local updates, delayed": {"use_local_updates": True},
    "outer": {"outer": shoal.DiLoCo(inner_steps=2), "target_batch_size": None},
    "outer on the host": {
        "outer": shoal.DiLoCo(inner_steps=2),
        "target_batch_size": None,
        "offload_optimizer": True,
    },
}
Run = tuple[nn.Module, shoal.Optimizer]


@contextlib.contextmanager
def run(dht: shoal.DHT, optimizer: Any = AveragingSGD, **options: Any) -> Iterator[Run]:
    model = make_model()
    given: dict[str, Any] = {"target_batch_size": 8, "batch_size_per_step": 8, "run_id": "eval", **options}
    given = {"optimizer": optimizer, "matchmaking_time": 5.0, "averaging_timeout": 20.0} | given
    made = shoal.Optimizer(dht=dht, params=model.parameters(), **given)
    try:
        yield model, made
    finally:
        made.shutdown()


def train(made: Run, steps: range) -> None:
    model, optimizer = made
    for step in steps:
        backward(model, *fixed_batch(step), clear=not optimizer.reuse_grad_buffers)
        optimizer.step()


def averages(made: Run) -> torch.Tensor:
    """What eval mode has, computed from what train mode has."""
    model, optimizer = made
    zs = [optimizer.optimizer.state[p]["z"] for group in optimizer.optimizer.param_groups for p in group["params"]]
    return torch.cat([p.detach().lerp(z, 1 - 1 / BETA).flatten() for p, z in zip(model.parameters(), zs, strict=True)])


@pytest.mark.parametrize("mode", MODES)
def test_eval_changes_the_model_and_nothing_else(mode: str, dht: shoal.DHT) -> None:
    ends = []
    for evaluates in (False, True):
        with run(dht, run_id=f"eval {evaluates}", **MODES[mode]) as made:
            model, optimizer = made
            optimizer.train()
            for step in range(6):
                train(made, range(step, step + 1))
                if not evaluates:
                    continue
                optimizer.settle()
                wanted, before = averages(made), flat(model)
                digest, samples = optimizer._state.state_digest, optimizer.local_progress.samples_accumulated
                optimizer.eval()
                optimizer.train(False)  # again
                assert torch.equal(flat(model), wanted)  # the same operation on the same numbers
                assert torch.equal(wanted, before) == (step == 0)  # after one step, z is the average
                with pytest.raises(RuntimeError, match=r"in eval\(\): call train\(\)"):
                    optimizer.step()
                assert optimizer._state.state_digest == digest
                assert optimizer.local_progress.samples_accumulated == samples
                optimizer.train()
                assert torch.equal(flat(model), before)  # put back
            optimizer.settle()
            ends.append((flat(model), optimizer.local_epoch, optimizer._state.state_digest))
    # The same steps from the same numbers. In the delayed modes, settling has changed when a result is applied.
    if "delayed" not in mode:
        assert torch.equal(ends[0][0], ends[1][0])
        assert ends[0][1:] == ends[1][1:]


def test_a_newcomer_gets_what_train_mode_has(dht: shoal.DHT) -> None:
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as other, run(dht) as host:
        model, optimizer = host
        optimizer.train()
        train(host, range(3))
        in_train = flat(model)
        optimizer.eval()
        with run(other) as guest:
            assert guest[1].load_state_from_peers()
            assert torch.equal(flat(guest[0]), in_train)  # sent exactly
            guest[1].train()  # it is in train mode already, as the state is
            assert torch.equal(flat(guest[0]), in_train)
            assert guest[1]._state.state_digest == optimizer._state.state_digest
            guest[1].eval()
            in_eval = flat(guest[0])
            assert torch.equal(in_eval, flat(model))  # the same operation on the same numbers
            assert guest[1].load_state_from_peers() in (True, False)  # whether or not it loads, the mode stays
            assert torch.equal(flat(guest[0]), in_eval)


def test_a_round_in_eval_mode_is_made_without_this_peer(dht: shoal.DHT) -> None:
    given = {"target_batch_size": 16, "matchmaking_time": 0.5, "load_state_timeout": 10.0}
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as other, run(dht, **given) as one, run(other, **given) as two:
        one[1].train()
        two[1].train()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda made: train(made, range(2)), (one, two)))  # a round of both
        two[1].eval()
        in_eval = flat(two[0])
        train(one, range(2, 6))
        assert one[1].local_epoch > two[1].local_epoch  # it has made rounds alone
        assert torch.equal(flat(two[0]), in_eval)
        two[1].train()
        for step in range(2, 20):  # the first may not know yet that the others are further
            if two[1].local_epoch < one[1].local_epoch:
                train(two, range(step, step + 1))
        assert two[1].local_epoch == one[1].local_epoch
        assert torch.equal(flat(two[0]), flat(one[0]))  # downloaded exactly
        assert not two[1]._state.is_in_eval


@pytest.mark.parametrize("mode", ["at once", "on the host", "outer"])
@pytest.mark.parametrize("saved_in", ["train", "eval"])
def test_a_checkpoint_of_either_mode(mode: str, saved_in: str, dht: shoal.DHT) -> None:
    """Of train mode, training continues to the bit; of eval mode, after the optimizer's own way back, which rounds."""
    with run(dht, run_id="first", **MODES[mode]) as made:
        model, optimizer = made
        optimizer.train()
        train(made, range(4))
        getattr(optimizer, saved_in)()
        file, shown = io.BytesIO(), flat(model)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        optimizer.train()
        train(made, range(4, 8))
        wanted = flat(model)
    with run(dht, run_id="second", **MODES[mode]) as made:
        model, optimizer = made
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert torch.equal(flat(model), shown)
        assert optimizer._state.is_in_eval == (saved_in == "eval")
        optimizer.train()
        assert optimizer.local_epoch == (2 if mode == "outer" else 4)
        if mode != "outer":
            assert optimizer._state.copy_for_newcomer().tip == optimizer._state.tip  # it is what the digest says
        train(made, range(4, 8))
        # A lerp to x and back: an error of an ulp of each operand, divided by beta twice; then four like steps.
        tolerance = 0.0 if saved_in == "train" else 2e-6
        assert (flat(model) - wanted).abs().max() <= tolerance


def test_what_is_loaded_ends_eval_mode(dht: shoal.DHT) -> None:
    with run(dht) as (model, optimizer):
        optimizer.train()
        train((model, optimizer), range(2))
        saved = optimizer.state_dict()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        train((model, optimizer), range(2, 3))
        optimizer.eval()
        model.load_state_dict(kept)
        optimizer.load_state_dict(saved)
        assert not optimizer._state.is_in_eval
        train((model, optimizer), range(2, 4))  # it is in train mode, as the state that was loaded


@pytest.mark.parametrize("mode", ["at once", "delayed", "outer"])
def test_after_the_run(mode: str, dht: shoal.DHT) -> None:
    with run(dht, **MODES[mode]) as made:
        model, optimizer = made
        optimizer.train()
        train(made, range(4))
        optimizer.finish()
        wanted, before = averages(made), flat(model)
        optimizer.eval()
        assert torch.equal(flat(model), wanted)  # the same operation on the same numbers
        optimizer.train()
        assert torch.equal(flat(model), before)


def test_options_that_they_change_are_not_compared(dht: shoal.DHT) -> None:
    with run(dht) as (_, optimizer):
        assert b"train_mode" in optimizer._state.options.own(0)
        optimizer.train()
        assert b"train_mode" not in optimizer._state.options.own(0)
        assert optimizer._state.options.at_tip[0]["train_mode"] is True
        optimizer.eval()
        assert optimizer._state.options.at_tip[0]["train_mode"] is True  # what newcomers get
        with pytest.raises(AttributeError, match="'Optimizer' object has no attribute 'tran'"):
            optimizer.tran()


def test_an_optimizer_without_modes_has_none(dht: shoal.DHT) -> None:
    with run(dht, torch.optim.SGD) as (_, optimizer):
        assert not hasattr(optimizer, "train")
        assert not hasattr(optimizer, "eval")


class Swapping(AveragingSGD):
    """One that exchanges parameters and state, as some do with moving averages."""

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False
            for parameter in group["params"]:
                z = self.state[parameter]["z"]
                was = parameter.detach().clone()
                parameter.data.copy_(z)
                z.data.copy_(was)


def test_a_state_that_eval_changes_is_not_given(dht: shoal.DHT) -> None:
    with run(dht, Swapping) as (model, optimizer):
        optimizer.train()
        train((model, optimizer), range(2))
        optimizer.eval()
        with pytest.raises(Exception, match=r"eval\(\) of this peer's optimizer has changed its state"):
            optimizer._state.copy_for_newcomer()


@pytest.mark.parametrize("mode", ["at once", "delayed"])
def test_train_before_each_batch_waits_for_nothing(mode: str, dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(dht, **MODES[mode]) as made:
        made[1].train()
        settled = []
        monkeypatch.setattr(made[1]._epoch, "settle", lambda: settled.append(1))
        for step in range(4):
            made[1].train()
            train(made, range(step, step + 1))
        assert not settled


class Failing(AveragingSGD):
    def eval(self) -> None:
        super().eval()
        with torch.no_grad():
            self.param_groups[0]["params"][0].zero_()
        raise KeyError("half way")


def test_an_eval_that_fails_changes_nothing(dht: shoal.DHT) -> None:
    with run(dht, Failing) as (model, optimizer):
        optimizer.train()
        train((model, optimizer), range(2))
        before = flat(model)
        with pytest.raises(KeyError):
            optimizer.eval()
        assert torch.equal(flat(model), before)
        train((model, optimizer), range(2, 3))


def test_no_epoch_is_closed_on_loan_in_eval(dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(dht) as (model, optimizer):
        optimizer.train()
        train((model, optimizer), range(1))
        swarm = optimizer._run.swarm
        monkeypatch.setattr(type(swarm), "called", property(lambda _: True))
        assert optimizer._epoch.can_end
        optimizer.eval()
        assert not optimizer._epoch.can_end


def test_a_plain_state_of_eval_mode_becomes_another_state_at_train(dht: shoal.DHT) -> None:
    with run(dht) as (model, optimizer):
        plain = make_model()
        other = AveragingSGD(plain.parameters())
        other.train()
        for step in range(2):
            backward(plain, *fixed_batch(step))
            other.step()
        other.eval()
        optimizer.train()
        train((model, optimizer), range(2))
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(other.state_dict())
        tip = optimizer.tip
        optimizer.train()
        assert optimizer.tip != tip  # the parameters are not those that were loaded
        assert optimizer._state.copy_for_newcomer().tip == optimizer._state.tip
