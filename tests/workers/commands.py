"""What workers are told: the public methods of a role are its commands. Each is sent as a struct of the arguments that
the method takes, and answered with what it returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, Union, get_type_hints

import msgspec

import shoal


class Begun(TypedDict):
    """What a worker answers when its role was made."""

    addresses: list[str]
    peer: str


def begun(role: object) -> Begun:
    dht: shoal.DHT | None = getattr(role, "dht", None)
    if dht is None:
        return Begun(addresses=[], peer="")
    return Begun(addresses=[str(address) for address in dht.get_visible_maddrs()], peer=str(dht.peer_id))


@functools.cache
def command_of(act: Callable[..., Any]) -> type[msgspec.Struct]:
    """The command to call that method, or to make that role."""
    hints = get_type_hints(getattr(act, "__init__") if isinstance(act, type) else act)  # noqa: B009 (mypy)
    taken = [each for each in inspect.signature(act).parameters.values() if each.name != "self"]
    fields = [
        (each.name, hints[each.name]) if each.default is each.empty else (each.name, hints[each.name], each.default)
        for each in taken
    ]
    return msgspec.defstruct(act.__name__, fields, tag=True, kw_only=True, forbid_unknown_fields=True)


def commands_of(role: type) -> Any:
    """The union of all that a worker of that role obeys."""
    methods = [each for name, each in inspect.getmembers(role, inspect.isfunction) if not name.startswith("_")]
    return Union[tuple(command_of(each) for each in (role, *methods))]  # noqa: UP007 (made of a list)
