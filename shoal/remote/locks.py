"""Locks on parameters: optimizers that share a parameter take turns, others do not wait for each other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class _NumberedLock:
    number: int = field(default_factory=itertools.count().__next__)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The lock of every parameter that ever had an optimizer in this process, for as long as the parameter lives."""

_known_lock = threading.Lock()


class ParameterLocks:
    """A context manager that excludes all others over any of the same parameters (the same tensor objects).

    Parameters without a lock get a common one. So an optimizer usually has one lock, and two optimizers over the same
    parameters have the same lock. Several locks are taken in the order of their creation, so there is no deadlock.

    Args:
        params: the tensors to guard.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        fresh = _NumberedLock()
        with _known_lock:
            for param in (params := list(params)):
                if param not in _known:
                    _known[param] = fresh
            found: set[_NumberedLock] = {_known[param] for param in params}
        self._locks = [each.lock for each in sorted(found, key=lambda each: each.number)]

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for lock in reversed(self._locks):
            lock.release()
