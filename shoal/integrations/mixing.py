"""Adding methods to an object that a framework or its user has made."""

from __future__ import annotations

from typing import Any


def mix(instance: Any, mixin: type) -> None:
    """Make `instance` one of a class that inherits from `mixin` and from its own class, in this order.

    So a training script that has its own subclass of a framework's class joins a run as well, and the methods of the
    mixin call those of that class by `super()`.
    """
    kind = type(instance)
    instance.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def refuse_mixed(instance: Any, mixin: type) -> None:
    """Raises ValueError if `mix` was called for it before."""
    if isinstance(instance, mixin):
        raise ValueError(f"this {type(instance).__name__} was given to swarm() before: make a new one")
