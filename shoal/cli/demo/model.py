"""A GPT of about a million parameters that reads bytes, and how it is trained: chosen for 4 peers on 2 cores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

CONTEXT, SYMBOLS = 64, 256
TARGET_BATCH_SIZE, BATCH_SIZE_PER_STEP, HELD_OUT_WINDOWS = 128, 16, 128


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets (int64 [number of starts, CONTEXT]) from these places of a text (uint8)."""
    found = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return found[:, :-1], found[:, 1:]


def random_windows(text: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """So many windows from random places."""
    return windows(text, torch.randint(len(text) - CONTEXT, (batch,), generator=generator))


def spread_windows(text: Tensor) -> tuple[Tensor, Tensor]:
    """Always the same windows, spread over the text."""
    return windows(text, torch.linspace(0, len(text) - CONTEXT - 1, HELD_OUT_WINDOWS).long())


def bigram_loss(text: Tensor, inputs: Tensor, targets: Tensor) -> float:
    """Nats per byte of a bigram model with add-one smoothing that is counted on the whole text."""
    pairs = text[:-1].long() * SYMBOLS + text[1:].long()
    counts = torch.bincount(pairs, minlength=SYMBOLS**2).view(SYMBOLS, SYMBOLS).double() + 1
    return float(-(counts / counts.sum(dim=1, keepdim=True)).log()[inputs, targets].mean())


class GPT(nn.Module):
    """Predicts the next byte from up to CONTEXT bytes before it.

    The defaults make about one million parameters; two wide layers learn faster on a CPU than five narrow ones. Heads
    look back with linear biases (Press et al., 2022, arXiv:2108.12409), each half as steep as the one before:
    after 60 epochs, a model with learned positions was 0.4 nats per byte behind.
    """

    bias: Tensor

    def __init__(self, width: int = 192, layers: int = 2, heads: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                # Outputs to the residual stream are scaled down, so that its variance does not grow with the depth.
                is_output = "out_proj" in name or "linear2" in name
                nn.init.normal_(parameter, std=(width * (2 * layers if is_output else 1)) ** -0.5)
        # Zero logits at the start: the first loss is log(SYMBOLS), whatever the seed.
        nn.init.zeros_(self.head.weight)
        back = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)
        slopes = 4 * 0.5 ** torch.arange(heads)[:, None, None]
        self.register_buffer("bias", (-slopes * back).masked_fill(back < 0, -math.inf), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """``numbers``: int64 [batch, time], time <= CONTEXT. Returns logits float32 [batch, time, SYMBOLS]."""
        mask = self.bias[:, : numbers.shape[1], : numbers.shape[1]].repeat(len(numbers), 1, 1)
        logits: Tensor = self.head(self.blocks(self.embedding(numbers), mask))
        return logits

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte; both arguments int64 [batch, time]."""
        return nn.functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, generator: torch.Generator, temperature: float = 0.7) -> Tensor:
        """``prompt`` (int64 [time], not empty) continued by ``length`` bytes that are drawn at ``temperature``."""
        for _ in range(length):
            weights = torch.softmax(self(prompt[None, -CONTEXT:])[0, -1] / temperature, dim=0)
            prompt = torch.cat([prompt, torch.multinomial(weights, 1, generator=generator)])
        return prompt


def scheduler_factory(epochs: int) -> Callable[[optim.Optimizer], optim.lr_scheduler.LRScheduler]:
    """Linear warm-up in 8 epochs, then a cosine to a twentieth of the peak at the last of ``epochs``."""

    def factor(epoch: int) -> float:
        return min((epoch + 1) / 8, 0.525 + 0.475 * math.cos(math.pi * min(epoch / epochs, 1)))

    return lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, factor)
