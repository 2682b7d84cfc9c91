"""The compressions that peers may name on the wire."""

from __future__ import annotations

import json
import re
from typing import Final

from shoal.compression.adaptive import PerTensorCompression, RoleAdaptiveCompression, SizeAdaptiveCompression
from shoal.compression.blockwise4bit import Blockwise4Bit
from shoal.compression.blockwise8bit import BlockwiseQuantization
from shoal.compression.codec import Codec, Compression, PartsAndResults
from shoal.compression.float16 import Float16Compression
from shoal.compression.kind import KindCodec
from shoal.compression.none import NoCompression
from shoal.compression.quantile8bit import Quantile8BitQuantization
from shoal.compression.scaled_float16 import ScaledFloat16Compression
from shoal.compression.statistic import StatisticCodec
from shoal.compression.top_k import TopK
from shoal.compression.uniform8bit import Uniform8BitQuantization

MAX_SPEC: Final = 1 << 20
"""Characters of the longest spec that is read."""

MAX_DEPTH: Final = 4
"""The deepest nesting of compressions with options in a spec."""

_CODECS: Final[dict[str, Codec]] = {
    codec.name: codec
    for codec in (
        NoCompression(),
        Float16Compression(),
        ScaledFloat16Compression(),
        Uniform8BitQuantization(),
        Quantile8BitQuantization(),
        BlockwiseQuantization(),
        Blockwise4Bit(),
    )
}

_NAME: Final = re.compile(r"(?P<statistic>statistic\.)?(?P<codec>\w+)(\.(?P<kind>[1-9][0-9]{0,3}))?", re.ASCII)


def codec_by_name(name: str) -> Codec:
    """The codec with this wire name, for names that arrive from the network.

    The name of a lossy codec may have the prefix "statistic." (`StatisticCodec`), and after it a dot and the number of
    a kind (`KindCodec`).

    Raises:
        ValueError: if the name is unknown. The message lists the known names.
    """
    parts = _NAME.fullmatch(name)
    codec = _CODECS.get(parts["codec"]) if parts else None
    if parts is None or codec is None or (name != codec.name and not codec.lossy):
        raise ValueError(f"unknown codec {name!r:.40}; known: {', '.join(_CODECS)}")
    if parts["statistic"]:
        codec = StatisticCodec(codec)
    return KindCodec(codec, int(parts["kind"])) if parts["kind"] else codec


def check_for_state(option: str, compression: Compression) -> Compression:
    """Returns the compression of an option that says how a state is downloaded.

    Args:
        option: the option's name, for the message.
        compression: its value.

    Raises:
        ValueError: if the compression has parts and results, or is a codec with options, which a manifest can't
            express. The message names the option.
    """
    if compression.parts is not compression.results:
        raise ValueError(f"{option} has parts and results (Compression.of), and a state has neither: give one for both")
    if isinstance(compression, Codec):
        try:
            codec_by_name(compression.name)
        except ValueError as error:
            raise ValueError(f"{option}={compression!r} can't bring a state: {error}") from error
    return compression


def compression_by_spec(spec: str) -> Compression:
    """The compression with this `spec`, adaptive or not, for specs that arrive from the network.

    Raises:
        ValueError: if the spec is longer than `MAX_SPEC`, nested deeper than `MAX_DEPTH`, or malformed. The message
            says what is wrong.
    """
    if len(spec) > MAX_SPEC:
        raise ValueError(f"a spec of {len(spec)} characters; at most {MAX_SPEC} are allowed")
    return _parse(spec, MAX_DEPTH)


def _parse(spec: object, depth: int) -> Compression:
    if not isinstance(spec, str):
        raise ValueError(f"a compression's spec is a string, got {spec!r:.40}")
    if not spec.startswith("["):
        return codec_by_name(spec)
    if depth == 0:
        raise ValueError(f"compressions are nested more than {MAX_DEPTH} deep")
    try:
        items = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the spec {spec!r:.40} is not JSON: {error}") from error
    match items:
        case [SizeAdaptiveCompression.name, int(threshold), less, greater_equal]:
            return SizeAdaptiveCompression(threshold, _parse(less, depth - 1), _parse(greater_equal, depth - 1))
        case [RoleAdaptiveCompression.name, activation, parameter, gradient, optimizer, default]:
            given = [
                None if one is None else _parse(one, depth - 1) for one in (activation, parameter, gradient, optimizer)
            ]
            return RoleAdaptiveCompression(
                activation=given[0],
                parameter=given[1],
                gradient=given[2],
                optimizer=given[3],
                default=_parse(default, depth - 1),
            )
        case [PerTensorCompression.name, list(pairs)]:
            return PerTensorCompression(dict(_pair(pair, depth - 1) for pair in pairs))
        case [TopK.name, int(k), int(chunk), int(bits)]:
            return TopK(k, chunk, bits)
        case [PartsAndResults.name, parts, results]:
            return PartsAndResults(_parse(parts, depth - 1), _parse(results, depth - 1))
    raise ValueError(f"unknown compression {spec!r:.40}")


def _pair(pair: object, depth: int) -> tuple[str | int, Compression]:
    match pair:
        case [str() | int() as key, spec]:
            return key, _parse(spec, depth)
    raise ValueError(f"a compression for a tensor is [key, spec], got {pair!r:.40}")
