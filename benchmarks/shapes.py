"""The models of `benchmarks.contiguous_operations`: the shapes of their parameters, in the order of a module's."""

from __future__ import annotations

Shape = tuple[int, ...]


def linears() -> list[Shape]:
    """100 layers Linear(128, 128)."""
    return [(128, 128), (128,)] * 100


def vectors() -> list[Shape]:
    """2,000 tensors of 1,000."""
    return [(1000,)] * 2000


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet: bottleneck blocks of 64, 128, 256 and 512 channels, 3, 4, 6 and 3 of them."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for channels, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in ((channels, width, 1), (channels, channels, 3), (4 * channels, channels, 1)):
                shapes += [(out, into, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * channels, width, 1, 1), (4 * channels,), (4 * channels,)]
            width = 4 * channels
    return [*shapes, (1000, 2048), (1000,)]


def gpt2() -> list[Shape]:
    """GPT-2 small, its head tied to the embedding."""
    width = 768
    block: list[Shape] = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


ROWS = {
    "a": ("100 Linear(128, 128)", linears),
    "b": ("2,000 tensors of 1,000", vectors),
    "c": ("ResNet-50", resnet50),
    "d": ("GPT-2 small", gpt2),
}
