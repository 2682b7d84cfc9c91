"""The optimizer on the trainer: it keeps the options, and the workers make the steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from shoal.flat import (
    OwnGroups,
    ShowsGroups,
    after_loading,
    after_saving,
    are_equal,
    before_loading,
    before_saving,
    neutral,
)
from shoal.functional import functional_optim_map, refuse_functional_form
from shoal.remote import worker
from shoal.remote.calls import call_all

logger = logging.getLogger(__name__)

_warned: set[Any] = set()
"""Optimizer classes for which the warning was logged that they have no functional form."""


class DistributedOptimizer(ShowsGroups):
    """Steps an optimizer on every worker that owns parameters, with the gradients of a distributed autograd context.

    It has the interface of `torch.distributed.optim.DistributedOptimizer`, and it is a `torch.optim.Optimizer`: it
    works with learning rate schedulers, :attr:`param_groups`, :meth:`add_param_group` and state dicts.

    *Order*: any number of trainers and threads may step the same parameters at the same time. They may share one
    `DistributedOptimizer`, or each may have its own, with its own state such as momentum. Each worker applies every
    call of :meth:`step` exactly once and whole, one after another, with the gradients of the call's own context. No
    step is lost, and contexts do not mix. Two concurrent calls may be applied in different orders on different workers.
    Other trainers may step between a trainer's forward pass and its own step, so gradients can be stale, as in torch.
    Steps of optimizers that share no parameter, not even through a third optimizer, run in parallel; their kernels run
    without the GIL.

    *Gradients* come from the context; ``.grad`` is ignored. A parameter that has no gradient in the context is left
    alone with its state. Parameters keep their memory.

    A class without an entry in `functional_optim_map` is used as it is, under the GIL; a warning says so once. Such a
    class finds the gradients in ``.grad`` as usual, and ``.grad`` is restored afterwards.

    Args:
        optimizer_class: a class of torch.optim or a key of :attr:`functional_optim_map`. Workers must be able to import
            it and shoal.
        params_rref: RRefs to tensors on any workers, this one included. Or parameter groups: dictionaries with
            ``params``, which are RRefs, and the options that differ.
        *args: the arguments of the class after the parameters.
        **kwargs: the same, by name.

    Attributes:
        param_groups: as in torch.optim, with RRefs in place of parameters. Every step uses the options that are here
            when it is called.
        remote_optimizers: an RRef to each worker's optimizer.
        functional_optim_map: `shoal.functional.functional_optim_map`, under the name that PyTorch's recipe uses.

    Raises:
        TypeError: if a parameter is not an RRef, if ``optimizer_class`` is the functional form of a class, or if it is
            LBFGS, which needs a closure.
        ValueError: if there is no parameter.
        RemoteOptimizerError: if a worker can't make the optimizer. The message gives the reason.

    Example::

        with dist_autograd.context() as context_id:
            loss = model(inputs)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    functional_optim_map: ClassVar[Any] = functional_optim_map

    @neutral
    def __init__(
        self,
        optimizer_class: Any,
        params_rref: Iterable[rpc.RRef[Tensor]] | Iterable[dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        functional = functional_optim_map.get(optimizer_class)
        if functional is None:
            refuse_functional_form(optimizer_class)
            if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS):
                raise TypeError(
                    f"{optimizer_class.__qualname__} evaluates the loss again and again in a step, and makes one "
                    "vector of all parameters: choose an optimizer that steps each parameter by its own gradient"
                )
        if functional is None and optimizer_class not in _warned:
            _warned.add(optimizer_class)
            logger.warning(
                "%s has no functional form: its steps hold the GIL, so that those of several trainers do not run in "
                "parallel. shoal.functional.register_functional_optimizer gives it one",
                getattr(optimizer_class, "__qualname__", optimizer_class),
            )
        self._recipe = worker.Recipe(optimizer_class, functional, args, kwargs)
        self._remotes: dict[str, rpc.RRef[worker.WorkerOptimizer]] = {}
        # For each group: the worker's name to the indices, in the group, of the parameters that the worker owns.
        self._places: list[dict[str, list[int]]] = []
        # For each group: the names of the options that workers know. Schedulers add entries of their own to a group.
        self._option_names: list[set[str]] = []
        super().__init__(params_rref, {})  # type: ignore[arg-type]
        here = SimpleNamespace(defaults=self.defaults, state=self.state)  # and not this object, which would hold itself
        self._shown = OwnGroups(self.param_groups, here, elsewhere="the workers have it; call load_state_dict")

    @property
    def remote_optimizers(self) -> list[rpc.RRef[worker.WorkerOptimizer]]:
        """An RRef to each worker's optimizer."""
        return list(self._remotes.values())

    @neutral
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds RRefs with options of their own, on workers that have parameters already or on others.

        Args:
            param_group: ``params``, one RRef or several, and the options that differ from the constructor's.

        Raises:
            TypeError: if a parameter is not an RRef.
            ValueError: if there is no parameter.
            RemoteOptimizerError: if a worker refuses, for example a parameter that it has already. The group is not
                added then.
        """
        options = {name: value for name, value in param_group.items() if name != "params"}
        rrefs = _checked(param_group["params"])
        number = len(self.param_groups)
        places: dict[str, list[int]] = {}
        for place, rref in enumerate(rrefs):
            places.setdefault(rref.owner().name, []).append(place)
        calls: dict[str, Any] = {}
        for name, owned in places.items():
            parameters = [rrefs[place] for place in owned]
            calls[name] = worker.join, (self._recipe, self._remotes.get(name), number, parameters, options)
        answers: dict[str, worker.Added] = call_all(f"adding parameters to {self._name}", calls)
        self._remotes.update({name: answer.remote for name, answer in answers.items()})
        first = next(iter(answers.values()))
        self.defaults.update(first.defaults)
        self._places.append(places)
        self._option_names.append(set(first.options))
        self.param_groups.append({"params": rrefs, **options, **first.options})
        if self._shown is not None:
            self._shown.fix(self.param_groups, {})

    @neutral
    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Applies the gradients of a context on all workers at once. Returns when all workers have done so.

        Args:
            context_id: the id of the `torch.distributed.autograd.context` that :func:`backward` was called with.

        Raises:
            RuntimeError: if there is no such context here.
            RemoteOptimizerError: if a worker failed or did not answer within torch's `rpc_timeout`. A worker that did
                not answer may still make the step. The other workers have made it.
        """
        dist_autograd.get_gradients(context_id)  # raises if there is no such context
        if self._shown is not None:
            self._shown.check()
        options = self._options()
        call_all(
            f"the step of {self._name}",
            {name: (worker.step, (self._remotes[name], context_id, chosen)) for name, chosen in options.items()},
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients belong to their context, which drops them when it ends. `set_to_none` is ignored."""

    @neutral
    def state_dict(self) -> dict[str, Any]:
        """The state of all workers as one torch.optim state dict, with parameters numbered in the order in which they
        were given.

        It loads into ``optimizer_class`` over the same parameters in one process, and the other way round. All tensors
        are copies. Workers are asked at the same time. For a consistent state, let no step run meanwhile.

        This method and `load_state_dict` call the hooks that were registered for them on this object, as torch's
        optimizers do.

        Returns:
            A dictionary with ``"state"`` and ``"param_groups"``.

        Raises:
            RemoteOptimizerError: if a worker failed.
            ValueError: if the class keeps something that is of no parameter, and that is not equal everywhere.
        """
        before_saving(self)
        calls = {name: (worker.state, (remote,)) for name, remote in self._remotes.items()}
        answers = call_all(f"gathering the state of {self._name}", calls)
        state: dict[int, dict[str, Any]] = {}
        of_none: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        start = 0
        for number, (group, places) in enumerate(zip(self.param_groups, self._places, strict=True)):
            for name, owned in places.items():
                for key, entry in answers[name][number].items():
                    if type(key) is int:
                        state[start + owned[key]] = entry
                    elif not are_equal(of_none.setdefault(key, entry), entry):
                        raise ValueError(
                            f"{self._name} keeps {key!r}, which is of no parameter, and it is {of_none[key]!r:.40} for "
                            f"some parameters and {entry!r:.40} for those of group {number} on {name}: one state dict "
                            "can't hold both. Choose a class that keeps the same for all"
                        )
            stop = start + len(group["params"])
            groups.append({**group, "params": list(range(start, stop))})
            start = stop
        return after_saving(self, {"state": dict(sorted(state.items())) | of_none, "param_groups": groups})

    @neutral
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or of ``optimizer_class`` over the same parameters in the same groups.

        State dicts of older versions of torch load as in torch: numbers may be ints, floats or tensors of one element,
        and an option that such a version did not have gets the value that torch gives it.

        Args:
            state_dict: a dictionary with ``"state"`` and ``"param_groups"``.

        Raises:
            ValueError: if the number of groups or their sizes differ. Nothing has been changed then.
            RemoteOptimizerError: if a worker refuses. Its parameters keep their state; those of the other workers have
                the new one.
        """
        state_dict = before_loading(self, state_dict)
        groups = state_dict["param_groups"]
        sizes, expected = ([len(group["params"]) for group in some] for some in (groups, self.param_groups))
        if sizes != expected:
            raise ValueError(f"the state dict has groups of {sizes} parameters, this optimizer of {expected}")
        merged = [
            {**mine, **saved, "params": mine["params"]}
            for mine, saved in zip(self.param_groups, _completed(self._recipe.optimizer_class, groups), strict=True)
        ]
        states: dict[str, dict[int, dict[Any, Any]]] = {name: {} for name in self._remotes}
        saved_state, known = state_dict["state"], {key for group in groups for key in group["params"]}
        of_none = {key: value for key, value in saved_state.items() if key not in known and type(key) is not int}
        for number, (saved, places) in enumerate(zip(groups, self._places, strict=True)):
            for name, owned in places.items():
                keys = {index: saved["params"][place] for index, place in enumerate(owned)}
                states[name][number] = {index: saved_state[key] for index, key in keys.items() if key in saved_state}
                if self._recipe.functional is None:  # functional ones have no other state
                    states[name][number] |= of_none
        call_all(
            f"loading the state of {self._name}",
            {
                name: (worker.load, (self._remotes[name], states[name], options))
                for name, options in self._options(merged).items()
            },
        )
        for mine, new in zip(self.param_groups, merged, strict=True):
            mine.update(new)
        after_loading(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer is neither copied nor pickled, because its state is on the workers: save "
            "state_dict(), and load it into a new DistributedOptimizer"
        )

    @property
    def _name(self) -> str:
        chosen = self._recipe.optimizer_class
        return f"DistributedOptimizer({getattr(chosen, '__qualname__', chosen)})"

    def _options(self, groups: list[dict[str, Any]] | None = None) -> dict[str, dict[int, worker.Options]]:
        """For each worker, the options of the groups in which it has parameters."""
        options: dict[str, dict[int, worker.Options]] = {name: {} for name in self._remotes}
        for number, group in enumerate(self.param_groups if groups is None else groups):
            chosen = {name: value for name, value in group.items() if name in self._option_names[number]}
            for name in self._places[number]:
                options[name][number] = chosen
        return options


def _completed(optimizer_class: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of a state dict, with the options that an older torch did not have and has not saved. Their
    values are torch's own: each class adds them in ``__setstate__``, by which it unpickles older optimizers.
    """
    bases = optimizer_class.__mro__ if isinstance(optimizer_class, type) else ()
    for base in bases:
        if issubclass(base, torch.optim.Optimizer) and base.__module__.startswith("torch.optim."):
            older = base.__new__(base)
            older.__setstate__({"state": {}, "param_groups": [dict(group) for group in groups], "defaults": {}})
            return older.param_groups
    return groups


def _checked(params: Any) -> list[rpc.RRef[Tensor]]:
    rrefs: list[Any] = [params] if isinstance(params, rpc.PyRRef) else list(params)
    if not rrefs:
        raise ValueError("a parameter group without parameters")
    for place, rref in enumerate(rrefs):
        if not isinstance(rref, rpc.PyRRef):
            raise TypeError(
                f"parameter {place} is a {type(rref).__name__}: RRefs are needed; of a tensor of this process, "
                "torch.distributed.rpc.RRef(tensor)"
            )
    return rrefs
