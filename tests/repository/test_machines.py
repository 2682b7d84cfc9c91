"""Nobody but a machine itself writes its fields, and a machine has few: more of them live as long as something smaller.

A *machine* is a class that keeps state and takes events; a *record* is a dataclass or a message. A machine may hold
records, and a class that is given one may write to it. Types are not known here, only names: a write to `x.field`
counts if some machine of the rooms has such a field, unless `x` is named like a record.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shoal

PACKAGE = Path(shoal.__file__).parent
ROOMS = {"swarm/protocol": "swarm", "p2p": "p2p", "averaging": "averaging"}
"""Where machines are, each with the part of the package whose writes are read."""

DATACLASSES = {"Gathering", "Leading", "Silence"}
"""Dataclasses that are machines."""

RECORDS = {"at", "round", "given"}
"""The names under which machines hold their records: see `lifetimes`."""

NETWORK = "the network within one process is one machine, and its transports are the ends"
ALLOWED = {
    "swarm/swarm.py self._signer.instance": "the start of a peer names itself by the time, and machines have no clock",
    "p2p/lane.py self._lane.passed": "by a connection of the lane, for each piece of a chunk: a call would cost more",
    "p2p/memory_transport.py network.transports": NETWORK,
    "p2p/memory_transport.py other._connections": NETWORK,
    "p2p/memory_transport.py self.network._listening": NETWORK,
    "p2p/memory_transport.py target.memory": "a record of a buffer, which arrives whole",
    "p2p/reactor.py Reactor._shared": "of the class itself",
    "p2p/reactor.py cls._shared._users": "of the class itself",
}

MOST_FIELDS = 28
FEW_FIELDS = {"Participant", "Gathering", "Leading", "Link"}
"""Machines whose fields are counted."""


def classes(room: str) -> Iterator[ast.ClassDef]:
    for path in sorted((PACKAGE / room).glob("*.py")):
        yield from (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


def is_machine(of: ast.ClassDef) -> bool:
    names = [ast.unparse(one) for one in (*of.decorator_list, *of.bases)]
    is_record = any(name.startswith(("dataclass", "msgspec.Struct", "Enum", "IntEnum", "Protocol")) for name in names)
    return of.name in DATACLASSES or not is_record


def targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that are written, or whose items are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(target, ast.Attribute):
                yield target


def is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def fields(of: ast.ClassDef) -> set[str]:
    declared = (node.target for node in of.body if isinstance(node, ast.AnnAssign))
    own = {target.attr for target in targets(of) if is_own(target)}
    return own | {target.id for target in declared if isinstance(target, ast.Name)}


def is_of_a_record(target: ast.Attribute) -> bool:
    of = target.value
    return (of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else "") in RECORDS


def written_from_outside(room: str, part: str) -> set[str]:
    of_machines = {name for one in classes(room) if is_machine(one) for name in fields(one)}
    return {
        f"{path.relative_to(PACKAGE)} {ast.unparse(target)}"
        for path in (PACKAGE / part).rglob("*.py")
        for target in targets(ast.parse(path.read_text()))
        if target.attr in of_machines and not is_own(target) and not is_of_a_record(target)
    }


def test_nobody_else_writes_the_fields_of_a_machine() -> None:
    assert {one for room, part in ROOMS.items() for one in written_from_outside(room, part)} == ALLOWED.keys()


def test_each_record_is_replaced_by_one_method() -> None:
    participant = next(one for one in classes("swarm/protocol") if one.name == "Participant")
    for record in RECORDS:
        replaced_by = [
            node.name
            for node in participant.body
            if isinstance(node, ast.FunctionDef)
            and any(is_own(target) and target.attr == record for target in targets(node))
        ]
        assert len(replaced_by) == 2, f"{record}: by {replaced_by}"  # and `__init__`, which makes it


def test_a_machine_has_few_fields() -> None:
    found = {one.name: len(fields(one)) for room in ROOMS for one in classes(room) if one.name in FEW_FIELDS}
    assert found.keys() == FEW_FIELDS
    assert {name: count for name, count in found.items() if count > MOST_FIELDS} == {}
