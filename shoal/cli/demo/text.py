"""The text that the demo learns: finds it, and splits it into a training part and a held-out part.

By default it is the source of Python's own standard library, which every machine that can run the demo has. Every peer
process reads it for itself. All use the same interpreter, so they get the same text in the same order.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

MOST_CHARACTERS = 4_000_000
HELD_OUT_EVERY = 10
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class TextError(ValueError):
    """The text cannot be used; the message says why and what to do."""


class Text(NamedTuple):
    """A training part and a held-out part that share no file (or, for a single file, no passage)."""

    train: str
    held_out: str


def load_text(data: str | None = None, most: int = MOST_CHARACTERS) -> Text:
    """At most ``most`` characters of the UTF-8 file ``data``, or of the standard library's source.

    Of a file, the last tenth is held out; of the standard library (its ``.py`` files by sorted path, tests left out, up
    to the first that would be too much), each tenth file.
    """
    if data is None:
        source = Path(sysconfig.get_path("stdlib"))
        paths = sorted(path.relative_to(source) for path in source.rglob("*.py"))
        parts: tuple[list[str], list[str]] = ([], [])
        for index, path in enumerate(path for path in paths if not _SKIPPED.intersection(path.parts)):
            content = (source / path).read_text(encoding="utf-8", errors="replace")
            most -= len(content)
            if most < 0:
                break
            parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(content)
        text = Text(*map("".join, parts))
    else:
        source = Path(data)
        try:
            with source.open(encoding="utf-8", errors="replace") as file:
                content = file.read(most)
        except OSError as error:
            raise TextError(f"the text {source} cannot be read: {error.strerror}; name a readable text file") from error
        cut = len(content) - len(content) // HELD_OUT_EVERY
        text = Text(content[:cut], content[cut:])
    if min(len(text.train) // (HELD_OUT_EVERY - 1), len(text.held_out)) < 1_000:
        found = len(text.train) + len(text.held_out)
        raise TextError(f"{source} holds {found} characters, and the demo needs 20000 or more; choose a longer --data")
    return text
