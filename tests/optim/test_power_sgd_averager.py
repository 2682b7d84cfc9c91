"""`PowerSGDGradientAverager`: what is sent is thin, nothing is lost, and nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.averaging.control import StepControl
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager, matrix_shape
from shoal.swarm.protocol.participant import Participant
from tests.optim.swarm_of_averagers import started

SHAPES = [(40, 30), (7,), (6, 8, 10), (), (3, 3)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def makers(count: int, rank: int = 2, **options: Any) -> list[Callable[..., PowerSGDGradientAverager]]:
    own = [{k: v[i] if isinstance(v, list) else v for k, v in options.items()} for i in range(count)]
    return [partial(PowerSGDGradientAverager, parameters(), rank, **mine) for mine in own]


def give(averager: GradientAverager, seed: int, batch_size: int = 1) -> list[torch.Tensor]:
    """Gradients of that seed; returns them."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for parameter, gradient in zip(averager.parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    averager.accumulate_grads_(batch_size)
    return gradients


def result_of(averager: GradientAverager) -> list[torch.Tensor]:
    with averager.use_averaged_gradients() as averaged:
        return [gradient.clone() for gradient in averaged]


def finish(controls: list[StepControl], count: int) -> None:
    assert all(len(control.result(40)) == count for control in controls)


def assert_alike(averagers: list[PowerSGDGradientAverager]) -> list[torch.Tensor]:
    """Each makes its result of the same average, with the same kernels: peers of one machine get the same bits."""
    first, *others = [result_of(averager) for averager in averagers]
    for theirs in others:
        assert all(torch.equal(a, b) for a, b in zip(first, theirs, strict=True))
    return first


def test_results_are_alike_in_all_bits_and_what_is_missing_is_kept() -> None:
    weights = (1, 2, 5)
    with started(makers(3, client_mode=[False, True, False]), min_matchmaking_time=20.0) as averagers:
        owed = [[torch.zeros(shape) for shape in SHAPES] for _ in averagers]
        for epoch in range(4):
            for number, (averager, weight) in enumerate(zip(averagers, weights, strict=True)):
                given = give(averager, 10 * epoch + number, weight)
                owed[number] = [old + new for old, new in zip(owed[number], given, strict=True)]
            finish([averager.step(wait=False) for averager in averagers], 3)
            result = assert_alike(averagers)
            assert all(torch.equal(averagers[0]._qs[n], averagers[2]._qs[n]) for n in range(2))
            # The weighted sums of what all gave, up to now, are in the results or in the members' errors.
            for index, (value, *mine) in enumerate(zip(result, *owed, strict=True)):
                mean = sum(part * weight for part, weight in zip(mine, weights, strict=True)) / sum(weights)
                kept = torch.zeros_like(value)
                if index in averagers[0]._compressed:
                    place = averagers[0]._compressed.index(index)
                    for averager, weight in zip(averagers, weights, strict=True):
                        kept += averager._errors[place].view(value.shape) * weight / sum(weights)
                    assert torch.linalg.matrix_rank(value.view(averagers[0]._shapes[place])) <= 2
                else:
                    assert torch.allclose(value, mean, atol=1e-5)
                assert torch.allclose(value + kept, mean, atol=1e-4)
            for number, averager in enumerate(averagers):
                owed[number] = [torch.zeros(shape) for shape in SHAPES]
                for place, index in enumerate(averager._compressed):
                    owed[number][index] = averager._errors[place].view(SHAPES[index]).clone()
        assert averagers[0]._compressed == [0, 2]


def test_a_low_rank_gradient_comes_exactly() -> None:
    with started(makers(2, rank=1), target_group_size=2) as averagers:
        left, right = torch.randn(40, 1), torch.randn(1, 30)
        for number, averager in enumerate(averagers):
            averager.parameters[0].grad = left @ right * (number + 1)
            averager.accumulate_grads_(1)
        finish([averager.step(wait=False) for averager in averagers], 2)
        assert torch.allclose(assert_alike(averagers)[0], left @ right * 1.5, atol=1e-5)


def test_it_sends_less() -> None:
    def sent(make: Callable[..., GradientAverager]) -> int:
        with started([make, make], target_group_size=2) as averagers:
            before = averagers[0].dht.node.bytes_sent
            for averager in averagers:
                averager.parameters[0].grad = torch.randn(512, 512)
                averager.accumulate_grads_(1)
            for control in [averager.step(wait=False) for averager in averagers]:
                control.result(30)
            return averagers[0].dht.node.bytes_sent - before

    whole = sent(lambda **options: GradientAverager([nn.Parameter(torch.zeros(512, 512))], **options))
    thin = sent(lambda **options: PowerSGDGradientAverager([nn.Parameter(torch.zeros(512, 512))], 4, **options))
    assert thin * 20 < whole


def test_peers_whose_last_steps_differ_still_agree() -> None:
    """A newcomer has another Q than the others, and an auxiliary peer brings none."""
    roles = [False, False, True, False]
    with started(makers(4, auxiliary=roles), min_matchmaking_time=3.0) as averagers:
        for number, averager in enumerate(averagers[:2]):
            give(averager, number)
        finish([averager.step(wait=False) for averager in averagers[:2]], 2)
        assert not torch.equal(averagers[0]._qs[0], averagers[3]._qs[0])
        for number, averager in enumerate(averagers):
            if not averager.auxiliary:
                give(averager, 7 + number)
        finish([averager.step(wait=False) for averager in averagers], 4)
        assert_alike([averagers[0], averagers[1], averagers[3]])
        assert torch.equal(averagers[0]._qs[0], averagers[3]._qs[0])


@pytest.mark.parametrize("half", [1, 2])
def test_a_step_that_fails_in_either_half_and_is_tried_again_counts_nothing_twice(
    half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(makers(2), target_group_size=2, min_matchmaking_time=5.0) as averagers:
        for number, averager in enumerate(averagers):
            give(averager, number)
        finish([averager.step(wait=False) for averager in averagers], 2)
        errors = [[error.clone() for error in averager._errors] for averager in averagers]
        assert all(error.abs().max() > 0.1 for error in errors[0])
        given = [give(averager, 5 + number) for number, averager in enumerate(averagers)]

        rounds: list[bytes] = []
        failed: list[int] = []
        original = Participant._check_done

        def check_done(self: Participant) -> None:
            """Whoever has the whole result of that round loses it, before it says so."""
            if self.round is not None:
                begin, exchange = self.round.begin, self.round.exchange
                rounds.extend([begin.round] if begin.round not in rounds else [])
                if begin.round == rounds[min(half, len(rounds)) - 1] and len(rounds) == half:
                    if exchange.book.complete:
                        failed.append(1)
                        self.complain(self.me, "it is lost", fault=False)
                        self.fail(shoal.AveragingError("this one is lost"))
                    return
            original(self)

        monkeypatch.setattr(Participant, "_check_done", check_done)
        finish([averager.step(wait=False, timeout=60.0) for averager in averagers], 2)
        assert len(failed) == 2, "this test shows nothing"
        assert len(rounds) >= half + 2
        result = assert_alike(averagers)
        for place, index in enumerate(averagers[0]._compressed):
            owed = [g[index] + e[place].view(SHAPES[index]) for g, e in zip(given, errors, strict=True)]
            one, other = (averager._errors[place].view(SHAPES[index]) for averager in averagers)
            assert torch.allclose(result[index] + (one + other) / 2, (owed[0] + owed[1]) / 2, atol=1e-4)


def test_it_trains_as_well_as_whole_gradients() -> None:
    torch.manual_seed(0)
    data, truth = torch.randn(256, 20), torch.randn(20, 10)

    def final_loss(make: Callable[..., GradientAverager]) -> float:
        weights = [nn.Parameter(torch.zeros(20, 10)) for _ in range(2)]
        with started([partial(make, [weight]) for weight in weights], target_group_size=2) as averagers:
            for _ in range(30):
                for number, (weight, averager) in enumerate(zip(weights, averagers, strict=True)):
                    part = data[number::2]
                    weight.grad = None
                    (part @ weight - part @ truth).square().mean().backward()
                    averager.accumulate_grads_(128)
                for control in [averager.step(wait=False) for averager in averagers]:
                    control.result(30)
                for weight, averager in zip(weights, averagers, strict=True):
                    with averager.use_averaged_gradients() as (gradient,), torch.no_grad():
                        weight.sub_(gradient, alpha=2.0)
            assert torch.equal(weights[0], weights[1])
        return float((data @ weights[0].detach() - data @ truth).square().mean())

    untrained = float((data @ truth).square().mean())
    whole = final_loss(GradientAverager)
    thin = final_loss(partial(PowerSGDGradientAverager, averager_rank=2, min_compression_ratio=0.3))
    assert whole < untrained / 50
    assert thin < untrained / 20


def test_what_was_saved_goes_on() -> None:
    def results(rank: int, saved: list[dict[str, Any]]) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
        with started(makers(2, rank=rank), target_group_size=2) as averagers:
            for averager, state in zip(averagers, saved, strict=True):
                averager.load_state_dict(state)
            for number, averager in enumerate(averagers):
                give(averager, number)
            finish([averager.step(wait=False) for averager in averagers], 2)
            return [(result_of(averager), averager.state_dict()) for averager in averagers]

    first = results(2, [{}, {}])
    saved = [state for _, state in first]
    assert [tuple(q.shape) for q in saved[0]["q"]] == [(30, 2), (10, 2)]
    assert not torch.equal(saved[0]["errors"][0], saved[1]["errors"][0])
    second = results(2, saved)
    assert not torch.equal(first[0][0][0], second[0][0][0]), "what was given was not gone on from"
    assert all(torch.equal(a, b) for a, b in zip(second[0][0], second[1][0], strict=True))
    again = results(2, saved)
    assert all(torch.equal(a, b) for a, b in zip(second[0][0], again[0][0], strict=True)), "what was given was changed"
    mixed = results(2, [saved[0], {}])  # as after a restart of one peer, without its file
    assert all(torch.equal(a, b) for a, b in zip(mixed[0][0], mixed[1][0], strict=True))


def test_what_another_averager_saved_is_refused() -> None:
    with shoal.DHT(start=True) as dht:
        options: dict[str, Any] = {"dht": dht, "prefix": "test", "start": False}
        averager = PowerSGDGradientAverager(parameters(), 2, **options)
        before = averager.state_dict()
        given = PowerSGDGradientAverager(parameters(), 1, **options).state_dict()
        doubles = {name: [tensor.double() for tensor in tensors] for name, tensors in before.items()}
        for wrong in (given, doubles, {"q": before["q"]}, {"q": before["q"], "errors": [1, 2]}):
            with pytest.raises(ValueError, match=r"this averager carries on .*, and was given"):
                averager.load_state_dict(wrong)
        after = averager.state_dict()
        assert all(a is b for name in before for a, b in zip(before[name], after[name], strict=True))
        plain = GradientAverager(parameters(), **options)
        assert plain.state_dict() == {}
        plain.load_state_dict({})
        with pytest.raises(ValueError, match="carries nothing on, and was given q, errors"):
            plain.load_state_dict(before)


def test_arguments() -> None:
    assert [matrix_shape(shape) for shape in [(3,), (4, 5), (6, 8, 10), (2, 2, 2, 2), (64, 3, 3, 3)]] == [
        (3, 1), (4, 5), (48, 10), (4, 4), (64, 27),
    ]  # fmt: skip
    with shoal.DHT(start=True) as dht:
        options: dict[str, Any] = {"dht": dht, "prefix": "test", "start": False}
        with pytest.raises(ValueError, match="averager_rank=0"):
            PowerSGDGradientAverager(parameters(), 0, **options)
        with pytest.raises(ValueError, match="averaged_grads have shapes"):
            PowerSGDGradientAverager(parameters(), 1, averaged_grads=[torch.zeros(3)], **options)
        everything = PowerSGDGradientAverager(parameters(), 1, min_compression_ratio=2.0, **options)
        assert everything._compressed == []


def test_a_ratio_of_numpys_compresses_as_a_float_does() -> None:
    ratios = [0.5, pytest.importorskip("numpy").float64(0.5)]
    with started(makers(2, min_compression_ratio=ratios)) as averagers:
        for averager in averagers:
            assert sorted([*averager._compressed, *averager._plain]) == list(range(len(SHAPES)))
        assert averagers[0]._compressed == averagers[1]._compressed
