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
# A subclass may do anything in its step.
_FINE: Final = frozenset(
    {
        optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
        optim.RMSprop, optim.Rprop, optim.ASGD, optim.LBFGS,
    }
)  # fmt: skip

_OF_PYTORCH_OPTIMIZER: Final = frozenset({"lr", "betas", "weight_decay", "weight_decouple", "fixed_decay", "eps"})

_COMPARED: Final[dict[tuple[str, str], frozenset[str]]] = {
    ("lion_pytorch", "Lion"): frozenset({"lr", "betas", "weight_decay", "decoupled_wd"}),
    ("pytorch_optimizer", "AdaBelief"): _OF_PYTORCH_OPTIMIZER | {"rectify", "ams_bound", "degenerated_to_sgd"},
    ("pytorch_optimizer", "Adan"): _OF_PYTORCH_OPTIMIZER,
    ("pytorch_optimizer", "Lion"): _OF_PYTORCH_OPTIMIZER,
    ("pytorch_optimizer", "MADGRAD"): _OF_PYTORCH_OPTIMIZER | {"momentum"},
    ("pytorch_optimizer", "QHAdam"): _OF_PYTORCH_OPTIMIZER | {"nus"},
    ("pytorch_optimizer", "QHM"): _OF_PYTORCH_OPTIMIZER | {"momentum", "nu"},
    ("pytorch_optimizer", "SignSGD"): _OF_PYTORCH_OPTIMIZER | {"momentum"},
    ("pytorch_optimizer", "Yogi"): _OF_PYTORCH_OPTIMIZER | {"initial_accumulator"},
    ("shoal", "QHM"): frozenset({"lr", "momentum", "nu", "weight_decay", "weight_decay_type"}),
}
"""By package and class: the options with which 25 steps on flat memory gave the numbers of 25 steps of the parameters
(lion-pytorch 0.2.5, pytorch_optimizer 4.1.0). Any other option may look at whole tensors, as `use_gc`, `adanorm` and
`cautious` do, if it is on.
"""

_OF_ANY: Final = frozenset(
    {
        "params", "param_names", "step", "foreach", "fused", "maximize", "capturable", "differentiable", "initial_lr",
        "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
    }
)  # fmt: skip
"""Options that choose a kernel or a sign, or belong to a scheduler, and an optimizer's count of its steps."""

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

_STEP_SIZE: Final = "it computes one step size from all parameters"
_NORM: Final = "it goes by the norm of all gradients"
_MIDDLE: Final = "it evaluates the loss in the midst of its step, with all parameters"
_ALL_PARAMETERS: Final = {
    "prodigy": _STEP_SIZE,
    "dadaptadagrad": _STEP_SIZE,
    "dadaptadam": _STEP_SIZE,
    "dadaptadan": _STEP_SIZE,
    "dadaptlion": _STEP_SIZE,
    "dadaptsgd": _STEP_SIZE,
    "adai": _STEP_SIZE,
    "adams": _STEP_SIZE,
    "alig": _STEP_SIZE,
    "avagrad": _STEP_SIZE,
    "sam": _NORM,
    "gsam": _NORM,
    "wsam": _NORM,
    "bsam": _NORM,
    "looksam": _NORM,
    "friendlysam": _NORM,
    "lorarite": "it steps two matrices together",
    "sgdschedulefreeclosure": _MIDDLE,
    "adamwschedulefreeclosure": _MIDDLE,
}
"""By name, as above: classes that gave other numbers when two optimizers had half of the parameters each."""

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


_told: set[str] = set()
"""The warnings that were given."""


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Checks whether an optimizer may step flat parameters.

    It warns once about a class that was not compared with itself on flat memory, or only without an option that is on
    here. A class that is known by its name only may be another one, so package and class are compared. If yours is
    element-wise, silence the warning by `warnings.filterwarnings`.

    Raises:
        ValueError: if the class is known to need whole tensors.
    """
    kind = type(optimizer)
    if kind in _FINE:
        return
    refuse_class(kind)  # type: ignore[arg-type]
    known = _COMPARED.get((kind.__module__.partition(".")[0], kind.__qualname__))
    option = "" if known is None else _unknown_option(optimizer, known | _OF_ANY)
    if known is not None and not option:
        return
    told = f"{kind.__name__} with {option}" if option else kind.__name__
    if told not in _told:
        _told.add(told)
        warnings.warn(
            f"{told} is not known to be element-wise. If it looks at a tensor as a whole (a norm per layer, rows and "
            "columns), it does something else on contiguous(): then give it original(). If it does not, silence this "
            "by warnings.filterwarnings",
            stacklevel=2,
        )


def needs_all_parameters(kind: type[optim.Optimizer]) -> str:
    """Why a class can't be divided between optimizers of a part of the parameters each; "" if it is not known."""
    names = (base.__name__.lower().replace("_", "") for base in kind.__mro__)
    return next((_ALL_PARAMETERS[name] for name in names if name in _ALL_PARAMETERS), "")


@cache
def refuse_class(kind: type[optim.Optimizer]) -> None:
    """Refuses a class that is known to need whole tensors, and remembers the others.

    Raises:
        ValueError: with the reason.
    """
    for base in kind.__mro__:
        if (why := _WHOLE_TENSORS.get(base.__name__.lower().replace("_", ""))) is not None:
            raise ValueError(
                f"{kind.__name__} needs whole tensors: {why}, and contiguous() has none. Give it original(), which "
                "trains the same parameters"
            )


def _unknown_option(optimizer: optim.Optimizer, known: frozenset[str]) -> str:
    """An option that is on and not among the known ones, as text; "" if there is none. Some classes keep switches as
    attributes."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in known and (isinstance(value, Tensor) or value):
                return f"{name}={value!r:.40}"
    return next((f"{name}=True" for name, value in _public(optimizer) if value is True and name not in known), "")


def _public(optimizer: optim.Optimizer) -> list[tuple[str, object]]:
    return [(name, value) for name, value in vars(optimizer).items() if not name.startswith("_")]
