"""Contiguous memory: where every tensor sits in flat buffers, and the buffers themselves.

What this room promises, to every room above it:

* a :class:`Layout` is a pure function of the tensors' dtypes, shapes, devices and order, so two peers that hold the
  same tensors agree on every span and on the ``schema_hash``, over processes, machines and versions of torch;
* a :class:`FlatBuffer` owns its memory, never moves it, and keeps the padding between tensors at zero as long as its
  users write through the views or write whole spans that they got from an equal layout: digests are deterministic;
* bytes of CPU buffers are reached as memoryviews of the same memory, without a copy and without numpy;
* a :class:`ContiguousParams` keeps a model's parameters and gradients in flat buffers, and torch's optimizers step them
  as they would step the parameters. What leaves the buffers, or cannot be stepped there, is said in an error;
* importing it is cheap and changes nothing of torch; the first `ContiguousParams` registers torch's global hooks around
  optimizers' steps and for modules' parameters. It imports torch and nothing else of Shoal.
"""

from __future__ import annotations

from shoal.flat.allocator import keep_freed_memory
from shoal.flat.buffer import FlatBuffer
from shoal.flat.contiguous import ContiguousParams
from shoal.flat.finite import is_finite
from shoal.flat.flat_parameter import FlatParameter
from shoal.flat.kernels import pick_kernels
from shoal.flat.layout import BufferSpec, Layout, TensorEntry
from shoal.flat.memory import bytes_of, tensor_from
from shoal.flat.span import Span

__all__ = [
    "BufferSpec",
    "ContiguousParams",
    "FlatBuffer",
    "FlatParameter",
    "Layout",
    "Span",
    "TensorEntry",
    "bytes_of",
    "is_finite",
    "keep_freed_memory",
    "pick_kernels",
    "tensor_from",
]
