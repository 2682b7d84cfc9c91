"""Every link of the documentation leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repository.blocks import PAGES, ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


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
