"""The site of the documentation: every page is in it and can be found, and the built pages need no other host."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import shoal

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
REFERENCE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)

# Of these rooms the reference has all that they name.
ROOMS = (
    "averaging",
    "cluster",
    "compression",
    "dht",
    "functional",
    "membership",
    "monitor",
    "optim",
    "outer",
    "remote",
)
OF_TORCH = {"shoal.Joinable", "shoal.JoinHook"}
# Between rooms, and of no use to others.
INTERNAL = {
    f"shoal.compression.{name}"
    for name in ("CodecPlan", "CodecSpan", "PiecewiseCodec", "check_for_state", "codec_by_name", "compression_by_spec",
                 "plan_codecs", "plan_for")
} | {"shoal.outer.ExactSGD", "shoal.functional.State", "shoal.functional.register_functional_optim"}  # fmt: skip

# What a new user asks, and the heading that answers it.
QUESTIONS = {
    "How do I see that two machines train together?": "index.md#5-see-that-they-train-together",
    "My peers do not find each other. What is wrong?": "guides/home.md#when-peers-do-not-find-each-other",
    "What does this message mean?": "troubleshooting.md#troubleshooting",
    "In which order do I call to(), the optimizer, torch.compile and load_state_dict?": (
        "guides/script.md#the-order-of-calls"
    ),
    "What happens when a peer is killed?": "guides/peers.md#peers-come-and-go",
    "How many bytes and seconds does each mode cost?": "guides/modes.md#bytes",
    "How do I use several GPUs?": "guides/script.md#several-gpus",
    "How do I save, stop and resume?": "guides/checkpoints.md#save-and-load",
    "Can a hostile peer harm me?": "threat-model.md#what-holds-against-everybody",
    "I have a script with hivemind. What do I change?": "migrate/hivemind.md#optimizer",
    "Which port do I have to open?": "guides/home.md#the-ways-out-best-first",
    "Does my data leave my machine?": "faq.md#does-my-data-leave-my-machine",
    "Does each machine have to hold the whole model?": "faq.md#does-each-machine-have-to-hold-the-whole-model",
    "May peers have different versions?": "faq.md#may-peers-have-different-versions-of-shoal-or-torch",
    "How does a peer keep its address?": "faq.md#how-does-a-peer-keep-its-address",
    "How do all peers end at the same state?": "guides/peers.md#stop",
    "How much memory does it need?": "guides/modes.md#memory",
    "Do I have to divide the data?": "guides/script.md#data",
    "How do I change the learning rate of a running run?": "guides/equal.md#learning-rates-and-schedulers",
    "How do I put a peer out of the run?": "guides/closed-runs.md#revoking",
}


def tool(name: str) -> ModuleType:
    """A script of docs/tools."""
    specification = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def clicks_from_start() -> dict[Path, int]:
    """How many links lead from the start page to each page."""
    clicks, pending = {DOCS / "index.md": 0}, [DOCS / "index.md"]
    while pending:
        page = pending.pop(0)
        for link, _ in LINK.findall(page.read_text()):
            target = (page.parent / link).resolve()
            if target in PAGES and target not in clicks:
                clicks[target] = clicks[page] + 1
                pending.append(target)
    return clicks


def heading_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_troubleshooting_page_is_that_of_the_guides_tables() -> None:
    troubleshooting = tool("troubleshooting")
    assert troubleshooting.PAGE.read_text() == troubleshooting.make_page(), "run `make docs`, and commit what it made"


def test_tables_are_found_and_their_links_lead_on() -> None:
    troubleshooting = tool("troubleshooting")
    page = "# A\n\nIn the log:\n\n| message | meaning |\n|---|---|\n| `B` | see [c](c.md#d), [e](#f) |\n\n| x | y |\n"
    (table,) = troubleshooting.tables_of(page)
    assert table == "In the log:\n\n| message | meaning |\n|---|---|\n| `B` | see [c](c.md#d), [e](#f) |"
    led = troubleshooting.as_seen_from_docs(DOCS / "guides" / "a.md", table)
    assert "[c](guides/c.md#d), [e](guides/a.md#f)" in led


def test_every_page_is_in_the_navigation_once() -> None:
    listed = Counter(re.findall(r"[\w/-]+\.md", NAVIGATION))
    assert listed == Counter(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_page_is_found_within_three_clicks() -> None:
    clicks = clicks_from_start()
    assert not set(PAGES) - clicks.keys()
    assert max(clicks.values()) <= 3


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_within_three_clicks(question: str) -> None:
    name, _, anchor = QUESTIONS[question].partition("#")
    page = DOCS / name
    assert anchor in heading_anchors(page)
    assert clicks_from_start()[page] <= 2  # and one within the page


def test_the_reference_has_every_public_name_once() -> None:
    listed = Counter(name for page in (DOCS / "api").glob("*.md") for name in REFERENCE.findall(page.read_text()))
    assert set(listed.values()) == {1}

    def target(name: str) -> object:
        place, _, last = name.rpartition(".")
        return getattr(import_module(place), last)

    public = {f"shoal.{name}" for name in shoal.__all__ if name not in ("__version__", "compression", "outer")}
    for room in ROOMS:
        module = import_module(f"shoal.{room}")
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if isinstance(value, type) and not name.startswith("_")
        ]
        public |= {f"shoal.{room}.{name}" for name in names}
    found = {id(target(name)) for name in listed}
    missing = {name for name in public - OF_TORCH - INTERNAL if id(target(name)) not in found}
    assert not missing


@pytest.mark.long
def test_the_built_site_needs_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.glob("**/*.html"))
    assert len(pages) > len(PAGES)
    loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]*)")
    linked = re.compile(r"<a\b[^>]*?\bhref=\"([^\"#:]+)[\"#]")
    for page in pages:
        text = page.read_text()
        assert not loaded.findall(text), f"{page.name} loads something from another host"
        if page.name != "404.html":  # whose links are those of the server's root
            for link in linked.findall(text):
                assert (page.parent / link).exists(), f"{page.relative_to(tmp_path)}: {link} leads nowhere"
    for style in tmp_path.glob("assets/stylesheets/*.css"):
        assert not re.findall(r"url\(\"?https?:", style.read_text())
