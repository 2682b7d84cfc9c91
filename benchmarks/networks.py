"""The networks that `benchmarks.contiguous` trains, each with a batch and its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[], Tensor]


def linears(layers: int, width: int, batch: int = 16) -> tuple[nn.Module, Loss]:
    """`layers` times Linear(width, width) and ReLU."""
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))
    x = torch.randn(batch, width)
    return model, lambda: model(x).square().mean()


class Block(nn.Module):
    """A layer of a transformer: causal attention, then two linear layers, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self._norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self._qkv, self._out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self._wide, self._narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and gives (batch, tokens, width)."""
        batch, tokens, width = x.shape
        heads = self._qkv(self._norms[0](x)).view(batch, tokens, 3, self._heads, width // self._heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self._narrow(functional.gelu(self._wide(self._norms[1](x))))
        return out


def gpt(layers: int = 24, width: int = 64, heads: int = 2, batch: int = 2, tokens: int = 32) -> tuple[nn.Module, Loss]:
    """A GPT over 256 kinds of bytes, its head tied to the embedding."""
    embedding = nn.Embedding(256, width)
    model = nn.ModuleDict(
        {
            "embedding": embedding,
            "places": nn.Embedding(tokens, width),
            "blocks": nn.Sequential(*(Block(width, heads) for _ in range(layers))),
            "norm": nn.LayerNorm(width),
        }
    )
    text = torch.randint(0, 256, (batch, tokens + 1))
    places = torch.arange(tokens)

    def loss() -> Tensor:
        x = model["norm"](model["blocks"](embedding(text[:, :-1]) + model["places"](places)))
        return functional.cross_entropy((x @ embedding.weight.t()).flatten(0, 1), text[:, 1:].flatten())

    return model, loss


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self._convolutions = nn.ModuleList(
            [nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)]
        )
        self._norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self._shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self._shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Takes and gives (batch, channels, height, width)."""
        inner = functional.relu(self._norms[0](self._convolutions[0](x)))
        return functional.relu(self._norms[1](self._convolutions[1](inner)) + self._shortcut(x))


def resnet18(batch: int = 16) -> tuple[nn.Module, Loss]:
    """ResNet-18 as for ImageNet, on images of 32 x 32 and with 10 classes."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        Residual(widths[stage] if block == 0 else widths[stage + 1], widths[stage + 1], 2 if stage and not block else 1)
        for stage in range(4)
        for block in range(2)
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    x, classes = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    return model, lambda: functional.cross_entropy(model(x), classes)
