"""Only the files `_torch.py`, one in each room, use private names of torch, `_frameworks.py` those of other packages,
and `_python.py` those of Python; each lists the names that it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shoal

PACKAGE = Path(shoal.__file__).parent
FILES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
HOMES = [path for path in FILES if path.name in ("_torch.py", "_frameworks.py", "_python.py")]

OTHERS = {"os._exit", "sys._getframe"}
"""Private by their names, but documented, and not torch's."""

TORCH_ALSO = {"_version", "_base", "_parameters", "_buffers", "_step_count", "_unscale_grads_"}
"""Names of torch's that Shoal may use for its own attributes, too: of `self` they are Shoal's."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


@cache
def own_names() -> set[str]:
    """What Shoal itself defines under a private name, outside of these files."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)) if path not in HOMES else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def foreign(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines and the names in a file that are private and not Shoal's: attributes, imports, and names as text."""
    own = own_names()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            shared = node.attr in TORCH_ALSO and not is_of_self(node)
            if (node.attr not in own or shared) and ast.unparse(node) not in OTHERS:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.FunctionDef) and node.name in TORCH_ALSO:
            yield node.lineno, f"def {node.name}"
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("shoal"):
            parts = [*(node.module or "").split("."), *(name.name for name in node.names)]
            if any(map(is_private, parts)) and node.module != "__future__":
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            text = node.value
            if is_private(text) and not text.startswith("_shoal") and (text not in own or text in TORCH_ALSO):
                yield node.lineno, repr(text)


def test_no_other_file_reaches_for_a_private_name_of_torch() -> None:
    others = [path for path in FILES if path not in HOMES]
    found = [f"{path}:{line}: {name}" for path in others for line, name in foreign(tree_of(path))]
    assert found == [], "reach it through the room's _torch.py (or _frameworks.py), and say there what it is for"


ON_THE_WAY = {"_C", "_dynamo", "_state"}
"""Modules of torch in which a name is; the table has the whole path."""


def names_in(tree: ast.Module) -> set[str]:
    """The private names of torch that a `_torch.py` reaches for."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {name for name in found if is_private(name)} - ON_THE_WAY


@pytest.mark.parametrize("path", HOMES, ids=str)
def test_every_private_name_says_what_it_is_for(path: Path) -> None:
    """It has a row in the table: the names, what for, since which version of torch, what happens where it is
    missing."""
    rows = [line for line in (ast.get_docstring(tree_of(path)) or "").splitlines() if line.startswith("| ``")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4, row
        assert all(cells), row
    told = " ".join(row.split(" | ")[0] for row in rows)
    missing = {name for name in names_in(tree_of(path)) if name not in told}
    assert {name for name in missing if not (name.startswith("_foreach_") and "_foreach_*" in told)} == set()


def test_the_list_is_read_from_the_source() -> None:
    """That `foreign` finds what it is to find."""
    lines = [
        "from torch._C import x",
        "from torch.nn import _y",
        "torch._foreach_add_([a], 1)",
        "optimizer._opt_called = True",
        "vars(model)['_z']",
        "tensor._version",
    ]
    for line in lines:
        assert list(foreign(ast.parse(line))), line
    assert not list(foreign(ast.parse("import torch\nself._parameters = torch.add(a, b)")))
    assert list(foreign(ast.parse("model._parameters")))
