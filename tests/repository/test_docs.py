"""The documentation holds: its Python runs, and every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUNNABLE = [page for page in PAGES if page.parent != ROOT and PYTHON.search(page.read_text())]
# `make test` runs the code of one.
EACH_RUN = [pytest.param(page, marks=[] if page.name == "swarm.md" else pytest.mark.long) for page in RUNNABLE]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", EACH_RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    program = "".join(PYTHON.findall(page.read_text()))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_that_its_code_is_one_script(page: Path) -> None:
    text = page.read_text()
    if len(PYTHON.findall(text)) > 1:
        assert "blocks of this page are one script" in text[: text.index("```python")]


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, len(PYTHON.findall((ROOT / "README.md").read_text()))))
def test_the_other_examples_run(number: int, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(PYTHON.findall((ROOT / "README.md").read_text())[number])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [sys.executable, *(torchrun if "init_process_group" in example.read_text() else []), str(example)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_example_trains_and_a_second_one_joins_it(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(PYTHON.findall((ROOT / "README.md").read_text())[0])
    command = [sys.executable, str(example)]
    first = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        address = first.stdout.readline().split()[-1]
        second = subprocess.run([*command, address], env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
        assert second.returncode == 0, second.stderr
        output, errors = first.communicate(timeout=200)
        assert first.returncode == 0, errors
    finally:
        first.kill()
        first.communicate()
    digests = [dict(re.findall(r"^epoch (\d+) digest (\w+)$", text, re.MULTILINE)) for text in (output, second.stdout)]
    both = digests[0].keys() & digests[1].keys()
    assert len(both) > 5, "they did not train together"
    assert all(digests[0][epoch] == digests[1][epoch] for epoch in both)
