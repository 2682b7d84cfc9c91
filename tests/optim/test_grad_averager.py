"""`GradientAverager`: what is accumulated is averaged by samples, once, and the same at all peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.averaging.control import AveragingStage
from shoal.averaging.exchange import Exchange
from shoal.optim.grad_averager import GradientAverager
from shoal.swarm.protocol.messages import Result
from tests.optim.swarm_of_averagers import started
from tests.waiting import wait_until


def models(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(7, 5) for _ in range(count)]
    for model in made[1:]:
        model.load_state_dict(made[0].state_dict())
    return made


def makers(trained: list[nn.Linear], **options: Any) -> list[Callable[..., GradientAverager]]:
    """An averager for each; an option that is a list holds one value for each."""
    own = [{k: v[i] if isinstance(v, list) else v for k, v in options.items()} for i in range(len(trained))]
    return [partial(GradientAverager, m.parameters(), **mine) for m, mine in zip(trained, own, strict=True)]


def backward(model: nn.Linear, data: torch.Tensor) -> None:
    F.mse_loss(model(data), torch.ones(len(data), 5)).backward()


def gradients(averager: GradientAverager) -> list[torch.Tensor]:
    with averager.use_averaged_gradients() as averaged:
        return [gradient.clone() for gradient in averaged]


def test_scheduled_rounds_of_peers_that_accumulate_in_either_way() -> None:
    one, other = (nn.ParameterDict({"w": nn.Parameter(torch.zeros(5, 5))}) for _ in range(2))
    both = [
        partial(GradientAverager, one.parameters(), reuse_grad_buffers=False),
        partial(GradientAverager, other.parameters(), reuse_grad_buffers=True),
    ]
    with started(both, target_group_size=2) as (first, second):
        controls = [averager.schedule_step(shoal.get_dht_time() + 30) for averager in (first, second)]
        for number in range(10):
            if number % 3 == 0:
                F.mse_loss(one.w, torch.ones(5, 5)).backward()
                first.accumulate_grads_(batch_size=2)
                one.zero_grad()
            else:
                F.mse_loss(other.w, -torch.ones(5, 5)).backward()
                second.accumulate_grads_(batch_size=3)
        wait_until(lambda: all(control.stage is AveragingStage.AWAITING_TRIGGER for control in controls))
        assert (first.local_samples_accumulated, first.local_times_accumulated) == (8, 4)
        assert (second.local_samples_accumulated, second.local_times_accumulated) == (18, 6)
        assert torch.allclose(next(first._grad_accumulators()), torch.full((5, 5), -2 / 25 * 4))
        assert torch.allclose(next(second._grad_accumulators()), torch.full((5, 5), 2 / 25 * 6))
        assert not first.has_averaged_gradients
        for averager, control in zip((first, second), controls, strict=True):
            assert averager.step(control=control, wait=False) is control
        assert all(len(control.result(30)) == 2 for control in controls)
        assert first.has_averaged_gradients
        want = torch.full((5, 5), (8 * -2 / 25 + 18 * 2 / 25) / 26)
        for averager, model in ((first, one), (second, other)):
            with averager.use_averaged_gradients():
                assert torch.allclose(model.w.grad, want)
            assert model.w.grad is None or not torch.allclose(model.w.grad, want)
            assert averager.local_samples_accumulated == averager.local_times_accumulated == 0
        assert not first.has_averaged_gradients
        assert torch.equal(gradients(first)[0], gradients(second)[0])
        with pytest.raises(ValueError, match="this control was used"):
            first.step(control=controls[0])


def test_peers_with_unlike_batches_average_as_one_process_would() -> None:
    trained = models(4)
    alone = models(1)[0]
    data = torch.randn(30, 7)
    backward(alone, data)
    batches = [[(0, 4), (4, 10)], [(10, 11)], [(11, 20), (20, 21), (21, 30)], []]
    with started(makers(trained, client_mode=[False, True, False, False]), min_matchmaking_time=20.0) as averagers:
        for model, averager, mine in zip(trained, averagers, batches, strict=True):
            for start, stop in mine:
                backward(model, data[start:stop])
                averager.accumulate_grads_(stop - start)
                model.zero_grad()
        controls = [averager.step(wait=False) for averager in averagers]  # the last has no samples, and receives
        assert all(len(control.result(30)) == 4 for control in controls)
        held = [gradients(averager) for averager in averagers]
        for ours in held:
            assert all(torch.equal(a, b) for a, b in zip(ours, held[0], strict=True))
        for gradient, parameter in zip(held[0], alone.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, atol=1e-6)


def test_an_auxiliary_peer_lends_its_bandwidth_and_keeps_its_memory() -> None:
    trained = models(3)
    with started(makers(trained, auxiliary=[False, False, True]), min_matchmaking_time=20.0) as averagers:
        backward(trained[2], torch.randn(3, 7))
        averagers[2].accumulate_grads_(3)
        kept = [accumulator / 1 for accumulator in averagers[2]._grad_accumulators()]
        for model, averager in zip(trained[:2], averagers[:2], strict=True):
            backward(model, torch.randn(2, 7))
            averager.accumulate_grads_(2)
        controls = [averager.step(wait=False) for averager in averagers]
        assert all(len(control.result(30)) == 3 for control in controls)
        assert all(torch.equal(a, b) for a, b in zip(gradients(averagers[0]), gradients(averagers[1]), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(gradients(averagers[2]), kept, strict=True))


def test_a_round_that_fails_halfway_and_is_tried_again_averages_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = [nn.ParameterDict({"w": nn.Parameter(torch.zeros(60_000))}) for _ in range(3)]
    all_makers = [partial(GradientAverager, model.parameters()) for model in trained]
    # The round's time is up before anybody is put out of it: it fails for all.
    with started(all_makers, min_matchmaking_time=5.0, next_chunk_timeout=20.0, allreduce_timeout=1.5) as averagers:
        broken: set[bytes] = set()
        sent = 0
        original = Exchange.__init__

        def init(self: Exchange, vectors: Any, me: bytes, begin: Any, send: Any, fault: Any) -> None:
            def losing(keys: Any, message: Any, buffers: Any, name: bytes) -> None:
                """In the first round nobody sends more than its first results."""
                nonlocal sent
                sent += isinstance(message, Result)
                broken.add(message.round) if not broken else None
                if not (message.round in broken and isinstance(message, Result) and sent > 3):
                    send(keys, message, buffers, name)

            original(self, vectors, me, begin, losing, fault)

        monkeypatch.setattr(Exchange, "__init__", init)
        for number, (model, averager) in enumerate(zip(trained, averagers, strict=True)):
            model.w.grad = torch.full((60_000,), float(number))
            averager.accumulate_grads_(1)
        controls = [averager.step(wait=False, timeout=40.0) for averager in averagers]
        for control in controls:
            control.result(45)
        assert sent > 3
        held = [gradients(averager)[0] for averager in averagers]
        assert all(torch.equal(ours, held[0]) for ours in held)
        assert held[0].unique().tolist() == [1.0], "the mean of all, each counted once"


def test_without_a_round_the_result_is_this_peers_own() -> None:
    trained = models(1)
    with started(makers(trained)) as (averager,):
        backward(trained[0], torch.randn(3, 7))
        own = [torch.clone(parameter.grad) for parameter in trained[0].parameters()]
        averager.accumulate_grads_(3)
        with pytest.raises(shoal.AveragingError, match="no result within"):
            averager.step(timeout=1.0, scheduled_time=shoal.get_dht_time())
        assert all(torch.equal(a, b) for a, b in zip(gradients(averager), own, strict=True))


def test_misuse_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trained = models(2)
    with started(makers(trained, warn=[True, False]), target_group_size=2) as averagers:
        for model, averager in zip(trained, averagers, strict=True):
            for _ in range(2):
                backward(model, torch.randn(3, 7))
                averager.accumulate_grads_(3)
                control = averager.step(wait=False, reset_accumulators=False, timeout=20.0)
                control.cancel()
        assert caplog.text.count("were averaged and not reset") == 1
        assert caplog.text.count("the last result was not used") == 1
        with pytest.raises(ValueError, match="weight="):
            averagers[0].schedule_step(weight=3.0)
        with pytest.raises(ValueError, match="gather: the control was made without"):
            averagers[0].step(control=averagers[0].schedule_step(timeout=10.0), gather=3)
        with pytest.raises(ValueError, match="batch_size"):
            averagers[0].accumulate_grads_(0)
    wrong = [torch.zeros(5, 7, 1), torch.zeros(5)]
    with shoal.DHT(start=True) as dht:
        options: dict[str, Any] = {"dht": dht, "prefix": "test", "start": False}
        with pytest.raises(ValueError, match="averaged_grads have shapes"):
            GradientAverager(trained[0].parameters(), averaged_grads=wrong, **options)
        with pytest.raises(ValueError, match="accumulate_grads_on="):
            GradientAverager(trained[0].parameters(), reuse_grad_buffers=True, accumulate_grads_on="cpu", **options)


def test_a_subclass_may_accumulate_and_count_by_itself() -> None:
    class Largest(GradientAverager):
        def accumulate_grads_(self, batch_size: int) -> None:
            for largest, parameter in zip(self._grad_accumulators(), self.parameters, strict=True):
                assert parameter.grad is not None
                torch.maximum(largest, parameter.grad, out=largest)
            self.local_samples_accumulated += batch_size
            self.local_times_accumulated = 1

    (model,) = models(1)
    with started([partial(Largest, model.parameters())]) as (averager,):
        for value in (2.0, 3.0, 1.0):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            averager.accumulate_grads_(4)
        assert (averager.local_samples_accumulated, averager.local_times_accumulated) == (12, 1)
        averager.load_accumulators_into_averager_()
        assert all((gradient == 3.0).all() for gradient in gradients(averager))
        averager.reset_accumulated_grads_()
        assert averager.local_samples_accumulated == 0
