"""Contiguous memory: where every tensor sits in flat buffers, and the buffers themselves.

What this room promises, to every room above it:

* a :class:`Layout` is a pure function of the tensors' dtypes, shapes, devices and order, so two peers that hold the
  same tensors agree on every span and on the ``schema_hash``, over processes, machines and versions of torch;
* a :class:`FlatBuffer` owns its memory, never moves it, and keeps the padding between tensors at zero as long as its
  users write through the views or write whole spans that they got from an equal layout: digests are deterministic;
* bytes of CPU buffers are reached as memoryviews of the same memory, without a copy and without numpy;
* views that users meet have storages of their own over that memory, for those who compare storages: safetensors;
* a :class:`ContiguousParams` keeps a model's parameters in flat buffers, and torch's optimizers step them as they would
  step the parameters. The flat gradient is right whenever it is asked for. What leaves the buffers, or cannot be
  stepped there, is said in an error;
* importing it is cheap and changes nothing of torch; the first `ContiguousParams` registers torch's global hooks before
  optimizers' steps and for modules' parameters (the latter also the first `Places` that keeps them). It imports torch
  and nothing else of Shoal.
"""

from __future__ import annotations

from shoal.flat._torch import grad_of
from shoal.flat.buffer import FlatBuffer
from shoal.flat.contiguous import ContiguousParams
from shoal.flat.flat_parameter import FlatParameter
from shoal.flat.kernels import pick_kernels
from shoal.flat.layout import BufferSpec, Layout, TensorEntry
from shoal.flat.memory_views import bytes_of, is_finite, own_storage, tensor_from
from shoal.flat.replacement import Places, holders_of, living_modules
from shoal.flat.span import Span

__all__ = [
    "BufferSpec",
    "ContiguousParams",
    "FlatBuffer",
    "FlatParameter",
    "Layout",
    "Places",
    "Span",
    "TensorEntry",
    "bytes_of",
    "grad_of",
    "holders_of",
    "is_finite",
    "living_modules",
    "own_storage",
    "pick_kernels",
    "tensor_from",
]
