"""The parameter groups and the state that an optimizer shows to its users, who may change and replace them as in torch.

Shoal's optimizers step with other optimizers, which they wrap or make. So what users see and what is stepped with need
not be the same objects. The parameters are fixed.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

ADVICE = "the parameters of this optimizer are fixed: change, or replace, the options of the groups only"


class Shown:
    """The groups and the state of another optimizer, as they are.

    Args:
        optimizer: the optimizer that steps.
        groups: the groups that users see; by default the groups of `optimizer`.
        stepped: for each parameter, the tensor that is stepped in its place; empty if the state is shown as it is.
        wait: waits until no other thread is stepping.

    Attributes:
        optimizer: as given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[Mapping[str, Any]] | None = None,
        stepped: Mapping[Tensor, Tensor] = MappingProxyType({}),
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.optimizer, self._wait, self._names = optimizer, wait, list(optimizer.defaults)
        self.fix(optimizer.param_groups if groups is None else groups, stepped)

    def fix(self, groups: Iterable[Mapping[str, Any]], stepped: Mapping[Tensor, Tensor]) -> None:
        """From now on, users' groups need the parameters that these have, and the options that the step reads. For
        `stepped` see above."""
        self._state = ModelState(self.optimizer, stepped, self._wait) if stepped else None
        self._parameters: list[list[Any]] = []
        self._options: list[list[str]] = []
        for group in groups:
            self._parameters.append(list(group["params"]))
            self._options.append([name for name in self._names if name in group])

    @property
    def groups(self) -> Any:
        """The parameter groups, with the parameters that users know."""
        return self.optimizer.param_groups

    def set_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Step with the options of these groups from now on. As in torch, they become the groups that users see.

        Raises:
            ValueError: as `check`, or if they are no groups. Then nothing has changed.
        """
        self.optimizer.param_groups = self.checked(groups)

    @property
    def state(self) -> Any:
        """The state, a mapping from parameters."""
        return self.optimizer.state if self._state is None else self._state

    def set_state(self, state: Any) -> None:
        """Step with this state from now on.

        Raises:
            TypeError: if it is no mapping. Then nothing has changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state was set to a {type(state).__name__}: give a mapping from parameters to their state")
        if self._state is not None:
            self._state.replace(state)
        else:  # a missing entry is made, as by torch's own
            self.optimizer.state = state if isinstance(state, defaultdict) else defaultdict(dict, state)

    def check(self) -> None:
        """Check what users may have changed in place.

        Raises:
            ValueError: if the groups do not have the parameters that they had at the beginning, or not the options that
                the step reads.
        """
        self._check(self.groups)

    def checked(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A list of groups that users have given, checked. Raises as `set_groups`."""
        if not isinstance(groups, Iterable):
            raise ValueError(f"param_groups was set to {groups!r:.60}: give a list of groups")
        given: list[Any] = groups if isinstance(groups, list) else list(groups)
        for group in given:
            if not (isinstance(group, Mapping) and "params" in group):
                raise ValueError(f'param_groups was set to a list with {group!r:.60}: give groups, each with "params"')
        self._check(given)
        if all(type(group) is dict for group in given):
            return given
        return [group if type(group) is dict else dict(group) for group in given]

    def _check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self._parameters):
            raise ValueError(
                f"param_groups has {len(groups)} groups, and had {len(self._parameters)} when the optimizer was made: "
                f"{ADVICE}"
            )
        for number, (group, fixed, names) in enumerate(zip(groups, self._parameters, self._options, strict=True)):
            now = group.get("params", ())
            if len(now) != len(fixed) or not all(map(is_, now, fixed)):
                alike = [mine is theirs for mine, theirs in zip(now, fixed, strict=False)]
                first = alike.index(False) if False in alike else len(alike)
                raise ValueError(
                    f'param_groups[{number}]["params"] has {len(now)} parameters, and had {len(fixed)} when the '
                    f"optimizer was made; they differ at index {first}: {ADVICE}"
                )
            if missing := [name for name in names if name not in group]:
                raise ValueError(f"param_groups[{number}] has no {missing[0]!r}, which the step reads: set it")


class OwnGroups(Shown):
    """Groups of an optimizer's own. What steps takes the options from them at each step.

    Args:
        groups: the groups.
        optimizer: what has the state, and the default options.
        stepped: see `Shown`.
        elsewhere: where the state is, if it is not that of `optimizer`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        optimizer: Any,
        stepped: Mapping[Tensor, Tensor] = MappingProxyType({}),
        elsewhere: str = "",
    ) -> None:
        self._groups, self._elsewhere = groups, elsewhere
        super().__init__(optimizer, groups, stepped)

    @property
    def groups(self) -> Any:
        return self._groups

    def set_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        self._groups = self.checked(groups)

    def set_state(self, state: Any) -> None:
        if self._elsewhere:
            raise ValueError(f"state can't be set here: {self._elsewhere}")
        super().set_state(state)


class ShowsGroups(torch.optim.Optimizer):
    """An optimizer that shows its users the `param_groups` and the `state` of its `_shown`, once that is set. Before,
    they are as torch's constructor makes them.

    Wrappers (Lightning, Fabric) are of a subclass of the optimizer's class, and have none of its attributes. They look
    in the optimizer for what raises an AttributeError.
    """

    _shown: Shown | None = None

    def _own(self, name: str) -> Any:
        if f"own {name}" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[f"own {name}"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Users may change their options, and set other groups with the same parameters."""
        groups: list[dict[str, Any]] = self._own("param_groups") if self._shown is None else self._shown.groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        if self._shown is None:
            self.__dict__["own param_groups"] = groups
        else:
            self._shown.set_groups(groups)

    @property
    def state(self) -> Any:
        """The state of each parameter. Users may change and set it."""
        return self._own("state") if self._shown is None else self._shown.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._shown is None:
            self.__dict__["own state"] = state
        else:
            self._shown.set_state(state)


class ModelState(MutableMapping[Any, Any]):
    """The state that users see of an optimizer that steps copies: its keys are the model's parameters. What the
    optimizer keeps under other keys is shown as it is. Each access waits until no other thread is stepping.

    Args:
        optimizer: the optimizer.
        stepped: for each of the model's parameters, the tensor that the optimizer steps.
        wait: waits until no other thread is stepping.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, stepped: Mapping[Tensor, Tensor], wait: Callable[[], None]
    ) -> None:
        self._optimizer, self._stepped, self._wait = optimizer, dict(stepped), wait
        self._shown = {own: parameter for parameter, own in stepped.items()}

    @property
    def _state(self) -> Any:
        self._wait()
        return self._optimizer.state

    def __getitem__(self, key: Any) -> Any:
        return self._state[self._stepped.get(key, key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._stepped.get(key, key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[self._stepped.get(key, key)]

    def __contains__(self, key: object) -> bool:
        return self._stepped.get(key, key) in self._state  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:
        return (self._shown.get(key, key) for key in self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(dict(self))

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary: unlike `state[key]`, it makes no entry."""
        return self._state.get(self._stepped.get(key, key), default)

    def copy(self) -> dict[Any, Any]:
        """A dictionary with the same entries."""
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Have the state of another mapping, whose keys are the model's parameters."""
        self._wait()
        own = {self._stepped.get(key, key): value for key, value in state.items()}
        self._optimizer.state = defaultdict(dict, own)
