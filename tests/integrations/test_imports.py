"""Importing the room imports no framework, and a framework that is missing is named with its extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ["transformers", "lightning", "pytorch_lightning", "accelerate"]
EXTRAS = {"pytorch_lightning": "lightning"}


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.strip()


def test_importing_the_room_imports_no_framework() -> None:
    program = f"""
import sys, shoal.integrations
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""
    assert run(program) == "[]"


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_missing_framework_is_named_with_its_extra(framework: str) -> None:
    program = f"""
import sys, shoal
sys.modules[{framework!r}] = None
try:
    shoal.integrations.{framework}
except ImportError as error:
    print(error)
"""
    assert f"is missing, or too old: pip install 'shoal[{EXTRAS.get(framework, framework)}]'" in run(program)


def test_there_is_nothing_else_in_the_room() -> None:
    import shoal

    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = shoal.integrations.keras
