"""The public averagers, and the all-reduce of a round. The peers of a run average a vector, and all get the same bits.
Depends on `flat`, `compression`, `swarm` and `transfer`.

What this room promises to `optim`:

- A round either commits or fails. After a commit every member holds bit-identical results. A round that fails raises an
  `AveragingError` and leaves its inputs unchanged.
- Nothing is applied before COMMIT, and a round only reads its inputs.
- A lost peer, in any role and at any moment, costs the time to notice the loss and the chunks that only it had.
- A round excludes a peer that breaks the rules, tells it the reason, and continues with the others.

Where to find what: `averager.py` and `control.py` have the public classes. An averager has an engine (`engine.py`),
which is in the run and takes steps through rounds. `exchange.py` moves and sums the bytes of a round. `residual.py`
implements error feedback for lossy codecs. `runs.py` makes this peer's part in runs, and has those that an averager
joins for one round. `options.py` has the options that averagers compare when they meet. The protocol is in
`shoal.swarm`.
"""

from __future__ import annotations

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import AveragingStage, RoundReport, StepControl
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.plan import load_balance_peers
from shoal.swarm.protocol.view import Role

__all__ = [
    "AveragingError",
    "AveragingStage",
    "DecentralizedAverager",
    "Role",
    "RoundReport",
    "StepControl",
    "load_balance_peers",
]
