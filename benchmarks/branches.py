"""Where Shoal's source asks what an object is, or in which mode it runs: counted per room, without running it.

Such a question is a branch that an object could take away: see "History" in docs/architecture.md. Used by
`benchmarks.walk`. What is counted is what is written; nobody is to meet a count without its intent.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.structure import code_lines, constructors, room_of, sources

MODES = frozenset(
    (
        "auxiliary",
        "average_opt_statistics",
        "average_state_every",
        "averages_in_background",
        "cluster",
        "counts_steps",
        "delay_grad_averaging",
        "delay_optimizer_step",
        "delay_state_averaging",
        "frozen_parameters",
        "grad_averager_factory",
        "in_background",
        "moves_within_epochs",
        "offload_optimizer",
        "outer",
        "reuse_grad_buffers",
        "sends_frozen",
        "use_local_updates",
    )
)
"""Arguments of an `Optimizer` that choose how it trains, and what `Settings` derives from them."""

STRATEGIES = frozenset(("drift", "gradients", "host", "speaker", "strands"))
"""Names of what a mode may lack: `x is None` asks for the mode."""

QUESTIONS = {
    "isinstance": "`isinstance` on own classes",
    "case": "`case Class()` of own classes",
    "type": "`type(…) is` of own classes",
    "hasattr": "`hasattr`",
    "kind": "reads of `.kind`",
    "rank": "reads of `.rank` and `.is_first`",
    "settings": "reads of `settings.<mode>` outside settings.py",
    "none": "`is None` of " + ", ".join(sorted(STRATEGIES)),
}
"""What is counted, with its words for the table."""

OF_OBJECTS = ("isinstance", "case", "type", "hasattr", "kind", "rank")
"""The questions what an object is; the others ask for a mode."""


@dataclass(frozen=True)
class Size:
    """Of a class that is neither public nor a record.

    Attributes:
        name: of the class, without its module.
        collaborators, arguments: of its constructor.
        attributes: that its own methods set on `self`, or its body declares.
        methods: of its own.
    """

    name: str
    collaborators: int
    arguments: int
    attributes: int
    methods: int


def last_name(expression: ast.expr) -> str:
    """Of `self._settings` it is settings."""
    if isinstance(expression, ast.Name):
        return expression.id.lstrip("_")
    return expression.attr.lstrip("_") if isinstance(expression, ast.Attribute) else ""


class Names:
    """What the names in a package's modules stand for.

    Args:
        trees: the modules by their full names.
    """

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._trees = trees
        self._bound: dict[str, str] = {}  # by full name as it is imported: where it comes from
        self._classes: set[str] = set()
        self._aliases: dict[str, tuple[str, ast.expr]] = {}
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._classes.add(f"{module}.{node.name}")
                elif isinstance(node, ast.ImportFrom) and node.module:
                    for name in node.names:
                        self._bound[f"{module}.{name.asname or name.name}"] = f"{node.module}.{name.name}"
            for statement in tree.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    self._aliases[f"{module}.{statement.targets[0].id}"] = module, statement.value

    def is_own(self, module: str, expression: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether one of the classes that an expression names, such as `int | Drift`, is of this package."""
        if isinstance(expression, ast.Name | ast.Attribute):
            full = self._defined(module, expression)
            if full in self._classes:
                return True
            if full in self._aliases and full not in seen:
                return self.is_own(*self._aliases[full], seen | {full})
            return False
        children = (child for child in ast.iter_child_nodes(expression) if isinstance(child, ast.expr))
        return any(self.is_own(module, child, seen) for child in children)

    def _defined(self, module: str, expression: ast.expr) -> str:
        full = f"{module}.{ast.unparse(expression)}"
        for _ in range(8):  # a package may hand on what it imports
            head, _, rest = full.rpartition(".")
            if full in self._bound:
                full = self._bound[full]
            elif head in self._bound:  # a class of an imported module
                full = f"{self._bound[head]}.{rest}"
            else:
                break
        return full


def questions(module: str, tree: ast.Module, names: Names) -> Iterator[str]:
    """The key of each question that a module asks, once for each time."""
    is_settings = module.endswith(".settings")
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]) if names.is_own(module, kinds):
                yield "isinstance"
            case ast.Call(func=ast.Name(id="hasattr")):
                yield "hasattr"
            case ast.MatchClass(cls=kind) if names.is_own(module, kind):
                yield "case"
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                if any(map(_is_type, sides)) and any(names.is_own(module, side) for side in sides):
                    yield "type"
                is_none = any(isinstance(side, ast.Constant) and side.value is None for side in others)
                if is_none and isinstance(ops[0], ast.Is | ast.IsNot) and last_name(left) in STRATEGIES:
                    yield "none"
            case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
                if attr == "kind":
                    yield "kind"
                elif attr in ("rank", "is_first") and "power_sgd" not in module:  # whose matrices have one
                    yield "rank"
                elif attr in MODES and last_name(value) == "settings" and not is_settings:
                    yield "settings"


def _is_type(expression: ast.expr) -> bool:
    return (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Name)
        and expression.func.id == "type"
        and len(expression.args) == 1
    )


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What a class declares in its body, and what its methods set on their first argument."""
    found = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.args.args:
            own = method.args.args[0].arg
            for each in ast.walk(method):
                match each:
                    case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Store()) if name == own:
                        found.add(attr)
    return found


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass or a struct, whose constructor takes what it consists of."""
    decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return "dataclass" in map(last_name, decorators) or "Struct" in map(last_name, node.bases)


def measure(package: Path) -> dict[str, Any]:
    """Per room: files, code lines, how often each of `QUESTIONS` is asked, and the sizes of its largest classes."""
    modules = sources(package)
    trees = {module: ast.parse(path.read_text()) for module, path in modules.items()}
    names = Names(trees)
    made = {one.name: one for one in constructors(package)}
    rooms: dict[str, dict[str, Any]] = {}
    sizes: dict[str, list[Size]] = {}
    for module, tree in trees.items():
        room = room_of(modules[module], package)
        counts = rooms.setdefault(room, {"files": 0, "code_lines": 0, **dict.fromkeys(QUESTIONS, 0)})
        counts["files"] += 1
        counts["code_lines"] += code_lines(modules[module])
        for key, count in Counter(questions(module, tree, names)).items():
            counts[key] += count
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not is_record(node):
                one = made[f"{module}.{node.name}"]
                if one.public:
                    continue
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                collaborators, attributes = len(one.collaborators), len(attributes_of(node))
                size = Size(node.name, collaborators, collaborators + one.values, attributes, methods)
                sizes.setdefault(room, []).append(size)
    for room, counts in rooms.items():
        for field in ("collaborators", "arguments", "attributes", "methods"):
            largest = max(sizes.get(room, []), key=lambda one: (getattr(one, field), one.name), default=None)
            counts[f"most {field}"] = [0, ""] if largest is None else [getattr(largest, field), largest.name]
    return rooms
