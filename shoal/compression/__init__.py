"""Codecs: how a chunk (a 1-D CPU tensor, usually a span of a flat buffer) becomes bytes and back.

This room promises to ``averaging`` and ``optim``:

* The size of a payload follows from the number of elements and their dtype, so a receiver can refuse a payload before
it decodes anything. A payload of any other size raises ValueError, whatever its content. So does a payload of the right
size that no encoder can have made, for codecs that have such payloads (`TopK`, whose indices ascend).
* Decoding never runs code and never allocates more memory than the chunk needs. The same bytes give the same numbers on
every machine, and the same numbers give the same bytes.
* A value that is not finite never becomes finite, with one exception: `Float16Compression` clamps infinities. Codecs
with statistics decode all elements of the block or chunk to NaN or infinity.
* Compressions are values. Two with the same name and options are equal, and they hold no state between calls. The room
keeps only a few constant tables, which it makes when they are first used.
* Importing the room is cheap. It imports torch and nothing else of Shoal.

A `Codec` encodes chunks. Options take a `Compression`, which is one of three: a codec; an adaptive compression, which
chooses a codec for each tensor; or the result of `Compression.of`, which has one compression for parts and one for
results. `plan_codecs` gives the codecs of all elements of a layout, and so of every chunk of it (see
``shoal.compression.plan``). In a plan, values of different kinds share no block (``kind``), and positive statistics of
optimizers stay positive (``statistic``). So no compression can make a step explode.
"""

from __future__ import annotations

from shoal.compression.adaptive import (
    AdaptiveCompression,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
)
from shoal.compression.blockwise4bit import Blockwise4Bit
from shoal.compression.blockwise8bit import BlockwiseQuantization
from shoal.compression.codec import Codec, Compression, PartsAndResults
from shoal.compression.float16 import Float16Compression
from shoal.compression.info import CompressionInfo, TensorRole
from shoal.compression.none import NoCompression
from shoal.compression.plan import CodecPlan, CodecSpan, PiecewiseCodec, plan_codecs, plan_for
from shoal.compression.quantile8bit import Quantile8BitQuantization
from shoal.compression.registry import check_for_state, codec_by_name, compression_by_spec
from shoal.compression.scaled_float16 import ScaledFloat16Compression
from shoal.compression.top_k import TopK
from shoal.compression.uniform8bit import Uniform8BitQuantization

__all__ = [
    "AdaptiveCompression",
    "Blockwise4Bit",
    "BlockwiseQuantization",
    "Codec",
    "CodecPlan",
    "CodecSpan",
    "Compression",
    "CompressionInfo",
    "Float16Compression",
    "NoCompression",
    "PartsAndResults",
    "PerTensorCompression",
    "PiecewiseCodec",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SizeAdaptiveCompression",
    "TensorRole",
    "TopK",
    "Uniform8BitQuantization",
    "check_for_state",
    "codec_by_name",
    "compression_by_spec",
    "plan_codecs",
    "plan_for",
]
