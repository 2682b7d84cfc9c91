"""The code blocks of a page of the documentation, and what the page says of how each is checked.

Each language is checked in one way:

| language | how |
|---|---|
| `python` | all blocks of a page are one script, which runs in an empty folder |
| `sh` | the commands run one after the other, as `tests/repository/shell.py` says |
| `py` | the lines are an excerpt of a file in `examples/` |
| `yaml` | the block is read as YAML |
| `text`, or none | is no code: output, a drawing, a sketch |

A comment of HTML on the line above a block, which readers do not see, changes that:

| comment | the block |
|---|---|
| `<!-- file: NAME -->` | is saved as that file, and is not part of the page's script; commands of the page use it |
| `<!-- runs until it prints: TEXT -->` | has commands that go on: each is left running once it has printed that text |
| `<!-- not run: REASON -->` | does not run; the reason is one of `REASONS` |
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]
LANGUAGES = ("python", "sh", "py", "yaml", "text", "")
REASONS = (
    "needs the internet",
    "needs several machines",
    "needs GPUs",
    "needs root",
    "needs a home router",
    "takes many minutes",
    "is a part of a command",
    "is a part of your script",
)
_BLOCK = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^ *\2`*[ ]*$", re.DOTALL | re.MULTILINE)
_NOTE = re.compile(r"<!-- *(file|runs until it prints|not run): *(.*?) *-->\s*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """A code block.

    Attributes:
        language: the first word after the fence.
        code: without its indentation.
        line: of the page, where it begins.
        file: the name under which it is saved; "" if it is not.
        until: what its commands print, each of which goes on then; "" if they end.
        reason: why it does not run; "" if it does.
    """

    language: str
    code: str
    line: int
    file: str = ""
    until: str = ""
    reason: str = ""


def blocks_of(page: Path) -> list[Block]:
    """All code blocks of a page."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        words = match[3].split()
        note = _NOTE.search(text[: match.start()])
        notes = {} if note is None else {note[1]: note[2]}
        found.append(
            Block(
                language=words[0] if words else "",
                code=textwrap.dedent(match[4]),
                line=text.count("\n", 0, match.start()) + 1,
                file=notes.get("file", ""),
                until=notes.get("runs until it prints", ""),
                reason=notes.get("not run", ""),
            )
        )
    return found


def complaint(block: Block) -> str | None:
    """What the page's writer has to change, if the block can't be checked as it stands; None if it can."""
    if block.language not in LANGUAGES:
        return f"nothing checks a block of {block.language!r}: use one of {', '.join(filter(None, LANGUAGES))}"
    if block.reason and block.reason not in REASONS:
        return f"'not run: {block.reason}' is no known reason. The known ones are: {'; '.join(REASONS)}"
    if block.reason and block.language in ("text", ""):
        return "a block of text never runs: leave the comment 'not run' out"
    if block.file and block.language != "python":
        return "only a block of python can be saved as a file"
    if block.until and block.language != "sh":
        return "only commands (sh) go on until they are stopped"
    return None


def script_of(page: Path) -> str:
    """The page's Python that is not saved as a file, from top to bottom."""
    return "".join(
        block.code for block in blocks_of(page) if block.language == "python" and not block.file and not block.reason
    )


def is_excerpt(code: str) -> bool:
    """Whether a file of `examples/` has these lines in this order, at whatever indentation, with or without others
    between them."""
    return any(_holds(path.read_text(), code) for path in ROOT.glob("examples/**/*.py"))


def _holds(text: str, code: str) -> bool:
    lines = iter([line.strip() for line in text.splitlines()])
    return all(wanted.strip() in lines for wanted in code.splitlines() if wanted.strip())
