"""The bytes of a round, and the public averagers: the peers of a run average a vector, and all end with the same bits.
Depends on `flat`, `compression`, `swarm` and `transfer`.

What this room promises to `optim`:

- a round either commits, and then every member holds bit-identical results, or fails with an `AveragingError`, and then
  nothing that was given to it has changed;
- nothing is applied before COMMIT, and inputs are only read;
- one lost peer, in any role and at any moment, costs the time to notice it and the chunks that only it had;
- a peer that breaks the rules is left out and told the reason, and the round of the others continues.

How to read it: `exchange.py` moves and sums the bytes of a round, and `residual.py` keeps what lossy codecs have lost
of them; `averager.py` and `control.py` are the public classes; `runs.py` has the runs that an averager joins for one
round, and `options.py` what averagers compare when they meet. The protocol is in `shoal.swarm`.
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
