"""What can be read from Shoal's source without running it: code lines, circles of imports, collaborators.

Used by `benchmarks.walk` and by tests/repository/test_structure.py.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grimp

PLAIN = frozenset(
    (
        "None",
        "Any",
        "object",
        "bool",
        "int",
        "float",
        "complex",
        "str",
        "bytes",
        "bytearray",
        "memoryview",
        "tuple",
        "list",
        "dict",
        "set",
        "frozenset",
        "slice",
        "range",
        "Sequence",
        "MutableSequence",
        "Iterable",
        "Iterator",
        "Collection",
        "Mapping",
        "MutableMapping",
        "Set",
        "Hashable",
        "Literal",
        "Optional",
        "Union",
        "Annotated",
        "Final",
        "Self",
        "Path",
        "Fraction",
        "Decimal",
        "deque",
        "Counter",
        "OrderedDict",
        "defaultdict",
        "Buffer",
        "Tensor",
        "Parameter",
        "Size",
        "dtype",
        "device",
        "Generator",
        "layout",
        "Exception",
        "BaseException",
    )
)
"""Names in an annotation that stand for values. A parameter whose annotation has any other name is a collaborator,
unless Shoal defines that name as an alias, an enum or an immutable record of values."""

NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


@dataclass(frozen=True)
class Constructor:
    """What one class is made with.

    Attributes:
        name: of the class, with its module.
        collaborators: the parameters that are objects with behaviour or callables.
        values: how many other parameters there are.
        public: whether `shoal` or the ``__init__`` of a room names the class in its ``__all__``.
    """

    name: str
    collaborators: tuple[str, ...]
    values: int
    public: bool


@dataclass(frozen=True)
class _Class:
    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module}.{self.node.name}"

    @property
    def bases(self) -> list[str]:
        return [name for base in self.node.bases for name in _names(base)]

    @property
    def is_dataclass(self) -> bool:
        return any("dataclass" in _names(decorator) for decorator in self.node.decorator_list)

    @property
    def is_frozen(self) -> bool:
        keywords = [k for d in self.node.decorator_list if isinstance(d, ast.Call) for k in d.keywords]
        return any(k.arg == "frozen" and ast.unparse(k.value) == "True" for k in [*keywords, *self.node.keywords])


def sources(package: Path) -> dict[str, Path]:
    """The files of a package by the full names of their modules."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(path: Path, package: Path) -> str:
    """The top folder that a file is in; "-" for the files of the package itself."""
    parts = path.relative_to(package).parts
    return parts[0] if len(parts) > 1 else "-"


def code_lines(path: Path) -> int:
    """The lines of a file that hold code: neither docstrings nor comments nor blank lines."""
    text = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def circles(package: str = "shoal") -> list[list[str]]:
    """The groups of modules that import each other, directly or through others. Imports under TYPE_CHECKING count.

    Args:
        package: an importable one.
    """
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    return [sorted(group) for group in _strongly_connected(imports) if len(group) > 1]


def _strongly_connected(edges: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in number:
                yield from visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            yield group

    for node in sorted(edges):
        if node not in number:
            yield from visit(node)


def constructors(package: Path) -> list[Constructor]:
    """Lists the constructors of all classes of a package, sorted by the number of collaborators, largest first."""
    trees = {module: ast.parse(path.read_text()) for module, path in sources(package).items()}
    judge = _Judge(trees)
    found = []
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own = _Class(module, node)
                parameters = judge.parameters(own)
                collaborators = tuple(
                    name for name, (where, what) in parameters.items() if not judge.is_value(where, what)
                )
                values = len(parameters) - len(collaborators)
                found.append(Constructor(own.name, collaborators, values, own.name in judge.public))
    return sorted(found, key=lambda constructor: (-len(constructor.collaborators), constructor.name))


_Annotation = tuple[str, ast.expr | None]
"""The module in which an annotation is written, and the annotation."""


def _exported(module: str, name: str, value: ast.expr) -> set[str]:
    """The full names that an assignment makes public: to ``__all__``, or to ``_HOMES``, which says where what is
    imported when it is used is defined."""
    if name == "__all__":
        return {f"{module}.{c.value!s}" for c in ast.walk(value) if isinstance(c, ast.Constant)}
    if name == "_HOMES":
        homes: dict[str, str] = ast.literal_eval(value)
        return {f"{home if '.' in home else f'{module}.{home}'}.{key}" for key, home in homes.items()}
    return set()


class _Judge:
    """Which annotations stand for values.

    Args:
        trees: the modules of the package by their full names.
    """

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._classes: dict[str, _Class] = {}
        self._aliases: dict[str, _Annotation] = {}
        self._imported: dict[str, str] = {}  # full names, as the importing module has them and as they are defined
        self._known: dict[str, bool] = {}
        exported: set[str] = set()
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._classes[f"{module}.{node.name}"] = _Class(module, node)
                elif isinstance(node, ast.ImportFrom) and node.module in trees:
                    for name in node.names:
                        self._imported[f"{module}.{name.asname or name.name}"] = f"{node.module}.{name.name}"
            for statement in tree.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    self._aliases[f"{module}.{statement.targets[0].id}"] = module, statement.value
                    exported |= _exported(module, statement.targets[0].id, statement.value)
        self.public = {self._defined(name) for name in exported}

    def _defined(self, name: str) -> str:
        """The full name of what a module has, where it is defined."""
        seen = set()
        while name in self._imported and name not in seen:  # a package may import its own module by name
            seen.add(name)
            name = self._imported[name]
        return name

    def parameters(self, of: _Class) -> dict[str, _Annotation]:
        """The parameters of a constructor without self."""
        for node in of.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = node.args
                given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
                return {argument.arg: (of.module, argument.annotation) for argument in given}
        found: dict[str, _Annotation] = {}
        for base in self._bases(of):
            found |= self.parameters(base)
        if of.is_dataclass or self._is_struct(of):
            for node in of.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    outside = {"ClassVar", "KW_ONLY"}.intersection(_names(node.annotation))
                    later = node.value is not None and "init=False" in ast.unparse(node.value)
                    if not outside and not later:
                        found[node.target.id] = of.module, node.annotation
        return found

    def _bases(self, of: _Class) -> list[_Class]:
        names = [self._defined(f"{of.module}.{base}") for base in of.bases]
        # Not itself: shoal.GradScaler is a torch.amp.GradScaler.
        return [self._classes[name] for name in names if name in self._classes and name != of.name]

    def _is_struct(self, of: _Class) -> bool:
        return "Struct" in of.bases or any(self._is_struct(base) for base in self._bases(of))

    def is_value(self, module: str, annotation: ast.expr | None) -> bool:
        """Whether an annotation in a module has only names of values in it; one that is missing has none."""
        return annotation is None or all(self._is_value_name(module, name) for name in _names(annotation))

    def _is_value_name(self, module: str, name: str) -> bool:
        full = self._defined(f"{module}.{name}")
        if full not in self._classes and full not in self._aliases:
            return name in PLAIN
        if full not in self._known:
            self._known[full] = True  # a record may hold others of its own class
            self._known[full] = self._decide(full)
        return self._known[full]

    def _decide(self, full: str) -> bool:
        if full in self._aliases:
            return self.is_value(*self._aliases[full])
        one = self._classes[full]
        if {"Enum", "IntEnum", "StrEnum", "Flag", "NamedTuple"}.intersection(one.bases):
            return True
        immutable = one.is_frozen or self._is_struct(one)
        return immutable and all(self.is_value(*annotation) for annotation in self.parameters(one).values())


def _names(expression: ast.expr) -> list[str]:
    """The last names of what an expression names: of ``torch.optim.Optimizer | None`` they are Optimizer and None."""
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        return [expression.attr]
    if isinstance(expression, ast.Constant):
        if isinstance(expression.value, str):
            try:
                return _names(ast.parse(expression.value, mode="eval").body)
            except SyntaxError:
                return []
        return []
    if isinstance(expression, ast.Subscript) and _names(expression.value) == ["Literal"]:
        return []
    if isinstance(expression, ast.Subscript) and _names(expression.value) == ["Annotated"]:
        return _names(expression.slice.elts[0]) if isinstance(expression.slice, ast.Tuple) else []
    children = [child for child in ast.iter_child_nodes(expression) if isinstance(child, ast.expr)]
    return [name for child in children for name in _names(child)]


def describe(package: Path) -> dict[str, Any]:
    """All of it as JSON can say it. The package must be what its name imports."""
    files = {str(path.relative_to(package)): code_lines(path) for path in sources(package).values()}
    return {
        "code_lines": files,
        "circles": circles(package.name),
        "constructors": [asdict(constructor) for constructor in constructors(package) if constructor.collaborators],
    }
