"""Rounds through every compression, over real sockets: alike in all bits at all members, and near the exact mean."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.averaging.exchange import Exchange
from shoal.swarm.protocol.messages import Repair, Source
from tests.averaging.compressions import BY_SIZE, COMPRESSIONS, LOSSY
from tests.averaging.test_averager import averagers, weighted_mean

NODES = ["node"] * 4
MIXED = ["node", "client", "auxiliary", "node"]
WEIGHTS = [0.5, 7.0, 0.0, 2.25]


@pytest.fixture(autouse=True)
def no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs is repaired, so members that decode unlike each other still end alike: it must not come to that."""

    def repair(self: Exchange, repair: Repair) -> list[Source]:
        raise AssertionError(f"a healthy round was repaired: {repair}")

    monkeypatch.setattr(Exchange, "repair", repair)


def vectors(count: int) -> list[list[torch.Tensor]]:
    """Tensors of unlike sizes, scales and dtypes, of which one is a scalar and one ends in the middle of a chunk."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(300, 200, generator=generator),
            torch.randn(7, generator=generator) * 1e-3,
            torch.randn(30_001, generator=generator) * 50 + 100,
            torch.randn(2000, generator=generator).to(torch.float64),
            torch.randn((), generator=generator) * 1e5,
        ]
        for _ in range(count)
    ]


def check(mine: list[list[torch.Tensor]], weights: list[float], roles: list[str], compression: str) -> None:
    """One round of all. Errors: of 8 bits, in the parts and in the result."""
    expected = weighted_mean(mine, weights)
    largest = max(tensor.abs().max().item() for tensors in mine for tensor in tensors[:-1])
    with averagers(
        mine,
        target_group_size=len(mine),
        min_matchmaking_time=30.0,
        compression=COMPRESSIONS[compression],
        client_mode=[role == "client" for role in roles],
        auxiliary=[role == "auxiliary" for role in roles],
    ) as peers:
        for future in [peer.step(weight=w, wait=False) for peer, w in zip(peers, weights, strict=True)]:
            future.result(60)
        digests = {peer.last_round.digest for peer in peers if peer.last_round is not None}
    assert len(digests) == 1
    held = [tensors for tensors, role in zip(mine, roles, strict=True) if role != "auxiliary"]
    for others in held[1:]:
        assert all(torch.equal(a, b) for a, b in zip(held[0], others, strict=True))
    errors = [(a.double() - b).square().mean().sqrt().item() for a, b in zip(held[0], expected, strict=True)]
    assert max(errors[:-1]) <= (1e-6 if compression == "none" else 0.01) * largest
    assert errors[-1] <= 1e-6 * 1e5, "a scalar was compressed"
    assert (max(errors[:-1]) > 1e-5 * largest) == (compression != "none"), "the compression was not used"


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_with_a_client_and_an_auxiliary_all_get_the_same(compression: str) -> None:
    check(vectors(4), WEIGHTS, MIXED, compression)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("compression", ["uniform", "by tensor"])
def test_any_number_of_nodes(compression: str, count: int) -> None:
    check(vectors(count), [1.0, 2.0, 0.25, 5.0][:count], NODES[:count], compression)


def test_many_rounds_stay_alike() -> None:
    """What is averaged again and again is the same again: errors do not part the peers."""
    mine = [[torch.randn(20_000)] for _ in range(3)]
    with averagers(mine, target_group_size=3, min_matchmaking_time=30.0, compression=COMPRESSIONS["quantile"]) as peers:
        for _ in range(5):
            for (tensor,), peer in zip(mine, peers, strict=True):
                with peer.get_tensors():
                    tensor.add_(torch.randn(20_000))
            for future in [peer.step(wait=False) for peer in peers]:
                future.result(60)
            assert torch.equal(mine[0][0], mine[1][0])
            assert torch.equal(mine[0][0], mine[2][0])


def test_compressions_that_differ_in_an_option_are_refused() -> None:
    other = shoal.compression.SizeAdaptiveCompression(999, BY_SIZE.less, BY_SIZE.greater_equal)
    compressions = [BY_SIZE, BY_SIZE, other]
    with averagers(
        [[torch.randn(4)] for _ in compressions], min_matchmaking_time=5.0, compression=compressions
    ) as peers:
        futures = [peer.step(wait=False, timeout=20.0) for peer in peers]
        with pytest.raises(shoal.AveragingError, match=r"compression is .*size_adaptive.*\b(999|1000)\b"):
            futures[2].result(60)
        assert len(futures[0].result(60)) == 2


def test_a_compression_too_long_for_a_message_is_compared_by_its_hash() -> None:
    kinds = [COMPRESSIONS[name] for name in ("float16", "float16", "uniform")]
    long = [shoal.compression.PerTensorCompression([kind] * 40) for kind in kinds]
    mine = [[torch.full((3,), float(i)) for _ in range(40)] for i in range(3)]
    with averagers(mine, compression=long, min_matchmaking_time=5.0) as peers:
        futures = [peer.step(wait=False, timeout=20.0) for peer in peers]
        with pytest.raises(shoal.AveragingError, match=r"compression is .*per_tensor"):
            futures[2].result(60)
        assert len(futures[0].result(60)) == 2


@pytest.mark.parametrize("compression", LOSSY)
def test_a_download_is_what_the_donor_encoded(compression: str) -> None:
    mine = vectors(3)
    with averagers(mine, state_compression=COMPRESSIONS[compression]) as peers:
        loaded = [peer.load_state_from_peers() for peer in peers[1:]]
    peers_tensors = [one[1] for one in loaded if one is not None]
    assert len(peers_tensors) == 2
    largest = max(tensor.abs().max().item() for tensors in mine for tensor in tensors[:-1])
    for tensors in peers_tensors:
        donor = next(own for own in mine if torch.equal(own[-1], tensors[-1]))  # a scalar is not compressed
        assert not all(torch.equal(a, b) for a, b in zip(donor, tensors, strict=True)), "the compression was not used"
        for theirs, ours in zip(donor, tensors, strict=True):
            assert (theirs - ours).square().mean().sqrt() <= 0.01 * largest
