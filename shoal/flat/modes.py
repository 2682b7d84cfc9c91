"""The modes of torch that a user's thread may be in, and how Shoal's own work stays outside them.

Within `inference_mode`, torch makes tensors that can't be trained later; within `torch.device("meta")` or a
`FakeTensorMode`, tensors without numbers; within `autocast`, results of lower precision. Users enter these modes around
their own code, and call methods of Shoal there. What Shoal makes in such a call outlives it. So methods that make
tensors run in `neutral_modes`, and what they call on the user's behalf (a closure, a hook, `on_event`) in
`users_modes`.

All these modes are a thread's own, so that threads of Shoal are not in them. The default dtype is the process's: code
of Shoal names each dtype. And a thread of Shoal may compute with one core only (`compute_serially`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import torch

from shoal.flat._torch import (
    count_dispatch_modes,
    count_function_modes,
    is_any_autocast_enabled,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

MADE_IN_INFERENCE: Final = (
    "untrainable (made within torch.inference_mode(), outside of which torch refuses to write to it): make the model "
    "outside of that mode, or give a copy.deepcopy(model) that you made outside"
)
"""Why a tensor with `is_inference()` is refused, after its name and "is"."""

_AUTOCAST: Final = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla", "privateuseone")
_is_inference = torch.is_inference_mode_enabled
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Modes:
    """The modes of a thread.

    Attributes:
        inference: whether it is in `inference_mode`.
        autocast: the types of device with autocast.
        functions, dispatches: the modes that change torch's functions (default devices) and operators (fake tensors),
            the innermost first.
    """

    inference: bool
    autocast: tuple[str, ...]
    functions: list[Any]
    dispatches: list[Any]

    @classmethod
    def leave(cls, inference: bool) -> _Modes:
        """Take this thread out of its modes. Returns them. `inference_mode` and the grad mode are for the caller to
        change: after this, and until before `enter`, as their guards put torch's dispatch keys back.
        """
        modes = cls(
            inference,
            tuple(filter(torch.is_autocast_enabled, _AUTOCAST)),
            [pop_function_mode() for _ in range(count_function_modes())],
            [pop_dispatch_mode(None) for _ in range(count_dispatch_modes())],
        )
        for kind in modes.autocast:
            torch.set_autocast_enabled(kind, False)
        return modes

    def enter(self) -> None:
        """Undo `leave`."""
        for kind in self.autocast:
            torch.set_autocast_enabled(kind, True)
        for mode in reversed(self.functions):
            push_function_mode(mode)
        for mode in reversed(self.dispatches):
            push_dispatch_mode(mode)


class _Thread(threading.local):
    """This thread's modes that the innermost `neutral_modes` has left; None outside."""

    left: _Modes | None = None


_thread = _Thread()


@contextmanager
def _inference(on: bool, grad: bool) -> Iterator[None]:
    # Entering `inference_mode(False)` would enable gradients.
    with torch.inference_mode(on), torch.set_grad_enabled(grad):
        yield


def are_neutral() -> bool:
    """Whether this thread is in none of these modes. It takes 0.3 µs."""
    return not (_is_inference() or count_function_modes() or count_dispatch_modes() or is_any_autocast_enabled())


def neutral(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: the function runs in `neutral_modes`. If the caller is in no mode, it costs 0.5 µs."""

    @wraps(function)
    def in_neutral_modes(*args: P.args, **kwargs: P.kwargs) -> T:
        if are_neutral():
            return function(*args, **kwargs)
        with neutral_modes():
            return function(*args, **kwargs)

    return in_neutral_modes


@contextmanager
def neutral_modes() -> Iterator[None]:
    """A context in which this thread is in none of torch's modes: no `inference_mode`, default device, autocast or
    `FakeTensorMode`. The grad mode stays as it is. If the thread is in no mode, it does nothing.
    """
    if are_neutral():
        yield
        return
    outer, grad, _thread.left = _thread.left, torch.is_grad_enabled(), _Modes.leave(_is_inference())
    try:
        with _inference(False, grad):
            yield
    finally:
        assert _thread.left is not None
        _thread.left.enter()
        _thread.left = outer


@contextmanager
def users_modes() -> Iterator[None]:
    """A context within `neutral_modes` for the user's own code, in the modes in which the user has called. Elsewhere it
    does nothing.
    """
    modes = _thread.left
    if modes is None:
        yield
        return
    grad, _thread.left = torch.is_grad_enabled(), None
    modes.enter()
    try:
        with _inference(modes.inference, grad):
            yield
    finally:
        _thread.left = _Modes.leave(modes.inference)  # others than before, after `torch.set_default_device`


def compute_serially() -> None:
    """Let torch compute with one thread in the calling thread, and change nothing for other threads.

    This is for the reactor: a chunk is too small for a parallel region, and the trainer needs the cores. (4 peers on 2
    cores, 25M float32: a round takes 1.4 s with torch's default, 0.58 s with one thread.) `torch.set_num_threads` sets
    both the calling thread's number and the default of later threads; another thread restores the default.
    """
    default = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(default,), name="shoal-threads")
    restore.start()
    restore.join()
