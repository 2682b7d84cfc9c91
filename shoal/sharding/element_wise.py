"""Which optimizer classes update every element from nothing but its own gradient and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.functional import functional_optim_map


def is_element_wise(optimizer_class: Callable[..., Any]) -> bool:
    """Whether parameters may be cut anywhere.

    Known of the classes that have a functional form, torch.optim's own among them; others say it by an attribute
    ``element_wise = True``. A subclass of a known class may do anything in its step, and is not known.
    """
    functional = functional_optim_map.get(optimizer_class)
    return any(getattr(known, "element_wise", False) is True for known in (functional, optimizer_class))
