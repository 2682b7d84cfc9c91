"""The text that the demo learns: finds it, and splits it into a training part and a held-out part.

By default it is the source of Python's own standard library, which every machine that can run the demo has. Every peer
process reads it for itself. All use the same interpreter, so they get the same text in the same order.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MAX_CHARACTERS = 4_000_000
HELD_OUT_EVERY = 10
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextError(ValueError):
    """The text cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Text:
    """A training part and a held-out part that share no file (or, for a single file, no passage)."""

    train: str
    held_out: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """At most 256 characters, numbered in a stable order. All other characters become the unknown one, number 0."""

    characters: str

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """The 255 most frequent characters of ``text``, ties by code point, after the unknown one."""
        counts = Counter(text)
        counts.pop(_UNKNOWN, None)
        frequent = sorted(counts, key=lambda character: (-counts[character], character))[:255]
        return cls(_UNKNOWN + "".join(sorted(frequent)))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> bytes:
        """One byte per character of ``text``: the character's number."""
        numbers = {character: index for index, character in enumerate(self.characters)}
        table = {ord(character): numbers.get(character, 0) for character in set(text)}
        return text.translate(table).encode("latin-1")

    def decode(self, numbers: bytes) -> str:
        """The inverse of :meth:`encode`, except for unknown characters."""
        return "".join(self.characters[number] for number in numbers)


def standard_library_text(max_characters: int = DEFAULT_MAX_CHARACTERS) -> Text:
    """The standard library's ``.py`` files by sorted path, tests left out; each tenth file is held out.

    Stops before the file that would exceed ``max_characters``.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
    total = 0
    for index, path in enumerate(_source_files(root)):
        source = path.read_text(encoding="utf-8", errors="replace")
        total += len(source)
        if total > max_characters:
            break
        (held_out if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).append(source)
    return _checked(Text("".join(train), "".join(held_out)), root)


def file_text(path: Path, max_characters: int = DEFAULT_MAX_CHARACTERS) -> Text:
    """The first ``max_characters`` characters of a UTF-8 file; the last tenth of them is held out."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            content = file.read(max_characters)
    except OSError as error:
        raise TextError(f"the text {path} cannot be read: {error.strerror}; name a readable text file") from error
    cut = len(content) - len(content) // HELD_OUT_EVERY
    return _checked(Text(content[:cut], content[cut:]), path)


def _source_files(root: Path) -> list[Path]:
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(files) if not _SKIPPED_FOLDERS.intersection(path.parts)]


def _checked(text: Text, source: Path) -> Text:
    smallest = min(len(text.train) // (HELD_OUT_EVERY - 1), len(text.held_out))
    if smallest < 1_000:
        found = len(text.train) + len(text.held_out)
        raise TextError(f"{source} holds {found} characters, and the demo needs 20000 or more; choose a longer --data")
    return text
