"""The codecs that a peer may name on the wire."""

from __future__ import annotations

from typing import Final

from shoal.compression.codec import Codec
from shoal.compression.float16 import Float16Compression
from shoal.compression.none import NoCompression

_CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in (NoCompression(), Float16Compression())}


def codec_by_name(name: str) -> Codec:
    """The codec of that wire name, for names that arrive from the network.

    Raises:
        ValueError: for an unknown name; lists the known ones.
    """
    codec = _CODECS.get(name)
    if codec is None:
        raise ValueError(f"unknown codec {name!r:.40}; known: {', '.join(_CODECS)}")
    return codec
