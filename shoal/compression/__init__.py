"""Codecs: how a chunk (a 1-D CPU tensor, usually a span of a flat buffer) becomes bytes and back.

What this room promises, to ``averaging`` and ``optim``:

* the size of a payload follows from the number of elements and their dtype, so a receiver can refuse a payload before
  it decodes anything; a payload of another size is a ValueError, whatever else is in it;
* decoding never runs code and never allocates more than the chunk needs; the same bytes give the same numbers anywhere;
* codecs are values: two with the same name and options are equal, and hold no state and no memory between calls;
* importing it is cheap, and it keeps no global state. It imports torch and nothing else of Shoal.
"""

from __future__ import annotations

from shoal.compression.codec import Codec
from shoal.compression.float16 import Float16Compression
from shoal.compression.none import NoCompression
from shoal.compression.registry import codec_by_name

__all__ = ["Codec", "Float16Compression", "NoCompression", "codec_by_name"]
