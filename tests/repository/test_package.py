"""What the package holds and says of itself, and what importing it does."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal
from shoal.p2p.release import RELEASE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]
ROOMS = sorted(path.parent for path in Path(shoal.__file__).parent.glob("*/__init__.py"))


def test_version_is_that_of_the_installed_package() -> None:
    assert shoal.__version__ == importlib.metadata.version("shoal")


def test_version_is_written_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert shoal.__version__ == RELEASE
    literal = re.compile(rf"""["']{re.escape(shoal.__version__)}["']""")
    found = [path for path in (ROOT / "shoal").rglob("*.py") if literal.search(path.read_text())]
    assert found == [ROOT / "shoal" / "__init__.py"]


def test_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == shoal.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_wheel_holds_the_library_and_no_more(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        metadata = next(file.read(name).decode() for name in file.namelist() if name.endswith(".dist-info/METADATA"))
    there = {path for path in (ROOT / "shoal").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {str(path.relative_to(ROOT)) for path in there}
    assert wheel.stat().st_size < 1 << 20
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", metadata)
    assert len(links) > 10
    assert [link for link in links if not "".join(link).startswith(("https://", "#"))] == []


@pytest.mark.long
def test_sdist_holds_what_a_developer_needs(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", ".ci/run", "examples/train.py"} < names
    assert "tests/repository/test_package.py" in names


def test_the_repository_has_one_address() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.yml"), ROOT / "pyproject.toml"]
    found = {url for path in files for url in re.findall(r"https://github\.com/[\w-]+/shoal\b", path.read_text())}
    assert found == {HOME}


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / path).read_text())


def test_workflow_runs_what_has_to_pass_and_every_python_that_is_named() -> None:
    workflow = load("workflows/ci.yml")
    everything, package = workflow["jobs"]["everything"], workflow["jobs"]["package"]
    assert any(".ci/run" in step.get("run", "") for step in everything["steps"])
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert package["strategy"]["matrix"]["python"] == named
    assert workflow["env"]["PIP_EXTRA_INDEX_URL"] == "https://download.pytorch.org/whl/cpu"


def test_workflow_names_tests_and_extras_that_exist() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    named = re.findall(r"\btests/[\w/.]+", text)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []
    extras = re.findall(r"\[([a-z,]+)\]\"", text)
    assert extras == ["monitor,nat"]
    assert set(extras[0].split(",")) <= set(PROJECT["optional-dependencies"])


def test_issue_templates_ask_for_what_helps() -> None:
    bug, feature = load("ISSUE_TEMPLATE/bug.yml"), load("ISSUE_TEMPLATE/feature.yml")
    needed = {field["id"] for field in bug["body"] if field.get("validations", {}).get("required")}
    assert needed == {"what", "doctor", "versions"}
    assert feature["name"]
    assert load("ISSUE_TEMPLATE/config.yml")["contact_links"]


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
from shoal.p2p.release import RELEASE
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
