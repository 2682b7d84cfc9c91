"""Codecs: how a chunk (a 1-D CPU tensor, usually a span of a flat buffer) becomes bytes and back.

What this room promises, to ``averaging`` and ``optim``:

* the size of a payload follows from the number of elements and their dtype, so a receiver can refuse a payload before
  it decodes anything; a payload of another size is a ValueError, whatever else is in it;
* decoding never runs code and never allocates more than the chunk needs; the same bytes give the same numbers anywhere,
  and the same numbers the same bytes;
* a value that is not finite never becomes one that is, with two exceptions, both of `Float16Compression`: infinities
  are clamped. The codecs with statistics decode all elements of its block or chunk to NaN or infinity;
* compressions are values: two with the same name and options are equal, and hold no state between calls. What is kept
  is a few constant tables, made at their first use;
* importing it is cheap. It imports torch and nothing else of Shoal.

A `Codec` is for chunks. What options take is a `Compression`: a codec, or an adaptive one, which has no chunks but
a `plan`: the codecs of all elements of a layout, and so of any chunk of it (see ``shoal.compression.plan``). In a plan,
values of different kinds share no block, and statistics of optimizers that are positive stay so (``kind``,
``statistic``): whatever compression is chosen, it can't make a step explode.
"""

from __future__ import annotations

from shoal.compression.adaptive import (
    AdaptiveCompression,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
)
from shoal.compression.blockwise8bit import BlockwiseQuantization
from shoal.compression.codec import Codec
from shoal.compression.compression import Compression
from shoal.compression.float16 import Float16Compression
from shoal.compression.info import CompressionInfo, TensorRole
from shoal.compression.none import NoCompression
from shoal.compression.plan import CodecPlan, CodecSpan, PiecewiseCodec
from shoal.compression.quantile8bit import Quantile8BitQuantization
from shoal.compression.registry import codec_by_name, compression_by_spec
from shoal.compression.scaled_float16 import ScaledFloat16Compression
from shoal.compression.uniform8bit import Uniform8BitQuantization

__all__ = [
    "AdaptiveCompression",
    "BlockwiseQuantization",
    "Codec",
    "CodecPlan",
    "CodecSpan",
    "Compression",
    "CompressionInfo",
    "Float16Compression",
    "NoCompression",
    "PerTensorCompression",
    "PiecewiseCodec",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SizeAdaptiveCompression",
    "TensorRole",
    "Uniform8BitQuantization",
    "codec_by_name",
    "compression_by_spec",
]
