"""Encoded text as tensors: random windows to train on, fixed windows to evaluate on, and the bigram model to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.cli.demo.text import Text, Vocabulary


class Corpus:
    """A text's training and held-out parts as uint8 character numbers."""

    def __init__(self, text: Text) -> None:
        self.vocabulary = Vocabulary.of(text.train)
        self.train = self._numbers(text.train)
        self.held_out = self._numbers(text.held_out)

    def random_windows(self, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets (int64 [batch, context]) from random places of the training part."""
        starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def held_out_windows(self, count: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (int64 [at most count, context]), always the same ones, spread over the held-out part."""
        available = (len(self.held_out) - 1) // context
        starts = torch.arange(min(count, available)) * available // min(count, available) * context
        return _windows(self.held_out, starts, context)

    def bigram_loss(self, inputs: Tensor, targets: Tensor) -> float:
        """Nats per character of a bigram model with add-one smoothing, counted on the whole training part."""
        size = len(self.vocabulary)
        pairs = self.train[:-1].long() * size + self.train[1:].long()
        counts = torch.bincount(pairs, minlength=size * size).view(size, size).double() + 1
        log_probabilities = (counts / counts.sum(dim=1, keepdim=True)).log()
        return float(-log_probabilities[inputs, targets].mean())

    def _numbers(self, text: str) -> Tensor:
        return torch.frombuffer(bytearray(self.vocabulary.encode(text)), dtype=torch.uint8)


def _windows(numbers: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = numbers[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
