"""`Together`: several optimizers as one, for example Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from itertools import accumulate, chain, pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from shoal.flat.given import Given
from shoal.flat.joint_state import JointState, is_pair
from shoal.flat.state_dict_hooks import after_loading, after_saving, before_loading, before_saving, without_hooks

StateDict = dict[str, Any]

_MODES = ("train", "eval")


class Together(Optimizer):
    """Several optimizers as one. Each of these *members* steps its own parameters.

    >>> def muon_and_adamw(params):
    ...     matrices, rest = shoal.Together.divide(params, lambda name, p: p.ndim == 2 and "embed" not in name)
    ...     return shoal.Together(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4))

    It does what its members do one after the other, bit for bit, and it is a torch optimizer: learning rate schedulers,
    hooks, `torch.amp.GradScaler`, `copy.deepcopy` and pickle work as with any other.

    - *Groups.* `param_groups` has the members' own groups, in the order of the members. Who changes an option there
      changes it in the member, and the other way round. If users set or replace groups, the members get them.
    - *State.* `state` has the entries of all members. The keys are parameters. What a member keeps under another key is
      under the pair of the member's number and that key.
    - *State dict.* It has torch's form, with the members' parameters numbered through. So another optimizer over the
      same groups can load it, and the other way round, but for what is of no parameter.
    - *Hooks.* Hooks that were registered on a member are called as well, with the member's own arguments.
    - *Closures.* `step(closure)` evaluates the closure once, before the members' steps. Members that ask for the loss
      get that one.
    - *Modes.* If a member has `train()` and `eval()`, as schedule-free optimizers have, this object has them, too.

    Args:
        optimizers: the members, each a `torch.optim.Optimizer`; another `Together` is one, too. No parameter may be in
            two of them.

    Attributes:
        members: as given.
        defaults: the defaults of all members; where they differ, those of the first member that has the option.

    Raises:
        TypeError: if a member is no torch optimizer.
        ValueError: if there are none; if a member is given twice, or a parameter is in two places; if the step of a
            member evaluates its closure again and again (LBFGS); or if the state dict of a member has not torch's form.
    """

    members: tuple[Optimizer, ...]

    def __init__(self, *optimizers: Optimizer) -> None:
        _check_members(optimizers)
        self.__setstate__({"members": optimizers})

    # -- copied and pickled: its members are all that it has

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        members = state["members"]
        defaults = dict(chain.from_iterable(member.defaults.items() for member in reversed(members)))
        super().__setstate__({"members": members, "defaults": defaults})  # makes what an unpickled optimizer needs
        self._groups: list[dict[str, Any]] = []
        self._known: list[dict[str, Any]] = []
        self._state = JointState(members)

    # -- groups and state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members.

        Raises:
            ValueError: if they have changed, and a parameter is in two of them now; or as the setter, for a list that
                was changed in place.
        """
        groups = [group for member in self.members for group in member.param_groups]
        if not _are_same(groups, self._known):
            _refuse_shared(self.members)
            self._groups[:] = self._known = groups
        elif not _are_same(self._groups, self._known):
            self.param_groups = self._groups
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        given = groups if isinstance(groups, list) else list(groups)
        counts = [len(member.param_groups) for member in self.members]
        if len(given) != sum(counts):
            raise ValueError(
                f"param_groups was set to {len(given)} groups, and {names_of_members(self)} has {sum(counts)}: a group "
                "more or less would be of no member"
            )
        before = [member.param_groups for member in self.members]
        for member, part in zip(self.members, _parts(given, counts), strict=True):
            member.param_groups = part
        try:
            _refuse_shared(self.members)
        except ValueError:
            for member, part in zip(self.members, before, strict=True):
                member.param_groups = part
            raise
        self._groups, self._known = given, list(given)

    @property
    def state(self) -> Any:
        """The state of all members, a mapping. See the class."""
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        entries = dict(state)
        self._state.clear()
        self._state.update(entries)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: it would not say which member steps the group.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"add_param_group does not say which member of {names_of_members(self)} steps the group: give each member "
            "all of its groups, and make Together of the members then"
        )

    # -- steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the step of each member, in their order.

        Args:
            closure: evaluates the model and returns the loss; it is called once, before the first member's step.

        Returns:
            The loss, if there is a closure.
        """
        self.param_groups  # noqa: B018  # if users have changed the list in place, the members get its groups
        if closure is None:
            for member in self.members:
                member.step()
            return None
        with torch.enable_grad():
            loss = closure()
        for member in self.members:
            if _takes_closure(type(member)):
                member.step(_evaluated(member, loss))
            else:
                member.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all members' parameters."""
        for member in self.members:
            member.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval`, if a member has them: they call those of each member that has them."""
        if name in _MODES:
            calls = [call for member in vars(self).get("members", ()) if callable(call := getattr(member, name, None))]
            if calls:
                return partial(_call_all, calls)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def own_options(self) -> frozenset[str]:
        """The options that a member calls a peer's own, see the guide of optimizers."""
        return frozenset(chain.from_iterable(getattr(member, "own_options", ()) for member in self.members))

    # -- state dicts

    def state_dict(self) -> StateDict:
        """The state dicts of all members as one, of torch's form.

        Raises:
            ValueError: if the state dict of a member has another form.
        """
        before_saving(self)
        state, groups, start = dict(self._state.of_none), [], 0
        for number, member in enumerate(self.members):
            packed = _packed(member)
            numbers = {key: start + key for group in packed["param_groups"] for key in group["params"]}
            for group in packed["param_groups"]:
                groups.append({**group, "params": [numbers[key] for key in group["params"]]})
                start += len(group["params"])
            state.update({numbers.get(key, (number, key)): value for key, value in packed["state"].items()})
        return after_saving(self, {"state": state, "param_groups": groups})

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, or of another optimizer that has as many parameters in each group.

        Raises:
            ValueError: if the number of groups or their sizes differ. Nothing has changed then.
        """
        state_dict = before_loading(self, state_dict)
        given = [
            before_loading(member, part) for member, part in zip(self.members, self._unpacked(state_dict), strict=True)
        ]
        keys = {key for group in state_dict["param_groups"] for key in group["params"]}
        of_none = {
            key: value for key, value in state_dict["state"].items() if key not in keys and self._member_of(key) is None
        }
        if foreign := [key for key in of_none if key not in self._state.of_none]:
            warnings.warn(
                f"the state dict has {foreign[0]!r:.60}, which is of no parameter: no member of "
                f"{names_of_members(self)} gets it. A member's own has the key (number of the member, key)",
                stacklevel=2,
            )
        for member, part in zip(self.members, given, strict=True):
            with without_hooks(member):
                member.load_state_dict(part)
        self._state.of_none.clear()
        self._state.of_none.update(of_none)
        for member in self.members:
            after_loading(member)
        after_loading(self)

    def _member_of(self, key: Any) -> int | None:
        """The number of the member that keeps something under such a key, which is no parameter's; None if none is."""
        return key[0] if is_pair(key, len(self.members)) else None

    def _unpacked(self, state_dict: StateDict) -> list[StateDict]:
        """The state dict of each member.

        Raises:
            ValueError: if groups or their sizes differ.
        """
        saved = state_dict["param_groups"]
        sizes, wanted = [len(group["params"]) for group in saved], [len(group["params"]) for group in self.param_groups]
        if sizes != wanted:
            raise ValueError(
                f"the state dict has groups of {sizes} parameters, and those of {names_of_members(self)} have {wanted}"
            )
        unpacked = []
        counts = [len(member.param_groups) for member in self.members]
        for number, groups in enumerate(_parts(saved, counts)):
            own = {key for group in groups for key in group["params"]}
            state = {}
            for key, value in state_dict["state"].items():
                if key in own:
                    state[key] = value
                elif self._member_of(key) == number:
                    state[key[1]] = value
            unpacked.append({"state": state, "param_groups": groups})
        return unpacked

    # -- made of parameters

    @staticmethod
    def divide(params: nn.Module | Iterable[Any], chosen: Callable[[str, Tensor], bool]) -> tuple[list[Any], list[Any]]:
        """Divides named parameters into two parts, for two members.

        >>> matrices, rest = shoal.Together.divide(params, lambda name, p: p.ndim == 2 and name != "head.weight")

        Args:
            params: what the function that `shoal.Optimizer` takes as `optimizer=` is called with:
                `(name, parameter)` pairs, as of `model.named_parameters()`, or groups of them; or a model.
            chosen: whether a parameter, of which it gets name and tensor, belongs to the first part.

        Returns:
            The two parts, in the form in which the parameters were given. Groups keep their options. A group that has
            no parameter of a part is left out of that part.

        Raises:
            ValueError: if a parameter has no name, or if a part would be empty.
        """
        given = Given.of(params)
        if nameless := [index for index, name in enumerate(given.names) if not name]:
            raise ValueError(
                f"Together.divide asks by name, and {given.label(nameless[0])} has none: give "
                "params=model.named_parameters()"
            )
        picked = [bool(chosen(name, p)) for name, p in zip(given.names, given.parameters, strict=True)]
        if len(set(picked)) < 2:
            which = "every parameter" if picked[0] else "no parameter"
            raise ValueError(
                f"Together.divide: chosen={getattr(chosen, '__name__', chosen)} picks {which} of {len(picked)} "
                f"({', '.join(map(repr, given.names[:4]))}{', …' if len(picked) > 4 else ''}): then one optimizer is "
                "enough"
            )
        return _part_of(given, picked, True), _part_of(given, picked, False)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that step: the members of a `Together`, or the optimizer itself."""
    if not isinstance(optimizer, Together):
        return [optimizer]
    return [one for member in optimizer.members for one in members_of(member)]


def names_of_members(optimizer: Optimizer) -> str:
    """The class of an optimizer; for a `Together`, with those of its members."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Together):
        return name
    return f"{name}({', '.join(map(names_of_members, optimizer.members))})"


def _check_members(optimizers: Sequence[Any]) -> None:
    if not optimizers:
        raise ValueError("Together needs optimizers: Together(torch.optim.Muon(…), torch.optim.AdamW(…))")
    for number, member in enumerate(optimizers):
        if not isinstance(member, Optimizer):
            raise TypeError(
                f"member {number} of Together is a {type(member).__name__}: give torch optimizers, one argument each"
            )
        if any(member is other for other in optimizers[:number]):
            raise ValueError(f"member {number} of Together, a {type(member).__name__}, was given before")
        closure = signature(type(member).step).parameters.get("closure")
        if isinstance(member, LBFGS) or (closure is not None and closure.default is Parameter.empty):
            raise ValueError(
                f"member {number} of Together is a {type(member).__name__}, whose step evaluates the loss again and "
                "again (its closure), and Together evaluates it once for all members: choose another optimizer"
            )
        if type(member).state_dict is not Optimizer.state_dict:
            _packed(member)
    _refuse_shared(optimizers)


def _call_all(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _takes_closure(made: type[Optimizer]) -> bool:
    """Whether the step of a class has a parameter for a closure."""
    return len(signature(made.step).parameters) > 1


def _refuse_shared(members: Sequence[Optimizer]) -> None:
    """
    Raises:
        ValueError: if a parameter is in two places of the members' groups, with its name or shape.
    """
    found: dict[Tensor, str] = {}
    for number, member in enumerate(members):
        for place, group in enumerate(member.param_groups):
            names = group.get("param_names", ())
            for index, parameter in enumerate(group["params"]):
                here = f"group {place} of member {number}, a {type(member).__name__}"
                if parameter in found:
                    name = repr(names[index]) if index < len(names) else f"parameter {index}"
                    raise ValueError(
                        f"{name}, of shape {tuple(parameter.shape)}, is in {found[parameter]}, and in {here}: give "
                        "each parameter to one member, once"
                    )
                found[parameter] = here


def _packed(member: Optimizer) -> StateDict:
    """The state dict of a member.

    Raises:
        ValueError: if it has not torch's form, or more than that.
    """
    packed = member.state_dict()
    has_form = isinstance(packed.get("state"), dict) and isinstance(packed.get("param_groups"), list)
    if not has_form or len(packed) > 2:
        raise ValueError(
            f"the state dict of {type(member).__name__} has a form of its own ({', '.join(map(str, packed))}), and "
            "Together joins those of torch's form: give it to shoal.Optimizer alone"
        )
    return packed


def _evaluated(member: Optimizer, loss: Any) -> Callable[[], Any]:
    """A closure for a member that returns a loss, once.

    Raises:
        RuntimeError: at its second call.
    """
    losses = [loss]

    def evaluate() -> Any:
        if not losses:
            raise RuntimeError(
                f"{type(member).__name__} evaluates the loss a second time within a step, and Together evaluates it "
                "once, for all members: choose another optimizer"
            )
        return losses.pop()

    return evaluate


def _parts(items: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    return [list(items[start:stop]) for start, stop in pairwise(accumulate(counts, initial=0))]


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _part_of(given: Given, picked: Sequence[bool], part: bool) -> list[Any]:
    lists = [[(given.names[i], given.parameters[i]) for i in group if picked[i] is part] for group in given.groups]
    return [group for group in given.like_given(lists) if not isinstance(group, dict) or group["params"]]
