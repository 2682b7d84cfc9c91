"""The private names of torch that this room uses. No other file of the room uses one. The column "torch has it since"
comes from the sources of torch 2.0.1, 2.4.0 and 2.6.0. Shoal supports 2.6 and later.

| name | what for | torch has it since | where it is missing |
|---|---|---|---|
| ``torch._foreach_copy_``, ``torch._foreach_zero_`` | one operation over many small gradients | 2.4, ``zero_`` 2.0 | importing the room raises AttributeError |
| ``torch._foreach_norm`` | the norms of many tensors, which `clip_grad_norm_` asks for | 2.0 or before | importing the room raises AttributeError |
| ``torch._C.DisableTorchFunctionSubclass`` | operations on a tensor of a subclass as on a plain one | 2.0 or before | importing the room raises AttributeError |
| ``torch._C.TensorBase`` | torch's own slots of ``.grad`` and ``.data``, past the lookup of the name and past a subclass's property | 2.4, not in 2.0 | importing the room raises AttributeError |
| ``Variable._execution_engine.queue_callback`` | a call at the end of the backward pass, as DDP has | 2.0 or before | importing the room raises AttributeError |
| ``Tensor._version`` | whether somebody has written to a tensor | 2.0 or before | AttributeError in the backward pass |
| ``Tensor._make_subclass`` | a parameter of a subclass over given memory | 2.0 or before | AttributeError in `contiguous()` |
| ``torch._C._dynamo.eval_frame.get_eval_frame_callback`` | whether a compiler is at work | 2.6, not in 2.4 | it counts as at work: steps are prepared for it |
| ``Module._parameters``, ``Module._buffers`` | the places in which modules hold tensors, to see who replaces one | 2.0 or before | no replacement is found in that place |
| ``RNNBase._flat_weights``, ``RNNBase._flat_weights_names`` | the list that recurrent modules compute with | 2.0 or before | AttributeError for recurrent modules |
| ``Optimizer._optimizer_state_dict_pre_hooks``, ``Optimizer._optimizer_state_dict_post_hooks``, ``Optimizer._optimizer_load_state_dict_pre_hooks``, ``Optimizer._optimizer_load_state_dict_post_hooks`` | the hooks that users have registered for state dicts | 2.4, not in 2.0 | such hooks are not called |
| ``torch._C._len_torch_function_stack``, ``torch._C._pop_torch_function_stack``, ``torch._C._push_on_torch_function_stack``, ``torch._C._len_torch_dispatch_stack``, ``torch._C._pop_torch_dispatch_stack``, ``torch._C._push_on_torch_dispatch_stack``, ``torch._C._is_any_autocast_enabled`` | the modes (default devices, fake tensors, autocast) in which a user calls Shoal | 2.0 or before | importing the room raises AttributeError |
| ``Module._load_from_state_dict`` | the frame by which a registration is known to come from `load_state_dict` | 2.0 or before | ``assign=True`` replaces parameters, which `assert_buffer_is_valid` tells |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_
foreach_norm = torch._foreach_norm

without_subclasses = torch._C.DisableTorchFunctionSubclass
"""A context in which operations on tensors of subclasses give plain tensors."""

grad_of: Callable[[Tensor], Tensor | None] = vars(torch._C.TensorBase)["grad"].__get__
"""Reads `tensor.grad` without the lookup of the name, and without a subclass's property."""

set_grad_slot: Callable[[Tensor, Tensor | None], None] = vars(torch._C.TensorBase)["grad"].__set__
"""Sets `tensor.grad` without a subclass's property."""

call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""To be called within a backward pass: registers a function to call when the whole pass is done."""

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether this thread is in `torch.autocast`, for any type of device."""

count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""The number of modes that change torch's functions, which this thread is in."""

pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
"""Leaves the innermost of these modes, and returns it."""

push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
"""Enters such a mode."""

count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of modes that change torch's operators, which this thread is in."""

pop_dispatch_mode: Callable[[None], Any] = torch._C._pop_torch_dispatch_stack
"""Leaves the innermost of these modes, and returns it. The argument None stands for any kind of mode."""

push_dispatch_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
"""Enters such a mode."""

read_data: Callable[[Tensor], Tensor] = vars(torch._C.TensorBase)["data"].__get__
"""The function that `tensor.data` calls."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How many times a tensor was written to."""

make_subclass = torch.Tensor._make_subclass
"""Makes a tensor of a subclass over the memory of another, without its graph."""

_PLACES: Final = ("_parameters", "_buffers")


SAVE_HOOKS: Final = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
"""The attributes of an optimizer that hold its hooks of `state_dict`: those before and those after it."""

LOAD_HOOKS: Final = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
"""The same of `load_state_dict`."""


def hooks_of(optimizer: Optimizer, name: str) -> list[Callable[..., Any]]:
    """The hooks that an optimizer holds in one of these attributes, in the order in which torch calls them."""
    return list(getattr(optimizer, name, {}).values())


def set_hooks(optimizer: Optimizer, name: str, hooks: Any) -> Any:
    """Replaces what one of these attributes holds. Returns what it held."""
    held = getattr(optimizer, name, {})
    setattr(optimizer, name, hooks)
    return held


def compiler_is_near() -> bool:
    """Whether code that the caller calls is compiled. (torch.compile does not compile all of a step, but the rest of
    it.)
    """
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is None or callback() is not None


def places_in(module: nn.Module) -> list[dict[str, Tensor | None]]:
    """The dictionaries in which a module holds its own parameters and buffers. Leaves out one that another thread has
    yet to make.
    """
    return [vars(module)[name] for name in _PLACES if name in vars(module)]


def held_by(module: nn.Module, name: str) -> Tensor | None:
    """The module's own parameter or buffer with that name; None if there is none."""
    parameter: Tensor | None = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def recurrent_weights(module: nn.RNNBase) -> list[Tensor | None]:
    """The list of weights that a recurrent module computes with. It is the module's own."""
    weights: list[Tensor | None] = module._flat_weights
    return weights


def place_in_weights(module: nn.RNNBase, name: str) -> int | None:
    """The index of the parameter with that name in `recurrent_weights`; None if it is not there."""
    names = module._flat_weights_names
    return names.index(name) if name in names else None


def loads_state_dict(code: CodeType) -> bool:
    """Whether this is the code of the torch method that loads a module's own parameters."""
    return code.co_name == "_load_from_state_dict"
