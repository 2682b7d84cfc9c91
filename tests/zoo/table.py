"""The table of the guide, of the outcomes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.zoo.outcome import Kind, Outcome

BEGIN = "<!-- make optimizers: from here -->"
END = "<!-- make optimizers: to here -->"
HEADS = {
    "alone": "alone",
    "newcomer": "newcomer",
    "diloco": "DiLoCo",
    "resume": "resume",
    "contiguous": "`ContiguousParams`",
    "zero": "ZeRO",
}
Found = Mapping[tuple[str, str], Outcome]


def counts(found: Found, worlds: Sequence[str]) -> str:
    """How many classes have which outcome, in each world."""
    lines = ["| outcome | " + " | ".join(HEADS[world] for world in worlds) + " |", "|---" * (len(worlds) + 1) + "|"]
    number = Counter((world, outcome.kind) for (_, world), outcome in found.items())
    for kind in Kind:
        cells = [str(number[world, kind] or "") for world in worlds]
        if any(cells):
            lines.append(f"| {kind.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(found: Found, names: Sequence[str], worlds: Sequence[str]) -> str:
    """A row for each class that was tried, and below it the reason for everything but `=`."""
    lines = ["| class | " + " | ".join(HEADS[world] for world in worlds) + " | |", "|---" * (len(worlds) + 2) + "|"]
    for name in names:
        row = [found.get((name, world)) for world in worlds]
        if any(row):
            cells = ["" if one is None else one.kind.value for one in row]
            lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {_reasons(row, worlds)} |")
    return "\n".join(lines)


def _reasons(row: Sequence[Outcome | None], worlds: Sequence[str]) -> str:
    """Each reason once, with the worlds that have it."""
    reasons: dict[str, list[str]] = {}
    for world, outcome in zip(worlds, row, strict=True):
        if outcome is not None and outcome.why and outcome.kind not in (Kind.EQUAL, Kind.CLOSE):
            reasons.setdefault(_short(outcome.why), []).append(HEADS[world])
    if len(reasons) == 1 and len(next(iter(reasons.values()))) == len([one for one in row if one]):
        return next(iter(reasons))
    return "; ".join(f"{', '.join(where)}: {why}" for why, where in reasons.items())


def _short(why: str) -> str:
    why = re.sub(r"0x[0-9a-f]+", "…", " ".join(why.split())).replace("|", "\\|")
    return why if len(why) <= 160 else why[:159] + "…"


def write(page: Path, block: str) -> None:
    """Put the block between the markers of a page.

    Raises:
        ValueError: if the page has no markers.
    """
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} has no two lines {BEGIN!r} and {END!r}")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{block}\n\n{END}{rest.split(END)[1]}")
