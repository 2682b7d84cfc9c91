"""Error feedback over real sockets: what lossy parts and results lose comes back, and only rounds that succeed change
what is owed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import shoal
from shoal.averaging.averager import DecentralizedAverager
from shoal.compression import Blockwise4Bit, Compression, Float16Compression, NoCompression, TopK
from shoal.swarm.protocol.actions import Send
from shoal.swarm.protocol.messages import Done
from shoal.swarm.swarm import Swarm
from tests.averaging.test_averager import averagers

NUMEL = 10 * 4096
ROUNDS = 50
CASES: dict[str, Compression] = {
    "four bits": Blockwise4Bit(),
    "four bits, exact results": Compression.of(parts=Blockwise4Bit(), results=NoCompression()),
    "top k, exact results": Compression.of(parts=TopK(256), results=NoCompression()),
    "top k, four bits": Compression.of(parts=TopK(256), results=Blockwise4Bit()),
    "top k": TopK(256),
}


class Rounds:
    """Rounds of peers that each contribute the same direction, and noise, in every one.

    Attributes:
        missing: the sum of the exact means of what the peers have contributed, less the sum of the results.
        largest: the largest error that one round has made: of a part, and of a result.
    """

    def __init__(self, peers: list[DecentralizedAverager], tensors: list[torch.Tensor], weights: list[float]) -> None:
        self.peers, self.tensors = peers, tensors
        self.shares = [weight / sum(weights) for weight in weights]
        self.weights = weights
        self.missing = torch.zeros(NUMEL, dtype=torch.float64)
        self.largest = {"part": 0.0, "result": 0.0}
        self._noise = torch.Generator().manual_seed(0)
        self._directions = [torch.randn(NUMEL, generator=self._noise) for _ in peers]

    def residual(self, number: int) -> torch.Tensor:
        residual = self.peers[number]._vector.residuals[0]
        return torch.zeros(NUMEL) if residual is None else residual.values

    def fill(self) -> list[torch.Tensor]:
        for tensor, direction in zip(self.tensors, self._directions, strict=True):
            tensor.copy_(direction + torch.randn(NUMEL, generator=self._noise))
        return [tensor.clone() for tensor in self.tensors]

    def one(self, **options: Any) -> None:
        given = self.fill()
        parts = [drift + self.residual(number) for number, drift in enumerate(given)]
        futures = [peer.step(wait=False, weight=w, **options) for peer, w in zip(self.peers, self.weights, strict=True)]
        for future in futures:
            future.result(60)
        result = self.tensors[0]
        assert all(torch.equal(tensor, result) for tensor in self.tensors)
        for share, drift in zip(self.shares, given, strict=True):
            self.missing += share * drift.double()
        self.missing -= result.double()
        plan = self.peers[0]._vector.codecs
        for part in parts:
            self._note("part", part, plan)
        self._note("result", sum(s * part for s, part in zip(self.shares, parts, strict=True)), plan.results)

    def _note(self, which: str, values: Any, plan: Any) -> None:
        """Chunks of a round are whole blocks, so the vector is encoded as they are."""
        codec = plan.codec_of(0, 0, NUMEL)
        error = codec.decode(codec.encode(values), torch.float32, NUMEL) - values
        self.largest[which] = max(self.largest[which], error.abs().max().item())

    @property
    def owed(self) -> torch.Tensor:
        """The weighted mean of the residuals."""
        residuals = [share * self.residual(number).double() for number, share in enumerate(self.shares)]
        return torch.stack(residuals).sum(0)


def started(count: int, **options: Any) -> Any:
    tensors = [torch.zeros(NUMEL) for _ in range(count)]
    return tensors, averagers(
        [[tensor] for tensor in tensors], target_group_size=count, min_matchmaking_time=30.0, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 3.0, 0.5]], ids=["two", "three"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_lost_comes_back(case: str, weights: list[float]) -> None:
    tensors, made = started(len(weights), compression=CASES[case], error_feedback=1.0)
    with made as peers:
        rounds = Rounds(peers, tensors, weights)
        for _ in range(ROUNDS):
            rounds.one()
        assert torch.allclose(rounds.missing, rounds.owed, atol=1e-3), "the residuals are not what is missing"
        assert rounds.missing.abs().max() <= rounds.largest["part"] + rounds.largest["result"]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_without_feedback_it_grows_with_every_round(case: str) -> None:
    tensors, made = started(2, compression=CASES[case])
    with made as peers:
        rounds = Rounds(peers, tensors, [1.0, 1.0])
        grown = []
        for _ in range(5):
            for _ in range(ROUNDS // 5):
                rounds.one()
            grown.append(rounds.missing.square().mean().sqrt().item())
        assert all(a < b for a, b in itertools.pairwise(grown)), grown
        if "top k" in case:  # what is too small is never sent
            assert grown[-1] == pytest.approx(5 * grown[0], rel=0.15)
            assert rounds.missing.abs().max() > rounds.largest["part"] + rounds.largest["result"]


@pytest.mark.long
def test_a_constant_is_wrong_by_the_same_in_every_round_without_feedback() -> None:
    def missing(feedback: float | None) -> list[float]:
        constant = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
        tensors, made = started(2, compression=Blockwise4Bit(), error_feedback=feedback)
        missing, total = [], torch.zeros(NUMEL)
        with made as peers:
            for _ in range(ROUNDS):
                for tensor in tensors:
                    tensor.copy_(constant)
                for future in [peer.step(wait=False) for peer in peers]:
                    future.result(60)
                total += constant - tensors[0]
                missing.append(total.abs().max().item())
        return missing

    without, with_it = missing(None), missing(1.0)
    assert without[-1] == pytest.approx(ROUNDS * without[0], rel=1e-3)
    assert with_it[0] == pytest.approx(without[0], rel=1e-6)
    assert with_it[-1] < 4 * with_it[0]


def test_a_part_of_the_residual_is_made_up_for() -> None:
    tensors, made = started(2, compression=Blockwise4Bit(), error_feedback=0.5)
    with made as peers:
        first = Rounds(peers, tensors, [1.0, 1.0])
        first.one()
        before = [first.residual(number).clone() for number in range(2)]
        second = first.fill()
        for future in [peer.step(wait=False) for peer in peers]:
            future.result(60)
        lost = sum(drift + 0.5 * old for drift, old in zip(second, before, strict=True)) / 2 - tensors[0]
        assert torch.allclose(lost.double(), first.owed, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rounding_to_a_narrow_dtype_comes_back_too(dtype: torch.dtype) -> None:
    tensors = [[torch.zeros(20_000, dtype=dtype), torch.zeros((), dtype=dtype)] for _ in range(2)]
    compression = Compression.of(parts=Blockwise4Bit(), results=Float16Compression())
    generator = torch.Generator().manual_seed(4)
    missing = torch.zeros(20_000, dtype=torch.float64)
    with averagers(tensors, target_group_size=2, compression=compression, error_feedback=1.0) as peers:
        for _ in range(30):
            for mine in tensors:
                mine[0].copy_(torch.randn(20_000, generator=generator))
                mine[1].fill_(1 / 3)
                missing += mine[0].double() / 2
            for future in [peer.step(wait=False) for peer in peers]:
                future.result(60)
            missing -= tensors[0][0].double()
        residuals = [peer._vector.residuals[0] for peer in peers]
        owed = torch.stack([one.values.double() / 2 for one in residuals if one is not None]).sum(0)[:20_000]
    assert torch.allclose(missing, owed, atol=1e-4)
    assert missing.abs().max() < 1


def test_a_round_that_fails_changes_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    perform = Swarm._do
    lost: list[Any] = []

    def losing(self: Swarm, action: Any) -> None:
        if lost and isinstance(action, Send) and isinstance(action.message, Done):
            lost.append(action)  # all have all chunks, and nobody says so
            return
        perform(self, action)

    monkeypatch.setattr(Swarm, "_do", losing)
    tensors, made = started(2, compression=CASES["top k, four bits"], error_feedback=1.0)
    with made as peers:
        rounds = Rounds(peers, tensors, [1.0, 1.0])
        for _ in range(3):
            rounds.one()
        before = [rounds.residual(number).clone() for number in range(2)]
        assert all(residual.any() for residual in before)
        lost.append(None)
        drift = rounds.fill()
        futures = [peer.step(wait=False, timeout=2.0, allow_retries=False) for peer in peers]
        for future in futures:
            with pytest.raises(shoal.AveragingError):
                future.result(60)
        assert len(lost) > 1, "the round did not come as far as it should"
        assert all(torch.equal(rounds.residual(number), old) for number, old in enumerate(before))
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, drift, strict=True))
        lost.clear()
        for _ in range(3):
            rounds.one()
        assert torch.allclose(rounds.missing, rounds.owed, atol=1e-4)


def test_peers_with_other_parts_or_results_are_refused() -> None:
    compressions = [
        Compression.of(parts=Blockwise4Bit(), results=NoCompression()),
        Compression.of(parts=Blockwise4Bit(), results=NoCompression()),
        Blockwise4Bit(),
    ]
    with averagers(
        [[torch.randn(4)] for _ in compressions], min_matchmaking_time=5.0, compression=compressions
    ) as peers:
        futures = [peer.step(wait=False, timeout=20.0) for peer in peers]
        with pytest.raises(shoal.AveragingError, match=r"compression is .*parts_and_results"):
            futures[2].result(60)
        assert len(futures[0].result(60)) == 2


def test_no_memory_is_taken_without_feedback() -> None:
    tensors, made = started(2, compression=Blockwise4Bit())
    with made as peers:
        Rounds(peers, tensors, [1.0, 1.0]).one()
        assert peers[0]._vector.residuals == [None]
        assert peers[0]._vector._errors is None


def test_settings_that_make_no_sense_are_refused() -> None:
    with shoal.DHT(start=True) as dht:
        for beta in (0.0, -1.0, 1.5, True, "1"):
            with pytest.raises(ValueError, match=r"error_feedback=.*: give a number over 0 and at most 1"):
                DecentralizedAverager([torch.zeros(3)], dht, prefix="a", start=False, error_feedback=beta)
        for case, why in (("top k, four bits", "has parts and results"), ("top k", r"state_compression=TopK.* can't")):
            with pytest.raises(ValueError, match=why):
                DecentralizedAverager([torch.zeros(3)], dht, prefix="a", start=False, state_compression=CASES[case])
        with pytest.raises(ValueError, match=r"error_feedback=1\.0 is for what is new in each round, not for a state"):
            shoal.TrainingStateAverager(
                dht=dht,
                prefix="a",
                start=False,
                params=[torch.nn.Parameter(torch.zeros(3))],
                optimizer=torch.optim.SGD,
                error_feedback=1.0,
            )
        with pytest.raises(ValueError, match="no effect on the rounds of a PowerSGDGradientAverager"):
            shoal.PowerSGDGradientAverager(
                [torch.zeros(30, 30)], averager_rank=1, dht=dht, prefix="a", start=False, error_feedback=1.0
            )


def test_gradients_have_feedback_too() -> None:
    models = [torch.nn.Linear(100, 100) for _ in range(2)]
    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
        made = [
            shoal.GradientAverager(
                model.parameters(), dht=dht, prefix="a", start=True, compression=Blockwise4Bit(), error_feedback=1.0
            )
            for model, dht in zip(models, (first, second), strict=True)
        ]
        try:
            missing = torch.zeros(100, 100, dtype=torch.float64)
            for _ in range(10):
                for number, (model, averager) in enumerate(zip(models, made, strict=True)):
                    model.zero_grad()
                    model(torch.full((1, 100), 0.1 * number + 0.3)).square().sum().backward()
                    averager.accumulate_grads_(batch_size=1)
                    assert model.weight.grad is not None
                    missing += model.weight.grad.double() / 2
                for control in [averager.step(wait=False) for averager in made]:
                    control.result(60)
                with made[0].use_averaged_gradients() as (weight, _):
                    missing -= weight.double()
            residuals = [averager._vector.residuals[0] for averager in made]
            owed = torch.stack([one.values[:10_000].double() / 2 for one in residuals if one is not None]).sum(0)
            assert torch.allclose(missing, owed.view(100, 100), atol=1e-5)
        finally:
            for averager in made:
                averager.shutdown()
