"""Three optimizers: one that trains, one that ends its process and one that hangs. Says what came of them, as JSON."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, for a second or more

from tests.zoo import cases
from tests.zoo.classes import Entry
from tests.zoo.outcome import Outcome


class Ending(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        os._exit(3)


class Hanging(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        threading.Event().wait()


if __name__ == "__main__":
    entries = [Entry(kind.__name__, kind, {"lr": 0.1}) for kind in (torch.optim.SGD, Ending, Hanging)]
    found: dict[str, Outcome] = {}
    for seconds, some in ((60.0, entries[:2]), (2.0, entries[2:])):
        cases.SECONDS = seconds  # type: ignore[misc]
        found |= {entry.name: outcome for entry, _, outcome in cases.run([(one, "contiguous") for one in some], 2)}
    print(json.dumps({name: [outcome.kind.name, outcome.why] for name, outcome in found.items()}), flush=True)
