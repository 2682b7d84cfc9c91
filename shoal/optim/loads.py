"""Notices that a checkpoint was loaded into the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from shoal.flat import bytes_of

HASHED_ELEMENTS = 1 << 22
"""The number of elements that are copied from a device at a time, to be hashed."""


class Loads:
    """Notices `load_state_dict` of the modules that hold some tensors, and of modules around these, in every form:
    `strict=False`, `assign=True`, and through `torch.distributed.checkpoint`. The modules are those of `watch_loads`.

    A loaded model can't be told by its values from one that was trained. So torch's hooks tell of it. A model that has
    its old values again was not changed: weights may be loaded for an evaluation, and loaded back.

    Args:
        tensors: the parameters of the model.
        digest: returns the hash of their values.
    """

    def __init__(self, tensors: Sequence[Tensor], digest: Callable[[], bytes]) -> None:
        self._tensors, self._digest = list(tensors), digest
        self._before: bytes | None = None  # the hash of the values before the first load that is not settled
        _watched.update({id(tensor): self for tensor in self._tensors})

    def begin(self) -> None:
        """A module is about to load some of the tensors."""
        if self._before is None:
            self._before = self._digest()

    def settle(self) -> None:
        """What was loaded is accepted, or replaced."""
        self._before = None

    @property
    def changed_the_model(self) -> bool:
        """Whether something was loaded since `settle`, and the model has other values than before."""
        if self._before is not None and self._digest() == self._before:
            self._before = None
        return self._before is not None


def watch_loads(modules: Iterable[nn.Module]) -> None:
    """From now on, `Loads` notices what is loaded into these modules."""
    for module in modules:
        if module not in _hooked:
            _hooked.add(module)
            module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]


_hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_watched: weakref.WeakValueDictionary[int, Loads] = weakref.WeakValueDictionary()
"""The `Loads` of a tensor, by the tensor's id. The `Loads` keeps the tensor alive."""


def _before_load(module: nn.Module, *given: Any) -> None:
    """torch's hook. It holds nothing, because modules are copied and pickled with their hooks."""
    for tensor in module.parameters(recurse=False):
        if (loads := _watched.get(id(tensor))) is not None:
            loads.begin()


def hash_of(tensors: Iterable[Tensor]) -> bytes:
    """The blake3 hash of contiguous tensors, 32 bytes. Those on a device are copied to the host in pieces, so that
    little memory is needed."""
    hasher = blake3()
    for tensor in map(Tensor.detach, tensors):
        for piece in (tensor,) if tensor.device.type == "cpu" else torch.split(tensor.view(-1), HASHED_ELEMENTS):
            hasher.update(bytes_of(piece.cpu()))
    return hasher.digest()
