"""Training scripts of Transformers, Lightning and Accelerate as peers of a run, by at most three changed lines.

What this room promises to its users:

- what the script says keeps its meaning: schedules, `max_steps` and clipping are those of one process whose batch is
  `target_batch_size`, whatever the number of peers and the speed of each;
- the peer leaves the run when training ends, also by an error;
- what does not work in a framework is refused, with the way out.

How to read it: `transformers.py`, `lightning.py`, `pytorch_lightning.py` and `accelerate.py` are one file for each
framework. Lightning's two packages share `strategies.py`. All share
`terms.py` (what the user gives, and what is refused), `ranks.py` (the processes that are one peer), `member.py` (the
optimizer of a peer in a framework's hands) and `samples.py` (how many samples are behind a step); `_frameworks.py` has
the private names of the frameworks. Importing this package imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "transformers")


def __getattr__(name: str) -> Any:
    if name not in _FRAMEWORKS:
        raise AttributeError(f"module 'shoal.integrations' has no attribute {name!r}")
    return import_module(f"shoal.integrations.{name}")
