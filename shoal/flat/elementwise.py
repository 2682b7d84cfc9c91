"""Which optimizers may step flat memory.

An optimizer is *element-wise* if its update of one element depends only on that element's value, gradient and state.
Only then it makes no difference that several parameters are one tensor. Other optimizers need whole tensors: for a norm
per layer (LARS, LAMB), for rows and columns (Adafactor, Muon, Shampoo, SOAP), or for the places of a sparse gradient
(SparseAdam).
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Final

from torch import Tensor, optim

# LBFGS is not element-wise, but it makes one vector of all its parameters, and that vector is the same in flat memory.
_FINE: Final = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD, optim.LBFGS,
)  # fmt: skip
_FINE_BY_NAME: Final = {"lion", "qhm", "qhadam", "adabelief", "madgrad", "adan", "yogi", "signsgd"}

# By name, in lower case and without underscores: these classes come from many packages, and most are subclasses of
# `Optimizer`.
_WHOLE_TENSORS: Final = {
    "adafactor": "it factors the second moment of a matrix into rows and columns",
    "came": "it factors the second moment of a matrix into rows and columns",
    "sm3": "it keeps one accumulator per row and column",
    "muon": "it orthogonalises the update of a matrix",
    "shampoo": "it preconditions the dimensions of each tensor",
    "distributedshampoo": "it preconditions the dimensions of each tensor",
    "soap": "it preconditions the dimensions of each tensor",
    "galoreadamw": "it projects the gradient of a matrix",
    "adammini": "it keeps one second moment per block of a tensor",
    "sparseadam": "it updates the places of a sparse gradient, and flat gradients are dense",
    "lars": "it scales by the norm of each layer",
    "lamb": "it scales by the norm of each layer",
    "fusedlamb": "it scales by the norm of each layer",
    "novograd": "it scales by the norm of each layer",
    "fusednovograd": "it scales by the norm of each layer",
    "adamp": "it projects by the norm of each layer",
    "sgdp": "it projects by the norm of each layer",
}

PER_ELEMENT: Final = frozenset(
    {
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum",
        "acc_delta", "prev", "step_size", "ax",
    }
)  # fmt: skip
"""The names of the state of torch's optimizers that has the parameter's shape."""

PER_TENSOR: Final = frozenset({"step", "eta", "mu", "mu_product"})
"""The names of the state of torch's optimizers that is one number per tensor."""


def is_per_tensor(name: str, value: Tensor) -> bool:
    """Whether a tensor in the state of an optimizer is one number for a whole parameter, whatever that one's shape.

    Older checkpoints have numbers in tensors of shape ``(1,)``. All state of a parameter with one element may have the
    shape of a number, so the name decides.
    """
    return value.numel() == 1 and name in PER_TENSOR


def needs_sparse_gradients(optimizer_class: type[object]) -> bool:
    """Whether the class steps the rows of a sparse gradient, and no dense gradient: torch's SparseAdam, its subclasses,
    and its namesakes in other packages.
    """
    return any(base.__name__ == "SparseAdam" for base in optimizer_class.__mro__)


@cache
def check_class(optimizer_class: type[optim.Optimizer]) -> None:
    """Checks whether a class of optimizers may step flat parameters, and remembers the classes that may.

    It warns once about a class that is neither a subclass of one of torch's element-wise optimizers nor known by its
    name. If yours is element-wise, silence the warning by `warnings.filterwarnings`.

    Raises:
        ValueError: if the class is known to need whole tensors.
    """
    names = [base.__name__.lower().replace("_", "") for base in optimizer_class.__mro__]
    for name in names:
        if name in _WHOLE_TENSORS:
            raise ValueError(
                f"{optimizer_class.__name__} needs whole tensors: {_WHOLE_TENSORS[name]}, and contiguous() has none. "
                "Give it original(), which trains the same parameters"
            )
    if not issubclass(optimizer_class, _FINE) and not _FINE_BY_NAME.intersection(names):
        warnings.warn(
            f"{optimizer_class.__name__} is not known to be element-wise. If it looks at a tensor as a whole (a norm "
            "per layer, rows and columns), it does something else on contiguous(): then give it original()",
            stacklevel=2,
        )
