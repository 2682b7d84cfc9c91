"""The text: the same for every peer, split without overlap, and refused with a clear error when it is of no use."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from shoal.cli.demo import model
from shoal.cli.demo.script import load_text


def test_standard_library_is_the_same_each_time_and_bounded() -> None:
    train, held_out = load_text(most=500_000)
    assert (train, held_out) == load_text(most=500_000)
    assert (len(train), len(held_out)) == (450_000, 50_000)
    assert b"import" in train


def test_each_tenth_passage_of_a_file_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(bytes([number]) * 1_000 for number in range(100)))
    train, held_out = load_text(path)
    assert held_out == b"".join(bytes([number]) * 1_000 for number in range(9, 100, 10))
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 100_000


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match="9 bytes"):
        load_text(short)


def test_targets_are_the_inputs_shifted_by_one() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    inputs, targets = model.windows(text, torch.tensor([0, 7]))
    assert inputs.tolist() == [list(range(64)), list(range(7, 71))]
    assert torch.equal(targets, inputs + 1)
    assert inputs.dtype == torch.int64


def test_bigram_loss_is_that_of_add_one_smoothed_counts() -> None:
    text = torch.tensor([0, 0, 1, 0, 1], dtype=torch.uint8)
    # After a 0: one 0 and two 1, and each of the 256 bytes once more.
    loss = model.bigram_loss(text, torch.tensor([[0]]), torch.tensor([[1]]))
    assert loss == pytest.approx(-math.log((2 + 1) / (3 + 256)))
