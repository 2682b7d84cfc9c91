"""What the ranks of a cluster with strands must have alike, and which optimizers they can have."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.cluster.strands import Strands
from shoal.flat import Layout, Together, names_of_members, parameters_of
from shoal.optim.host_copy import check_order
from shoal.optim.settings import Stepped
from shoal.optim.state import State
from shoal.sharding.element_wise import is_element_wise


def check_steps_pieces(stepped: Stepped, strands: Strands) -> None:
    """Check that an optimizer can step pieces of parameters.

    Raises:
        ValueError: if it does not have all pieces in their order, or does not treat each element alike.
    """
    made = type(stepped.optimizer)
    if issubclass(made, Together):
        raise ValueError(
            f"strands step pieces of parameters, and the optimizer is a {names_of_members(stepped.optimizer)}, "
            "which steps whole ones: give shoal.Cluster(strands=1)"
        )
    if not is_element_wise(made):
        raise ValueError(
            f"strands step pieces of parameters, and it is not known of {made.__name__} that it treats each "
            f"element alike: give shoal.Cluster(strands=1); or set {made.__name__}.element_wise = True, if it does"
        )
    if stepped.host is None:
        check_order(stepped.optimizer, parameters_of(stepped.optimizer), strands.pieces)


def terms_of(state: State) -> dict[str, str]:
    """The options and shapes that must be equal at all ranks, by name."""
    outer = {} if state.wrapped is state.optimizer else {"outer optimizer": type(state.optimizer).__name__}
    return state.agreed() | {
        "strands": str(len(state.division.carriers)),
        "tensors": Layout.of([*state.described, *state.extra_tensors]).schema_hash.hex()[:16],
        **outer,
    }


def unlike(mine: Mapping[str, str], of_first: Mapping[str, str]) -> str:
    """What differs between the terms of this rank and those of rank 0, in words; "" if they are alike."""
    for name in sorted({*mine, *of_first}):
        if mine.get(name) != of_first.get(name):
            return (
                f"{name} is {mine.get(name)} here, and {of_first.get(name)} at rank 0: give all ranks of a cluster the "
                "same arguments"
            )
    return ""
