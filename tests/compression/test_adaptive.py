"""Which codec a tensor gets, and how chunks that hold several tensors follow."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import (
    Blockwise4Bit,
    BlockwiseQuantization,
    Codec,
    Compression,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    PiecewiseCodec,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    TopK,
    Uniform8BitQuantization,
    codec_by_name,
    compression_by_spec,
    plan_codecs,
)
from shoal.compression.kind import KindCodec
from shoal.compression.statistic import StatisticCodec
from shoal.flat import Layout

BY_SIZE = SizeAdaptiveCompression(threshold=1000, less=Float16Compression(), greater_equal=Uniform8BitQuantization())
BY_ROLE = RoleAdaptiveCompression(gradient=BY_SIZE, optimizer=BlockwiseQuantization(), default=NoCompression())
BY_KEY = PerTensorCompression({"a": Float16Compression(), 3: BY_ROLE})
IN_ORDER = PerTensorCompression([NoCompression(), Quantile8BitQuantization()])
ALL: list[Compression] = [
    NoCompression(), Float16Compression(), ScaledFloat16Compression(), Uniform8BitQuantization(),
    Quantile8BitQuantization(), BlockwiseQuantization(), Blockwise4Bit(), BY_SIZE, BY_ROLE, BY_KEY, IN_ORDER, TopK(),
    TopK(3, 100, 4), Compression.of(parts=TopK(), results=Blockwise4Bit()),
    Compression.of(parts=BY_KEY, results=TopK()),
]  # fmt: skip


def info(numel: int = 1, role: TensorRole = TensorRole.UNSPECIFIED, key: str | int = 0) -> CompressionInfo:
    return CompressionInfo(key, (numel,), torch.float32, role)


def test_by_size() -> None:
    assert BY_SIZE.choose_compression(info(999)) == Float16Compression()
    assert BY_SIZE.choose_compression(info(1000)) == Uniform8BitQuantization()
    assert BY_SIZE.choose_compression(CompressionInfo("w", (10, 100), torch.float32)) == Uniform8BitQuantization()


def test_by_role() -> None:
    chosen = {role: BY_ROLE.choose_compression(info(5000, role)) for role in TensorRole}
    assert chosen == {
        TensorRole.ACTIVATION: NoCompression(),
        TensorRole.PARAMETER: NoCompression(),
        TensorRole.GRADIENT: Uniform8BitQuantization(),
        TensorRole.OPTIMIZER: BlockwiseQuantization(),
        TensorRole.UNSPECIFIED: NoCompression(),
    }
    assert RoleAdaptiveCompression().choose_compression(info(role=TensorRole.GRADIENT)) == NoCompression()


def test_by_key() -> None:
    assert BY_KEY.choose_compression(info(key="a")) == Float16Compression()
    assert BY_KEY.choose_compression(info(10, TensorRole.GRADIENT, 3)) == Float16Compression()
    assert IN_ORDER.choose_compression(info(key=1)) == Quantile8BitQuantization()
    with pytest.raises(ValueError, match="no compression is given for tensor 2"):
        IN_ORDER.choose_compression(info(key=2))


def test_what_is_no_compression_is_refused() -> None:
    with pytest.raises(ValueError, match=r"less=.*give a compression"):
        SizeAdaptiveCompression(1, "float16", NoCompression())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer=.*give a compression"):
        RoleAdaptiveCompression(optimizer=Float16Compression)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tensor_compressions\['w'\]=None: give a compression"):
        PerTensorCompression({"w": None})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="threshold=-1"):
        SizeAdaptiveCompression(-1, NoCompression(), NoCompression())


@pytest.mark.parametrize("compression", ALL)
def test_spec_tells_all(compression: Compression) -> None:
    built = compression_by_spec(compression.spec)
    assert built == compression
    assert built.spec == compression.spec
    assert hash(built) == hash(compression)
    assert pickle.loads(pickle.dumps(compression)) == compression
    assert sum(other.spec == compression.spec for other in ALL) == sum(other == compression for other in ALL) == 1


def test_specs_stay() -> None:
    # Peers of different releases compare them.
    assert [one.spec for one in ALL[:7]] == [
        "none", "float16", "scaled_float16", "uniform_8bit", "quantile_8bit", "blockwise_8bit", "blockwise_4bit",
    ]  # fmt: skip
    assert BY_SIZE.spec == '["size_adaptive", 1000, "float16", "uniform_8bit"]'
    assert IN_ORDER.spec == '["per_tensor", [[0, "none"], [1, "quantile_8bit"]]]'
    assert RoleAdaptiveCompression(gradient=Float16Compression()).spec == (
        '["role_adaptive", null, null, "float16", null, "none"]'
    )
    assert TopK(3, 100, 4).spec == '["top_k", 3, 100, 4]'
    assert Compression.of(parts=Float16Compression(), results=NoCompression()).spec == (
        '["parts_and_results", "float16", "none"]'
    )
    assert [codec_by_name(one.spec) for one in ALL[:7]] == ALL[:7]


@settings(max_examples=60)
@given(st.text(max_size=30) | st.recursive(st.integers() | st.text(max_size=5), st.lists).map(repr))
def test_no_spec_does_anything_but_build_or_raise(spec: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(compression_by_spec(spec), Compression)


@pytest.mark.parametrize(
    "spec",
    [
        "[" * 100_000, '["size_adaptive", -1, "none", "none"]', '["size_adaptive", 1, "none"]', "[]", '["none"]',
        '["per_tensor", [[null]]]', '["per_tensor", {"a": "none"}]', '["role_adaptive", 1, null, null, null, "none"]',
        "x" * (2 << 20), '["top_k", 64]', '["top_k", true, 4096, 2]', '["top_k", 64, 1, 2]', '["top_k", 64, 99999, 2]',
        '["parts_and_results", "none"]', '["parts_and_results", "none", "[]"]', "top_k",
    ],
)  # fmt: skip
def test_bad_spec_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"spec|unknown|threshold|whole number"):
        compression_by_spec(spec)


def test_deep_spec_is_refused() -> None:
    deep: Compression = NoCompression()
    for _ in range(5):
        deep = RoleAdaptiveCompression(default=deep)
    with pytest.raises(ValueError, match="nested more than 4 deep"):
        compression_by_spec(deep.spec)


def test_plan_covers_buffers_and_joins_neighbours() -> None:
    tensors = [
        torch.zeros(10),
        torch.zeros(20),
        torch.zeros(1500),
        torch.zeros(0),
        torch.zeros(3000, dtype=torch.float64),
    ]
    layout = Layout.of([*tensors, torch.zeros(7)])
    spans = plan_codecs(BY_SIZE, layout).spans
    starts = [layout.entries[i].span.start for i in (0, 2, 5)]
    assert [(s.buffer, s.start, s.stop, s.codec) for s in spans] == [
        (0, 0, starts[1], Float16Compression()),
        (0, starts[1], starts[2], Uniform8BitQuantization()),
        (0, starts[2], layout.buffers[0].numel, Float16Compression()),
        (1, 0, layout.buffers[1].numel, Uniform8BitQuantization()),
    ]


def test_plan_follows_roles_and_keys() -> None:
    layout = Layout.of([torch.zeros(5000), torch.zeros(5000)])
    by_role = plan_codecs(BY_ROLE, layout, [TensorRole.OPTIMIZER, TensorRole.GRADIENT])
    assert [span.codec for span in by_role.spans] == [
        StatisticCodec(BlockwiseQuantization()),
        KindCodec(Uniform8BitQuantization(), 1),
    ]
    by_key = plan_codecs(BY_KEY, layout, keys=["a", 3])
    assert [span.codec for span in by_key.spans] == [Float16Compression(), NoCompression()]
    assert len(plan_codecs(Float16Compression(), layout).spans) == 1
    with pytest.raises(ValueError, match="no compression is given for tensor 0"):
        plan_codecs(BY_KEY, layout)
    with pytest.raises(ValueError, match="2 tensors, but there are 1 roles, 2 keys and 2 kinds"):
        plan_codecs(BY_ROLE, layout, [TensorRole.GRADIENT])


@st.composite
def flat(draw: st.DrawFn) -> tuple[Layout, list[Codec]]:
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=8))
    dtypes = [draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32])) for _ in sizes]
    codecs = [draw(st.sampled_from([codec_by_name(one.spec) for one in ALL[:7]])) for _ in sizes]
    return Layout.of([torch.zeros(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]), codecs


@settings(max_examples=60)
@given(flat(), st.integers(100, 2000))
def test_chunks_are_encoded_as_their_tensors_want(given: tuple[Layout, list[Codec]], elements: int) -> None:
    layout, codecs = given
    plan = plan_codecs(PerTensorCompression(codecs), layout)
    for number, spec in enumerate(layout.buffers):
        memory = torch.randn(spec.numel).mul(100).to(spec.dtype)
        for start in range(0, spec.numel, elements):
            stop = min(start + elements, spec.numel)
            chunk, codec = memory[start:stop], plan.codec_of(number, start, stop)
            payload = memoryview(bytearray(codec.encode(chunk)))
            assert len(payload) == codec.encoded_nbytes(stop - start, spec.dtype)
            decoded = codec.decode(payload, spec.dtype, stop - start)
            for entry, wanted in zip(layout.entries, codecs, strict=True):
                first, last = max(entry.span.start, start), min(entry.span.stop, stop)
                if entry.buffer == number and first < last:
                    if codec.lossy and not wanted.lossy:
                        assert torch.equal(decoded[first - start : last - start].to(spec.dtype), memory[first:last])
                    torch.testing.assert_close(
                        decoded[first - start : last - start].double(), memory[first:last].double(), rtol=0, atol=150
                    )


def test_pieces_of_a_codec_are_encoded_as_one() -> None:
    layout = Layout.of([torch.zeros(2048), torch.zeros(64), torch.zeros(2048)])
    plan = plan_codecs(SizeAdaptiveCompression(100, NoCompression(), Uniform8BitQuantization()), layout)
    memory = torch.randn(layout.buffers[0].numel)
    codec = plan.codec_of(0, 1000, 3000)
    assert isinstance(codec, PiecewiseCodec)
    assert [size for size, _ in codec.pieces] == [1048, 64, 888]
    assert codec.lossy
    payload = codec.encode(memory[1000:3000]).tobytes()
    joined = torch.cat([memory[1000:2048], memory[2112:3000]])
    first = Uniform8BitQuantization().encode(joined).tobytes()
    assert payload[: len(first)] == first
    assert payload[len(first) :] == NoCompression().encode(memory[2048:2112]).tobytes()
    assert plan.codec_of(0, 0, 2048) == Uniform8BitQuantization()
    assert codec.decode(memoryview(payload), torch.float32, 2000)[1048:1112].equal(memory[2048:2112])


def test_chunk_that_is_not_in_the_plan_is_refused() -> None:
    plan = plan_codecs(NoCompression(), Layout.of([torch.zeros(64), torch.zeros(64, dtype=torch.int64)]))
    for buffer, start, stop in [(0, 0, 65), (0, 3, 3), (1, -1, 3), (2, 0, 1), (-1, 0, 1)]:
        with pytest.raises(ValueError, match="are not in the plan"):
            plan.codec_of(buffer, start, stop)
    mixed = SizeAdaptiveCompression(65, Float16Compression(), NoCompression())
    codec = plan_codecs(mixed, Layout.of([torch.zeros(64), torch.zeros(128)])).codec_of(0, 0, 192)
    with pytest.raises(ValueError, match="is not for a chunk of 64 elements"):
        codec.encode(torch.zeros(64))


def test_parts_and_results_have_plans_of_their_own() -> None:
    layout = Layout.of([torch.zeros(5000), torch.zeros(()), torch.zeros(200)])
    by_size = SizeAdaptiveCompression(1000, NoCompression(), TopK())
    plan = plan_codecs(Compression.of(parts=by_size, results=Blockwise4Bit()), layout, TensorRole.GRADIENT)
    alone = plan_codecs(by_size, layout, TensorRole.GRADIENT)
    assert plan.spans == alone.spans
    assert plan.results == plan_codecs(Blockwise4Bit(), layout, TensorRole.GRADIENT)
    assert alone.results is alone
    assert plan.codec_of(0, 0, 5000) == TopK()
    assert plan.results.codec_of(0, 0, 5000) == Blockwise4Bit()
    assert plan.lossy
    first, second = alone + plan, plan + alone
    assert first.spans == (alone + alone).spans
    assert first.results == alone + plan.results
    assert second.results == plan.results + alone
    assert (alone + alone).results.spans == (alone + alone).spans


def test_a_single_compression_is_for_both() -> None:
    single = Blockwise4Bit()
    assert single.parts is single.results is single
    assert Compression.of(parts=Blockwise4Bit(), results=Blockwise4Bit()) == Blockwise4Bit()
    both = Compression.of(parts=TopK(), results=Float16Compression())
    assert (both.parts, both.results) == (TopK(), Float16Compression())


def test_parts_and_results_where_there_are_none_are_refused() -> None:
    both = Compression.of(parts=TopK(), results=Float16Compression())
    with pytest.raises(ValueError, match="no parts and results"):
        both.choose_compression(info())
    with pytest.raises(ValueError, match=r"gradient is made by Compression.of, which goes around"):
        RoleAdaptiveCompression(gradient=both)
    with pytest.raises(ValueError, match=r"parts=PartsAndResults"):
        Compression.of(parts=both, results=NoCompression())
    with pytest.raises(ValueError, match=r"results=None: give a compression"):
        Compression.of(parts=NoCompression(), results=None)


@pytest.mark.parametrize("role", [TensorRole.PARAMETER, TensorRole.OPTIMIZER])
def test_no_state_is_sent_by_its_largest_values(role: TensorRole) -> None:
    with pytest.raises(ValueError, match=f"TopK leaves most values out.*'w' is a {role.value} tensor"):
        TopK().choose_compression(info(5000, role, "w"))
    assert TopK().choose_compression(info(5000, TensorRole.GRADIENT)) == TopK()
