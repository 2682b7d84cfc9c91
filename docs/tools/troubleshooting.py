"""Makes `docs/troubleshooting.md` of the tables of messages in the guides: `python docs/tools/troubleshooting.py`.

The tables stand in the guides, where a test provokes each message. The page has them all, so that a message can be
found by pasting it into the browser's search. `make docs` makes the page anew, and a test compares it.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "troubleshooting.md"
# In the order of the page. A guide with such a table that is missing here is an error.
GUIDES = (
    "home", "relays", "peers", "equal", "optimizers", "options", "modes", "several-models", "checkpoints", "frameworks",
    "schedule-free", "closed-runs", "watching"
)  # fmt: skip
HEADS = ("message", "what is said", "it says of a peer")
LINK = re.compile(r"\]\(([^)\s]+)\)")

INTRODUCTION = """# Troubleshooting

<!-- Made by docs/tools/troubleshooting.py from the tables of the guides: change those, and run `make docs`. -->

Every message of Shoal that asks for something to be done, with its cause and the way out. Search this page for a few
words of your message. `…` stands for any text, and a letter such as `N` for any number or name.

- Peers do not meet: run `shoal doctor ADDRESS --run RUN`, and see [At home](guides/home.md).
- Something is slow: look at [where an epoch's time goes](guides/watching.md#where-an-epochs-time-goes).
- A mistake that you can mend raises an error. What goes wrong on the network does not: Shoal deals with it, and logs it
  under `shoal`.
- Nothing below fits: see [Questions and answers](faq.md).
"""


def tables_of(text: str) -> list[str]:
    """The tables of messages of a page, each with the line before it that says where they appear, if there is one."""
    found: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|") or line.strip("| ").split("|")[0].strip() not in HEADS:
            continue
        end = number
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        table = "\n".join(lines[number:end])
        before = lines[number - 2] if number > 1 else ""
        found.append(f"{before}\n\n{table}" if before == "In the log:" else table)
    return found


def as_seen_from_docs(guide: Path, text: str) -> str:
    """The same, with links that stand in `docs/`."""

    def lead(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        if "://" in path:
            return match[0]
        target = os.path.relpath((guide.parent / path) if path else guide, DOCS)
        return f"]({target}{'#' if anchor else ''}{anchor})"

    return LINK.sub(lead, text)


def title_of(text: str) -> str:
    """The first heading."""
    return text.splitlines()[0].removeprefix("# ")


def make_page() -> str:
    """The text of the page."""
    guides = sorted((DOCS / "guides").glob("*.md"))
    with_tables = {guide.stem for guide in guides if tables_of(guide.read_text())}
    if with_tables != set(GUIDES):
        raise SystemExit(f"GUIDES of docs/tools/troubleshooting.py needs {sorted(with_tables ^ set(GUIDES))}")
    parts = [INTRODUCTION]
    for name in GUIDES:
        guide = DOCS / "guides" / f"{name}.md"
        text = guide.read_text()
        parts.append(f"## {title_of(text)}\n\nThe guide: [{title_of(text)}](guides/{name}.md).\n")
        parts += [as_seen_from_docs(guide, table) + "\n" for table in tables_of(text)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(make_page())
