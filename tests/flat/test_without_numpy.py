"""Numpy is no dependency of Shoal: what leads from tensors to bytes and back must not need it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
sys.modules["numpy"] = None  # an import of it fails
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
from shoal.compression import Float16Compression, NoCompression
from shoal.flat import FlatBuffer, Span, tensor_from
buffer = FlatBuffer.adopt([torch.ones(3).bfloat16()])
print(tensor_from(buffer.bytes(0, Span(0, 3)), torch.bfloat16).tolist())
for codec in (NoCompression(), Float16Compression()):
    print(codec.decode(codec.encode(buffer.flat[0][:3]), torch.bfloat16, 3).tolist())
"""


@pytest.mark.long
def test_bytes_and_codecs_work_without_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[1.0, 1.0, 1.0]\n" * 3, "")
