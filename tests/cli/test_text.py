"""The text: the same for every peer, split without overlap, and refused with a clear error when it is of no use."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from shoal.cli.demo.corpus import Corpus
from shoal.cli.demo.text import Text, TextError, load_text


def test_standard_library_is_the_same_each_time_and_bounded() -> None:
    text = load_text(most=500_000)
    assert text == load_text(most=500_000)
    assert 300_000 < len(text.train) + len(text.held_out) <= 500_000
    assert len(text.held_out) > 10_000
    assert "import" in text.train
    assert "site-packages" not in text.train


def test_a_single_file_is_split_at_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("0123456789" * 2_000)
    text = load_text(str(path))
    assert len(text.held_out) == 2_000
    assert text.train + text.held_out == path.read_text()


def test_a_short_or_missing_file_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(TextError, match="9 characters"):
        load_text(str(short))
    with pytest.raises(TextError, match=r"missing\.txt cannot be read"):
        load_text(str(tmp_path / "missing.txt"))


def test_vocabulary_round_trip_and_unknown_characters() -> None:
    corpus = Corpus(Text("hello", "x"))
    assert corpus.decode(corpus.encode("hole")) == "hole"
    assert corpus.held_out.tolist() == [0]
    assert len(corpus.characters) == 5


def test_vocabulary_keeps_the_most_frequent_of_many_characters() -> None:
    many = "".join(chr(0x4E00 + index) for index in range(400))
    corpus = Corpus(Text(many + "\u4e00\u4f00" * 3, "\u4f00"))
    assert len(corpus.characters) == 256
    assert corpus.decode(corpus.held_out) == "\u4f00"
    assert max(corpus.encode(many)) == 255


def test_windows_are_shifted_by_one_and_the_held_out_ones_are_fixed() -> None:
    corpus = Corpus(Text(train="abcdefghij" * 100, held_out="jihgfedcba" * 100))
    inputs, targets = corpus.random_windows(5, 16, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (5, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again, _ = corpus.random_windows(5, 16, torch.Generator().manual_seed(1))
    assert torch.equal(inputs, again)
    held_out, _ = corpus.held_out_windows(4, 16)
    assert torch.equal(held_out, corpus.held_out_windows(4, 16)[0])
    assert len(corpus.held_out_windows(10_000, 16)[0]) == 999 // 16


def test_bigram_loss_is_that_of_add_one_smoothed_counts() -> None:
    corpus = Corpus(Text(train="aabab", held_out="ab"))
    size = len(corpus.characters)
    assert size == 3
    inputs, targets = corpus.held_out_windows(1, 1)
    # Pairs of the training text: aa, ab, ba, ab. After an "a": one "a" and two "b", each and the unknown one more.
    assert corpus.bigram_loss(inputs, targets) == pytest.approx(-math.log((2 + 1) / (3 + size)))
