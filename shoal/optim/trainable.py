"""What the peers of a run can average and train: real numbers, in tensors that torch writes to in every mode, and
gradients that are dense. Everything else is refused here, by name, when an optimizer or averager is made, before
anything has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.flat import MADE_IN_INFERENCE, holders_of, members_of, needs_sparse_gradients

SHOWN = 4  # the names of an error message, at most


def check_real(tensors: Sequence[Tensor], what: str = "parameter", names: Sequence[str] = ()) -> None:
    """Check that no tensor is complex. Rounds sum in real numbers, and would drop the imaginary parts.

    Args:
        tensors: parameters that are trained, frozen ones included, or other tensors that are averaged.
        what: the name of such a tensor in the message.
        names: the names that the user gave to the tensors; empty without names.

    Raises:
        ValueError: with the names of the complex tensors.
    """
    _refuse(
        [number for number, tensor in enumerate(tensors) if tensor.is_complex()],
        "complex, and peers average real numbers: keep real and imaginary parts as pairs in a real tensor "
        "(torch.view_as_real), and make them complex where you compute (torch.view_as_complex); a complex constant can "
        "be a buffer of its module",
        tensors,
        what,
        names,
    )


def check_writable(tensors: Sequence[Tensor], what: str = "parameter", names: Sequence[str] = ()) -> None:
    """Check that no tensor was made within `torch.inference_mode()`: outside of that mode, torch neither writes to such
    a tensor nor trains it. For the arguments, see `check_real`.

    Raises:
        ValueError: with the names of such tensors.
    """
    found = [number for number, tensor in enumerate(tensors) if tensor.is_inference()]
    _refuse(found, MADE_IN_INFERENCE, tensors, what, names)


def _refuse(found: list[int], why: str, tensors: Sequence[Tensor], what: str, names: Sequence[str]) -> None:
    """Raise a ValueError that names the tensors with the numbers in `found`, and says why; do nothing without any."""
    if not found:
        return
    held = {holder.index: f"{holder.name!r} of a {type(holder.module).__name__}" for holder in holders_of(tensors)}
    named = {number: repr(names[number]) if number < len(names) else held.get(number) for number in found}
    shown = [f"{what} {number}" + (f" ({named[number]})" if named[number] else "") for number in found[:SHOWN]]
    if len(found) > SHOWN:
        shown.append(f"{len(found) - SHOWN} more")
    are = "is" if len(found) == 1 else "are"
    raise ValueError(f"{', '.join(shown)} {are} {why}")


def check_dense(optimizer: torch.optim.Optimizer, argument: str) -> None:
    """Check that the optimizer can step the average of the peers, which is dense.

    Args:
        optimizer: the optimizer.
        argument: the argument that made it, for the message.

    Raises:
        ValueError: if it needs sparse gradients.
    """
    found = [type(member) for member in members_of(optimizer) if needs_sparse_gradients(type(member))]
    if found:
        raise ValueError(
            f"{argument} is a {found[0].__name__}, which steps only the rows of sparse gradients, and the "
            "average of the peers is dense: give torch.optim.SGD or Adagrad, which take both, or Adam, which steps all "
            "rows. (It works where a peer steps its own gradients: with use_local_updates=True, and as optimizer= "
            "beside outer=DiLoCo(…).)"
        )
