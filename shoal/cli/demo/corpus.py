"""Encoded text as tensors: random windows to train on, fixed windows to evaluate on, and the bigram model to beat."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from shoal.cli.demo.text import Text

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Corpus:
    """A text's training and held-out parts as uint8 character numbers.

    ``characters`` has the 255 most frequent ones of the training part, by code point, after the unknown one, which all
    others become.
    """

    def __init__(self, text: Text) -> None:
        counts = Counter(text.train)
        counts.pop(_UNKNOWN, None)
        frequent = sorted(counts, key=lambda character: (-counts[character], character))[:255]
        self.characters = _UNKNOWN + "".join(sorted(frequent))
        self.train, self.held_out = self.encode(text.train), self.encode(text.held_out)

    def encode(self, text: str) -> Tensor:
        """The number of each character."""
        numbers = {character: index for index, character in enumerate(self.characters)}
        table = {ord(character): numbers.get(character, 0) for character in set(text)}
        return torch.frombuffer(bytearray(text.translate(table), "latin-1"), dtype=torch.uint8)

    def decode(self, numbers: Tensor) -> str:
        """The inverse of :meth:`encode`, except for unknown characters."""
        return "".join(self.characters[number] for number in numbers.tolist())

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
        size = len(self.characters)
        pairs = self.train[:-1].long() * size + self.train[1:].long()
        counts = torch.bincount(pairs, minlength=size * size).view(size, size).double() + 1
        return float(-(counts / counts.sum(dim=1, keepdim=True)).log()[inputs, targets].mean())


def _windows(numbers: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = numbers[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
