"""The error tables of the guides, and the registry of functions that provoke what they promise.

A table whose first column is headed "message" lists messages, each as code. In them `…`, and letters such as N that
stand alone, are for any text. In a table that goes on with "what to do" they are errors that are raised, in one that
goes on with "meaning" lines of the log. The functions in `tests/repository/provocations` register what they provoke.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.p2p.errors import P2PError
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
CODE = re.compile(r"`([^`]+)`")
PLACEHOLDER = re.compile(r"…|\b[A-Z]\b")

RAISED = (ValueError, TypeError, RuntimeError, OSError, P2PError, shoal.AveragingError)
"""What the errors of the tables are; an AssertionError is none."""


@dataclass(frozen=True)
class Promise:
    """A message of an error table: the page, whether it is logged (else raised), and the message as it stands there."""

    page: str
    logged: bool
    message: str

    @property
    def pattern(self) -> str:
        """A regular expression for what it may be in fact."""
        parts = [re.escape(part) for part in PLACEHOLDER.split(self.message)]
        return ".+".join(part for part in parts if part)


def promises_of(page: str, text: str) -> list[Promise]:
    """All messages in the error tables of a page."""
    found: list[Promise] = []
    logged: bool | None = None  # outside of such a table: None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            logged = None
        elif cells[0] == "message":
            logged = cells[1] == "meaning"
        elif logged is not None and not set(line) <= set("|-: "):
            messages = CODE.findall(cells[0])
            assert messages, f"{page}: a row without a message: {line}"
            found += [Promise(page, logged, message) for message in messages]
    return found


def promises() -> list[Promise]:
    """Those of all guides."""
    return [promise for path in sorted(GUIDES.glob("*.md")) for promise in promises_of(path.name, path.read_text())]


@dataclass
class Scene:
    """Where a message is provoked: a DHT that runs, an empty folder, and what is ended afterwards."""

    dht: shoal.DHT
    folder: Path
    log: pytest.LogCaptureFixture
    ends: ExitStack = field(default_factory=ExitStack)

    @property
    def run_id(self) -> str:
        """That of the optimizers that are made here; the folder is another one for each scene."""
        return self.folder.name[:80]

    def another_dht(self, **arguments: Any) -> shoal.DHT:
        """A peer more of the same DHT."""
        return self.ends.enter_context(shoal.DHT(self.dht.get_visible_maddrs(), start=True, **arguments))

    def optimizer(self, dht: shoal.DHT | None = None, **arguments: Any) -> shoal.Optimizer:
        """A peer of the run, whose model has gradients."""
        model = make_model()
        backward(model, *fixed_batch(0))
        given = {"target_batch_size": 64, "params": model.parameters(), "optimizer": OPTIMIZERS["sgd"], **arguments}
        given.setdefault("run_id", self.run_id)
        made = shoal.Optimizer(dht=dht or self.dht, **given)
        self.ends.callback(made.shutdown)
        return made


Provocation = Callable[[Scene], str]
"""Returns the text of the error that was raised, or nothing where the message is logged."""

PROVOCATIONS: dict[str, Provocation] = {}


def provokes(*messages: str) -> Callable[[Callable[[Scene], str | None]], Callable[[Scene], str | None]]:
    """Registers a function as that which provokes these messages of the error tables, all in one call."""

    def register(function: Callable[[Scene], str | None]) -> Callable[[Scene], str | None]:
        for message in messages:
            assert message not in PROVOCATIONS, f"{message!r} is provoked already"
            PROVOCATIONS[message] = lambda scene: function(scene) or ""
        return function

    return register


def raised(action: Callable[[], object]) -> str:
    """The text of the error that it raises."""
    with pytest.raises(RAISED) as caught:
        action()
    return str(caught.value)
