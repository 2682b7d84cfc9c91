"""The state of the members of a `Together`, as one mapping."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class JointState(MutableMapping[Any, Any]):
    """The state of several optimizers as one mapping, see `Together`. As in torch's, reading the entry of one of their
    parameters makes it.

    Args:
        members: the optimizers.

    Attributes:
        of_none: what is no member's, as a state dict of other code may have it.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members, self.of_none = members, dict[Any, Any]()
        self._owners: dict[Tensor, Optimizer] = {}

    def _place(self, key: Any) -> tuple[Any, Any]:
        """The mapping that has such an entry, or gets it, and the key there."""
        if not isinstance(key, Tensor):
            return (self._members[key[0]].state, key[1]) if is_pair(key, len(self._members)) else (self.of_none, key)
        for member in self._members:
            if key in member.state:
                return member.state, key
        if key not in self._owners:
            self._owners = {
                p: member for member in self._members for group in member.param_groups for p in group["params"]
            }
        owner = self._owners.get(key)
        return self.of_none if owner is None else owner.state, key

    def __getitem__(self, key: Any) -> Any:
        state, key = self._place(key)
        return state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        state, key = self._place(key)
        state[key] = value

    def __delitem__(self, key: Any) -> None:
        state, key = self._place(key)
        del state[key]

    def __contains__(self, key: object) -> bool:
        state, key = self._place(key)
        return key in state

    def __iter__(self) -> Iterator[Any]:
        for number, member in enumerate(self._members):
            for key in member.state:
                yield key if isinstance(key, Tensor) else (number, key)
        yield from self.of_none

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members) + len(self.of_none)

    def __repr__(self) -> str:
        return repr(dict(self))

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary: it makes no entry. So do the next two."""
        state, key = self._place(key)
        return state.get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        state, key = self._place(key)
        return state.pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        state, key = self._place(key)
        return state.setdefault(key, default)

    def clear(self) -> None:
        for member in self._members:
            member.state.clear()
        self.of_none.clear()

    def copy(self) -> dict[Any, Any]:
        """A dictionary with the same entries."""
        return dict(self)


def is_pair(key: Any, members: int) -> bool:
    """Whether a key of the joint state is that of a member, of which it has the number, and of no parameter."""
    return type(key) is tuple and len(key) == 2 and type(key[0]) is int and 0 <= key[0] < members
