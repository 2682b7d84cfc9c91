"""One process of a peer that trains in a framework, as worker.py has them: a rank of the launcher that has started it,
or alone. It writes what worker.py says into a file `said RANK` of its folder.

Its argument is a JSON object, that of worker.py; beside it `initial_peers`, `ranks` (how many there are) and `fails`
([rank, epoch]: that rank raises an error when it comes to that epoch).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integrations import worker


class Failing(worker.Peer):
    """One whose data ends its training."""

    def note(self, model: torch.nn.Module) -> None:
        super().note(model)
        if self.options.get("fails") == [int(os.environ.get("RANK", "0")), max(self.digests, default=-1)]:
            raise KeyError("mine")


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    options: dict[str, Any] = json.loads(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    logging.getLogger("shoal").addHandler(logging.StreamHandler())
    with (Path(options["folder"]) / f"said {rank}").open("w") as file:
        worker.TO_TEST = file
        has_strands = options.get("strands", 1) > 1
        peer = Failing(options, has_dht=rank in options.get("with_dht", [0, 1] if has_strands else [0]))
        trained = getattr(worker, options["framework"])(peer)
        if peer.dht is not None:
            peer.dht.shutdown()
        worker.say(kind="done", **peer.noted(), **trained)


if __name__ == "__main__":
    main()
