"""Contiguous memory: where every tensor lies in flat buffers, and the buffers themselves.

This room promises to every room above it:

* A :class:`Layout` is a pure function of the tensors' dtypes, shapes, devices and order. So two peers that hold the
same tensors agree on every span and on the ``schema_hash``, across processes, machines and versions of torch.
* A :class:`FlatBuffer` owns its memory, never moves it, and keeps the padding between tensors at zero, as long as its
users write through the views or write whole spans that they got from an equal layout. So digests are deterministic.
* The bytes of CPU buffers are available as memoryviews of the same memory, without a copy and without numpy.
* Views that users get have storages of their own over that memory, for code that compares storages, such as
safetensors.
* A :class:`ContiguousParams` keeps a model's parameters in flat buffers, and torch's optimizers step them as they would
step the parameters. The flat gradient is right whenever it is read. If a parameter leaves the buffers, or an optimizer
can't step them there, an error says so.
* Importing this room is cheap and changes nothing of torch. The first `ContiguousParams` registers torch's global hooks
before optimizers' steps and for modules' parameters (the latter also the first `Places` that keeps them). The room
imports torch and nothing else of Shoal.
"""

from __future__ import annotations

from shoal.flat._torch import grad_of, version_of
from shoal.flat.buffer import FlatBuffer
from shoal.flat.contiguous import ContiguousParams
from shoal.flat.elementwise import is_per_tensor, needs_all_parameters, needs_sparse_gradients
from shoal.flat.equal import are_equal
from shoal.flat.flat_parameter import FlatParameter
from shoal.flat.given import Listed
from shoal.flat.kernels import pick_kernels
from shoal.flat.layout import BufferSpec, Layout, TensorEntry
from shoal.flat.memory_views import bytes_of, is_finite, own_storage, tensor_from
from shoal.flat.modes import MADE_IN_INFERENCE, are_neutral, compute_serially, neutral, neutral_modes, users_modes
from shoal.flat.replacement import Places, holders_of, living_modules, living_modules_of
from shoal.flat.shown import OwnGroups, Shown, ShowsGroups
from shoal.flat.span import Span
from shoal.flat.state_dict_hooks import (
    after_loading,
    after_saving,
    before_loading,
    before_saving,
    own_saving_hooks,
    without_hooks,
)
from shoal.flat.together import Together, members_of, names_of_members, parameters_of
from shoal.flat.watch import MemoryWatch, Watch

__all__ = [
    "MADE_IN_INFERENCE",
    "BufferSpec",
    "ContiguousParams",
    "FlatBuffer",
    "FlatParameter",
    "Layout",
    "Listed",
    "MemoryWatch",
    "OwnGroups",
    "Places",
    "Shown",
    "ShowsGroups",
    "Span",
    "TensorEntry",
    "Together",
    "Watch",
    "after_loading",
    "after_saving",
    "are_equal",
    "are_neutral",
    "before_loading",
    "before_saving",
    "bytes_of",
    "compute_serially",
    "grad_of",
    "holders_of",
    "is_finite",
    "is_per_tensor",
    "living_modules",
    "living_modules_of",
    "members_of",
    "names_of_members",
    "needs_all_parameters",
    "needs_sparse_gradients",
    "neutral",
    "neutral_modes",
    "own_saving_hooks",
    "own_storage",
    "parameters_of",
    "pick_kernels",
    "tensor_from",
    "users_modes",
    "version_of",
    "without_hooks",
]
