"""Error feedback with a reducer that is killed in the middle of a round: nothing that the survivors sent is lost, or
counts twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.compression import Blockwise4Bit, Codec, Compression, NoCompression, TopK
from tests.averaging.processes import running
from tests.peers import outcomes
from tests.workers.averager import Averager

pytestmark = pytest.mark.processes

ELEMENTS = 96 * 4096
PART_SIZE_BYTES = 1 << 16
"""24 chunks, of which each of three peers reduces 8."""
ROUNDS = 50
KILLED = 20  # in which round


def contributed(round_number: int, peer: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed(round_number, peer)))


def seed(round_number: int, peer: int) -> int:
    return 1000 * round_number + peer


def error_of(codec: Codec, values: torch.Tensor) -> float:
    return (codec.decode(codec.encode(values), torch.float32, len(values)) - values).abs().max().item()


@pytest.mark.parametrize(
    ("parts", "where", "number"),
    [
        (Blockwise4Bit(), "result", 4),  # has sent half of its results
        pytest.param(TopK(512), "result", 4, marks=pytest.mark.long),
        pytest.param(Blockwise4Bit(), "part", 6, marks=pytest.mark.long),  # has sent some of its parts
        (TopK(512), "part", 6),
    ],
    ids=["4 bits, result", "top k, result", "4 bits, part", "top k, part"],
)
def test_a_reducer_that_is_killed_costs_no_more_than_a_round(
    parts: Codec, where: str, number: int, tmp_path: Path
) -> None:
    """The reducer weighs next to nothing, so the exact mean of a round does not depend on whether its parts came."""
    compression = Compression.of(parts=parts, results=NoCompression())
    options: dict[str, Any] = {"compression": compression.spec, "error_feedback": 1.0}
    with running(3, ELEMENTS, min_matchmaking_time=15.0, part_size_bytes=PART_SIZE_BYTES, **options) as peers:
        missing, owed, largest = torch.zeros(ELEMENTS, dtype=torch.float64), [torch.zeros(ELEMENTS)] * 2, 0.0
        for round_number in range(ROUNDS):
            alive = peers if round_number <= KILLED else peers[:2]
            if round_number == KILLED:
                peers[2].ask(Averager.die, where, number)
            told = [
                process.tell(
                    Averager.round, 0.0, seed=seed(round_number, peer), weight=[1.0, 3.0, 1e-9][peer],
                    save=str(tmp_path / f"{peer}"),
                )
                for peer, process in enumerate(alive)
            ]  # fmt: skip
            answers = outcomes(told)
            if round_number == KILLED:
                assert answers[2] is None, "it was not killed in the round"
            assert None not in answers[:2], answers
            drifts = [contributed(round_number, peer) for peer in range(2)]
            largest = max(largest, *(error_of(parts, d + e) for d, e in zip(drifts, owed, strict=True)))
            (result, *_), (other, *_) = saved = [torch.load(tmp_path / f"{peer}") for peer in range(2)]
            assert torch.equal(result, other)
            owed = [residual for _, residual in saved]
            missing += drifts[0].double() / 4 + drifts[1].double() * 3 / 4 - result.double()
            assert torch.allclose(missing, owed[0].double() / 4 + owed[1].double() * 3 / 4, atol=1e-4), round_number
        assert missing.abs().max() <= largest
