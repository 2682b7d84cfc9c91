"""Statistics of optimizers: one that is positive stays positive, and nearly what it was, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from shoal.compression import (
    Blockwise4Bit,
    BlockwiseQuantization,
    Codec,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TensorRole,
    Uniform8BitQuantization,
    codec_by_name,
    plan_codecs,
)
from shoal.compression.kind import KindCodec
from shoal.compression.statistic import StatisticCodec
from shoal.flat import Layout

LOSSY: list[Codec] = [
    Float16Compression(), ScaledFloat16Compression(), Uniform8BitQuantization(), Quantile8BitQuantization(),
    BlockwiseQuantization(),
]  # fmt: skip
RELATIVE = {"float16": 0.02, "scaled_float16": 0.03, "uniform_8bit": 0.13, "quantile_8bit": 0.6, "blockwise_8bit": 0.3}
"""How far quotients are from 1 at most, for values over 40 octaves."""


def by_name(codec: Codec) -> str:
    return codec.name


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), values.dtype, values.numel()).to(values.dtype)


def second_moments(numel: int = 20000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.exp2(torch.rand(numel, generator=generator) * 40 - 50)


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
def test_what_is_positive_stays_nearly_what_it_is(codec: Codec) -> None:
    values = second_moments()
    quotients = through(StatisticCodec(codec), values) / values
    assert (quotients > 0).all()
    worst = torch.maximum(quotients, 1 / quotients).max().item()
    assert 1 < worst < 1 + RELATIVE[codec.name]
    assert quotients.log2().mean().abs() < 0.01, "together they have grown or shrunk"


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
def test_no_zero_comes_back_where_something_is_positive(codec: Codec) -> None:
    values = second_moments()
    values[::3] = 0.0
    values[1] = 1e-45
    decoded = through(StatisticCodec(codec), values)
    assert (decoded > 0).all()
    known = values > 0
    known[1] = False
    assert (decoded[~known] < 2 * values[known].min()).all(), "what was next to nothing has become something"
    assert (decoded[known] / values[known]).log2().abs().max() < 1
    assert not through(StatisticCodec(codec), torch.zeros(5000)).any()


@pytest.mark.long
@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
def test_what_decays_by_less_than_a_code_between_rounds_is_not_held_up(codec: Codec) -> None:
    """Adam's second moments, sent after each step, while gradients are a 10th of what they were."""
    generator = torch.Generator().manual_seed(2)
    gradients = torch.exp2(torch.randn(2048, generator=generator) * 3 - 12) / 10
    exact, sent = 100 * gradients**2, 100 * gradients**2
    for _ in range(2000):
        squares = (gradients * torch.randn(len(gradients), generator=generator)) ** 2
        exact = torch.lerp(exact, squares, 0.001)
        sent = through(StatisticCodec(codec), torch.lerp(sent, squares, 0.001))
    quotients = (sent / exact).sqrt()
    assert exact.mean() < 0.2 * (100 * gradients**2).mean()
    assert 0.75 < quotients.min() < quotients.max() < 1.33


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
def test_other_chunks_go_as_the_codec_does(codec: Codec, value: float) -> None:
    values = second_moments()
    values[77] = value
    assert torch.equal(through(StatisticCodec(codec), values).nan_to_num(), through(codec, values).nan_to_num())


@pytest.mark.parametrize("codec", LOSSY, ids=by_name)
def test_values_of_different_kinds_share_no_block(codec: Codec) -> None:
    """Parameters, both of Adam's statistics and a buffer, within one block: each comes back as if it were alone."""
    numel = 900
    generator = torch.Generator().manual_seed(1)
    sizes = [1.0, 1e-3, 1e-7, 1e4]
    roles = [TensorRole.PARAMETER, TensorRole.OPTIMIZER, TensorRole.OPTIMIZER, TensorRole.UNSPECIFIED]
    tensors = [torch.randn(numel, generator=generator) * size for size in sizes]
    tensors[2].square_()
    layout = Layout.of(tensors)
    plan = plan_codecs(codec, layout, roles, kinds=["", "exp_avg", "exp_avg_sq", ""])
    memory = torch.zeros(layout.buffers[0].numel)
    for entry, tensor in zip(layout.entries, tensors, strict=True):
        memory[entry.span.slice] = tensor
    decoded = through(plan.codec_of(0, 0, len(memory)), memory)
    for entry, role in zip(layout.entries, roles, strict=True):
        stop = -(-entry.span.stop // 16) * 16  # padding goes with the tensor before it
        alone = StatisticCodec(codec) if role is TensorRole.OPTIMIZER else codec
        expected = through(alone, memory[entry.span.start : stop])
        assert torch.equal(decoded[entry.span.start : stop], expected)
    assert (decoded[layout.entries[2].span.slice] > 0).all()


def test_tensors_of_one_kind_are_encoded_as_one() -> None:
    layout = Layout.of([torch.zeros(100)] * 6)
    roles = [TensorRole.PARAMETER] * 2 + [TensorRole.OPTIMIZER] * 4
    plan = plan_codecs(Uniform8BitQuantization(), layout, roles, kinds=["", "", "a", "a", "b", "b"])
    assert [(span.stop - span.start) // 100 for span in plan.spans] == [2, 2, 2]
    exact = plan_codecs(NoCompression(), layout, roles, kinds=["", "", "a", "a", "b", "b"])
    assert [span.codec for span in exact.spans] == [NoCompression()]


@pytest.mark.parametrize("codec", [*LOSSY, Blockwise4Bit()], ids=by_name)
def test_names_on_the_wire(codec: Codec) -> None:
    for one in (KindCodec(codec, 3), StatisticCodec(codec), KindCodec(StatisticCodec(codec), 1234)):
        assert codec_by_name(one.name) == one
        assert len(one.name) <= 32, "more than a manifest may have"


OTHER_NAMES = [
    "statistic.none", "none.1", "float16.0", "float16.", "float16.10000", "float16.1.1", "float16\n", "statistic.",
    "statistic.statistic.float16", "statistic.float16.x",
]  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown codec"):
        codec_by_name(name)
