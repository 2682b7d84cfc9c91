"""Which optimizer classes update each element from its own gradient and state alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.functional import functional_optim_map


def is_element_wise(optimizer_class: Callable[..., Any]) -> bool:
    """Whether this optimizer allows parameters to be cut anywhere.

    It is known for the classes that have a functional form, torch.optim's own among them. Other classes declare it by
    an attribute ``element_wise = True``. A subclass of a known class may do anything in its step, so it does not count
    as element-wise.
    """
    functional = functional_optim_map.get(optimizer_class)
    return any(getattr(known, "element_wise", False) is True for known in (functional, optimizer_class))
