"""Every code block of the documentation holds, as a reader would run it: each page from an empty folder."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.repository.blocks import PAGES, ROOT, Block, blocks_of, complaint, is_excerpt, script_of
from tests.repository.shell import Shell, check_extras, commands
from tests.soaked import only_in_soak

README = ROOT / "README.md"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runs(language: str) -> list[object]:
    """The pages with such blocks that run. `make test` runs those of one page."""
    pages = [page for page in PAGES if any(b.language == language and not b.reason for b in blocks_of(page))]
    pages = [page for page in pages if language != "python" or script_of(page)]
    marks = {"swarm.md": [], "index.md": [pytest.mark.long, only_in_soak]}  # the first example has a test of its own
    return [pytest.param(page, marks=marks.get(page.name, [pytest.mark.long]), id=name_of(page)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_checked_in_some_way(page: Path) -> None:
    for block in blocks_of(page):
        where = f"{name_of(page)}:{block.line}"
        assert (wrong := complaint(block)) is None, f"{where}: {wrong}"
        if block.language == "py" and not block.reason:
            hint = "make it a block of python, which runs, or take its lines from a file of examples/"
            assert is_excerpt(block.code), f"{where}: {hint}"
        if block.language in ("python", "py"):
            compile(block.code, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if block.language == "yaml":
            yaml.safe_load(block.code)


@pytest.mark.long
@pytest.mark.parametrize("page", runs("python"))
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script_of(page)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_says_that_its_python_is_one_script(page: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.language == "python" and not block.file and not block.reason]
    if len(blocks) > 1:
        hint = "say above the first block that 'the blocks of this page are one script'"
        assert "blocks of this page are one script" in page.read_text().split("```python")[0], hint


@pytest.mark.processes
@pytest.mark.parametrize("page", runs("sh"))
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        for block in blocks_of(page):
            if block.file:
                shell.save(block.file, block.code)
            elif block.language == "sh" and not block.reason:
                shell.run(block)


@pytest.mark.processes
@pytest.mark.long
def test_the_first_example_trains_and_a_second_peer_joins_it(tmp_path: Path) -> None:
    example = next(block for block in blocks_of(README) if block.language == "python")
    (tmp_path / example.file).write_text(example.code)
    command = [sys.executable, str(tmp_path / example.file)]
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
    digests = [
        dict(re.findall(r"^epoch (\d+): .* state (\w+)", text, re.MULTILINE)) for text in (output, second.stdout)
    ]
    both = digests[0].keys() & digests[1].keys()
    assert len(both) > 5, "they did not train together"
    assert all(digests[0][epoch] == digests[1][epoch] for epoch in both)


# -- the checks can fail


PAGE = """
Words.

```python
x = 1
```

<!-- file: mine.py -->
```python
print("mine")
```

1. In a list:

   <!-- not run: needs GPUs -->

   ```sh
   torchrun --nproc-per-node 8 mine.py
   ```

<!-- runs until it prints: ready -->
```sh title="a terminal"
python mine.py
```

```
drawn
```
"""


def test_blocks_are_found_with_what_the_page_says_of_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert blocks_of(page) == [
        Block("python", "x = 1\n", 4),
        Block("python", 'print("mine")\n', 9, file="mine.py"),
        Block("sh", "torchrun --nproc-per-node 8 mine.py\n", 17, reason="needs GPUs"),
        Block("sh", "python mine.py\n", 22, until="ready"),
        Block("", "drawn\n", 26),
    ]
    assert script_of(page) == "x = 1\n"
    assert [complaint(block) for block in blocks_of(page)] == [None] * 5


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (Block("rust", "", 1), "nothing checks a block of 'rust'"),
        (Block("sh", "", 1, reason="no time"), "no known reason"),
        (Block("text", "", 1, reason="needs GPUs"), "never runs"),
        (Block("sh", "", 1, file="a.py"), "only a block of python"),
        (Block("python", "", 1, until="epoch"), "only commands"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_writer_is_told_what_to_change(block: Block, says: str) -> None:
    assert says in (complaint(block) or "")


def test_an_excerpt_is_made_of_the_lines_of_a_file() -> None:
    first, second = "fully_shard(model, mesh=mesh)", "dht = shoal.DHT(initial_peers=given.initial_peers, start=True)"
    assert is_excerpt(f"{first}\n\n    {second}\n")
    assert not is_excerpt(f"{second}\n{first}\n")
    assert not is_excerpt("fully_shard(model)")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("false", "ends with 1"),
        ("python nowhere.py", "No such file"),
        ("shoal dance", "No such command"),
        ("shoal keys show lost@…", "nothing was printed that 'lost@…' may stand for"),
        ("pip install 'shoal[gold]'", "no extra 'gold'"),
        ("make gold", "No rule to make target"),
        ("echo 'a", "no whole command"),
    ],
)
def test_a_command_that_fails_is_shown(code: str, says: str, tmp_path: Path) -> None:
    with Shell(tmp_path) as shell, pytest.raises(AssertionError, match=says):
        shell.run(Block("sh", code, 1))


def test_commands_share_their_folder_their_variables_and_what_they_print(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        shell.save("words.txt", "run@abc\n")
        shell.run(Block("sh", "mkdir -p deep  # and in there\ncd deep\nexport WORD=here\ncat ../words.txt", 1))
        shell.run(Block("sh", 'test "$WORD" = here\n\ntest run@… = \\\n    run@abc\nls ../words.txt', 1))
        with pytest.raises(AssertionError, match="has not printed 'ready'"):
            shell.run(Block("sh", "echo steady", 1, until="ready"))
        shell.run(Block("sh", "bash -c 'echo ready; sleep 1000'", 1, until="ready"))


def test_an_address_of_the_documentation_becomes_that_of_a_node(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        shell.run(Block("sh", "echo /ip4/203.0.113.7/tcp/31337/p2p/bafzaajaiaejc… > address\ncat address", 1))
        address = (tmp_path / "here" / "address").read_text()
    assert re.fullmatch(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/bafz\w+\n", address)


def test_a_command_may_take_several_lines() -> None:
    code = "# first\nfor i in 1 2; do\n  echo $i\ndone\n\necho a \\\n  b  # both\n"
    assert commands(code) == ["for i in 1 2; do\n  echo $i\ndone", "echo a \\\n  b  # both"]


def test_extras_are_those_of_the_package() -> None:
    check_extras(["shoal[monitor,nat]", ".[demo]", "-e", "shoal", "tensorboard"])
