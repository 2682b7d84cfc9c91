"""What importing the package does, and what it must not do."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOMS = sorted(path.parent for path in Path(shoal.__file__).parent.glob("*/__init__.py"))


def test_version_is_that_of_the_installed_package() -> None:
    assert shoal.__version__ == importlib.metadata.version("shoal")


def test_package_says_that_it_is_typed() -> None:
    assert Path(shoal.__file__).with_name("py.typed").is_file()


def test_import_starts_nothing() -> None:
    program = """
import os, sys
def seen():
    threads = os.listdir("/proc/self/task")
    children = [open(f"/proc/self/task/{thread}/children").read() for thread in threads]
    sockets = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
               and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")]
    return len(threads), children, sockets
before = seen()
import shoal
print(before == seen(), [name for name in ("ssl", "cryptography", "asyncio", "multiprocessing") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert result.stdout.strip() == "True []"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_room_says_what_it_promises(room: Path) -> None:
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text()))


@pytest.mark.parametrize("room", ["averaging", "optim", "p2p"])
def test_what_a_room_names_is_what_the_package_names(room: str) -> None:
    module = importlib.import_module(f"shoal.{room}")
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is getattr(shoal, name, getattr(module, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing
