"""Notices when a module replaces a flat parameter by another `nn.Parameter`. The parameter itself does not show this.

`module.weight = nn.Parameter(...)` replaces a parameter. So does `module.to("meta")`, which calls no hook. So this file
records the places where modules hold the parameters, and checks those places.

`load_state_dict(assign=True)` replaces parameters too, but means only the values. So these are copied into flat memory,
and the module keeps its parameter, which the optimizer goes on training. (nn.RNN, LSTM and GRU compute with a list of
their parameters, so that list is corrected and checked too.) This needs a global hook, which torch calls when a module
registers a parameter. The first `ContiguousParams` registers the hook, or the first `Places` that keeps its parameters.
The hook costs other registrations about a microsecond. Buffers are kept in the same way.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress, repeat
from operator import is_

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from shoal.flat._torch import held_by, loads_state_dict, place_in_weights, places_in, recurrent_weights
from shoal.flat.gradient_views import home_of


@dataclass(frozen=True, slots=True)
class TensorHolder:
    """A module that holds one of some tensors.

    Attributes:
        module: the module.
        owner: its parameters or its buffers: the tensor is `owner[name]`.
        name: the tensor's name there.
        index: the tensor's number.
    """

    module: nn.Module
    owner: Mapping[str, Tensor | None]
    name: str
    index: int


def living_modules() -> list[nn.Module]:
    """The modules of the process. This takes about 0.07 s.

    While something refers to all objects, it also refers to tuples that other threads have not finished, and CPython
    raises SystemError in a thread that finishes such a tuple. So `list` makes the list of all objects, and drops it: it
    calls only functions in C, within which no other thread runs.
    """
    twice = chain.from_iterable(map(repeat, map(gc.get_objects, (None,)), (2,)))  # this list, and again this list
    # One more object, so that both iterators come to their end, where they drop the list. The list refers to them, too.
    objects = chain(chain.from_iterable(twice), (None,))
    is_module = map(nn.Module.__subclasscheck__, map(type, chain.from_iterable(twice)))
    return list(compress(objects, is_module))


def living_modules_of(names: Set[str]) -> list[nn.Module]:
    """The modules of classes with these names, and of their subclasses, found as the objects that refer to their class.
    For few classes this takes half as long as `living_modules`.
    """
    kinds = [kind for kind in _classes() if not names.isdisjoint(base.__name__ for base in kind.__mro__)]
    found = gc.get_referrers(*kinds) if kinds else []
    return [module for module in found if issubclass(type(module), nn.Module)]


def _classes() -> set[type[nn.Module]]:
    """`nn.Module` and all its subclasses."""
    found: set[type[nn.Module]] = set()
    left: list[type[nn.Module]] = [nn.Module]
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left += type.__subclasses__(kind)
    return found


def holders_of(tensors: Sequence[Tensor]) -> list[TensorHolder]:
    """The modules that hold these tensors as parameters or buffers."""
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    found = []
    for module in living_modules():
        for owner in places_in(module):
            for name, tensor in list(owner.items()):
                if tensor is not None and (index := indices.get(id(tensor))) is not None:
                    found.append(TensorHolder(module, owner, name, index))
    return found


class Places:
    """The places where modules hold some tensors.

    Args:
        tensors: parameters or buffers.
        holders: the holders of these tensors; None to look for them.
    """

    def __init__(self, tensors: Sequence[Tensor], holders: Sequence[TensorHolder] | None = None) -> None:
        found = holders_of(tensors) if holders is None else holders
        found = sorted(found, key=lambda holder: holder.index)  # the first that was replaced is named
        self._indices = [holder.index for holder in found]
        self._owners = [holder.owner for holder in found]
        self._names = [holder.name for holder in found]
        self._parameters = [tensors[holder.index] for holder in found]
        self._recurrent = [
            (holder.module, holder.name, holder.index, tensors[holder.index])
            for holder in found
            if isinstance(holder.module, nn.RNNBase)
        ]

    def keep(self) -> None:
        """From now on, as long as this object lives, `load_state_dict(assign=True)` copies values into these tensors,
        and the modules keep the tensors.
        """
        install()
        for tensor in self._parameters:
            if not isinstance(tensor, nn.Parameter):
                _install_for_buffers()
            _kept[id(tensor)] = self

    def replaced(self) -> tuple[int, str] | None:
        """A tensor that a module has replaced by another one: its number, and its name in the module. None if there is
        none.

        An empty place is fine: the tensor was dropped or renamed, as in pruning.
        """
        held = map(dict.get, self._owners, self._names)  # type: ignore[arg-type]
        if all(map(is_, held, self._parameters)):
            return self._replaced_in_list()
        places = zip(self._indices, self._owners, self._names, self._parameters, strict=True)
        for index, owner, name, parameter in places:
            if (now := owner.get(name)) is not None and now is not parameter:
                return index, name
        return self._replaced_in_list()

    def _replaced_in_list(self) -> tuple[int, str] | None:
        """As :meth:`replaced`, for the lists that recurrent modules compute with."""
        for module, name, index, parameter in self._recurrent:
            weights, place = recurrent_weights(module), place_in_weights(module, name)
            if place is not None and weights[place] is not None and weights[place] is not parameter:
                return index, name
        return None


@cache
def install() -> None:
    """Registers the hook, once per process."""
    register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]


@cache
def _install_for_buffers() -> None:
    register_module_buffer_registration_hook(_on_registration)  # type: ignore[arg-type]


_kept: weakref.WeakValueDictionary[int, Places] = weakref.WeakValueDictionary()
"""The `Places` that keeps a tensor, by the tensor's id. The `Places` keeps the tensor alive."""


def _on_registration(module: nn.Module, name: str, parameter: Tensor) -> Tensor | None:
    if is_dynamo_compiling():  # a compiled forward pass that sets a buffer
        return None
    old = held_by(module, name)
    if old is None or old is parameter or not _is_kept(old) or not _is_load_state_dict():
        return None
    if (parameter.dtype, parameter.device) != (old.dtype, old.device):
        return None
    with torch.no_grad():
        old.copy_(parameter)
    if isinstance(module, nn.RNNBase) and (place := place_in_weights(module, name)) is not None:
        recurrent_weights(module)[place] = old  # the module has just put the other one there
    return old


def _is_kept(tensor: Tensor) -> bool:
    return id(tensor) in _kept or home_of(tensor) is not None


def _is_load_state_dict() -> bool:
    """Whether the registration comes from `Module._load_from_state_dict`, through `__setattr__`."""
    frame = sys._getframe(2)
    for _ in range(4):
        if loads_state_dict(frame.f_code):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
