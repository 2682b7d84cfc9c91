"""The map from optimizer classes to functional optimizers."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.functional.adadelta import Adadelta
from shoal.functional.adagrad import Adagrad
from shoal.functional.adam import Adam, AdamW
from shoal.functional.adamax import Adamax
from shoal.functional.asgd import ASGD
from shoal.functional.base import FunctionalOptimizer
from shoal.functional.bound import BoundFunctional, BoundOptimizer
from shoal.functional.nadam import NAdam
from shoal.functional.qhm import QHM
from shoal.functional.qhm_optimizer import QHM as QHMOptimizer
from shoal.functional.radam import RAdam
from shoal.functional.recipe import BoundRecipe, check_recipe
from shoal.functional.rmsprop import RMSprop
from shoal.functional.rprop import Rprop
from shoal.functional.sgd import SGD


class FunctionalOptimMap(UserDict[Hashable, type]):
    """A dict from optimizer class (or any other key) to functional optimizer class. It refuses classes of neither
    form.
    """

    def __setitem__(self, key: Hashable, item: type) -> None:
        _check_form(item)
        super().__setitem__(key, item)


def register_functional_optimizer(key: Hashable, optimizer: type) -> None:
    """Registers ``optimizer`` as the functional form of ``key``. It replaces an earlier one.

    Args:
        key: the class that users pass to `DistributedOptimizer`, usually a `torch.optim.Optimizer`.
        optimizer: a subclass of `FunctionalOptimizer` that can be instantiated, or a class in the form of PyTorch's
            recipe: ``__init__(params: List[Tensor], …)`` and ``step(gradients: List[Optional[Tensor]])``, in plain
            Python, decorated with `torch.jit.script`, or with a `torch.compile`d ``step``.

    Raises:
        TypeError: if ``optimizer`` has neither form. The message says what is missing.
    """
    functional_optim_map[key] = optimizer


def register_functional_optim(key: Hashable, optim: type) -> None:
    """As :func:`register_functional_optimizer`, with torch's name and rule: an earlier registration is kept.

    Args:
        key: as there.
        optim: as ``optimizer`` there.

    Raises:
        TypeError: if ``optim`` has neither form.
    """
    if key not in functional_optim_map:
        functional_optim_map[key] = optim


def bind(optimizer: type, params: Sequence[Tensor], *args: Any, **kwargs: Any) -> BoundOptimizer:
    """An optimizer of a class from :data:`functional_optim_map`, made for these parameters.

    Args:
        optimizer: the functional class, of either form.
        params: the tensors to update in place.
        *args: the options, as the class takes them after the parameters.
        **kwargs: the same, by name.

    Returns:
        The optimizer with its parameters and a fresh state.

    Raises:
        TypeError: if the class has neither form, or does not take these options.
        ValueError: if an option is out of its range.
    """
    _check_form(optimizer)
    if issubclass(optimizer, FunctionalOptimizer):
        return BoundFunctional(optimizer(*args, **kwargs), params)
    return BoundRecipe(optimizer, params, *args, **kwargs)


def refuse_functional_form(optimizer_class: Any) -> None:
    """Refuses a functional optimizer where the class is expected for which it is registered.

    Raises:
        TypeError: if ``optimizer_class`` is a functional optimizer. The message names the class to pass.
    """
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, FunctionalOptimizer):
        return
    for key, functional in functional_optim_map.items():
        if functional is optimizer_class and isinstance(key, type):
            home = "shoal" if key is QHMOptimizer else key.__module__
            # Users know torch.optim.adam.Adam as torch.optim.Adam.
            home = "torch.optim" if hasattr(torch.optim, key.__name__) else home
            raise TypeError(
                f"shoal.functional.{optimizer_class.__name__} is the functional form of {home}.{key.__qualname__}: "
                "pass that"
            )
    raise TypeError(
        f"{optimizer_class.__qualname__} is a FunctionalOptimizer: register it with "
        "shoal.register_functional_optimizer(key, optimizer), and pass the key, usually your torch.optim.Optimizer"
    )


def _check_form(optimizer: type) -> None:
    if not isinstance(optimizer, type):
        raise TypeError(f"a functional optimizer is registered as a class, got {optimizer!r:.80}")
    if not issubclass(optimizer, FunctionalOptimizer):
        check_recipe(optimizer)
    elif inspect.isabstract(optimizer):
        missing = ", ".join(sorted(optimizer.__abstractmethods__))
        raise TypeError(f"{optimizer.__qualname__} leaves {missing} of FunctionalOptimizer open")


functional_optim_map = FunctionalOptimMap(
    {
        torch.optim.ASGD: ASGD,
        torch.optim.Adadelta: Adadelta,
        torch.optim.Adagrad: Adagrad,
        torch.optim.Adam: Adam,
        torch.optim.AdamW: AdamW,
        torch.optim.Adamax: Adamax,
        torch.optim.NAdam: NAdam,
        torch.optim.RAdam: RAdam,
        torch.optim.RMSprop: RMSprop,
        torch.optim.Rprop: Rprop,
        torch.optim.SGD: SGD,
        QHMOptimizer: QHM,
    }
)
"""The functional optimizer for each optimizer class of torch.optim that is element-wise, and for `shoal.QHM`."""
