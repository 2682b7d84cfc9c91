"""The bytes of a round, and the public averagers: the peers of a run average a vector, and all end with the same bits.
Depends on `flat`, `compression`, `swarm` and `transfer`.

What this room promises to `optim`:

- a round either commits, and then every member holds bit-identical results, or fails with an `AveragingError`, and then
  nothing that was given to it has changed;
- nothing is applied before COMMIT; what was handed in as input is only read;
- one lost peer, in any role and at any moment, costs the time to notice it and the chunks that only it had;
- a peer that breaks the rules is left out with a reason that it is told, and the round of the others goes on.

How to read it: `exchange.py` moves and sums the bytes of a round, `stepping.py` takes an averager's steps through
rounds, `averager.py` and `control.py` are the public classes. The protocol is in `shoal.swarm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.averaging.averager import DecentralizedAverager as DecentralizedAverager
    from shoal.averaging.control import AveragingStage as AveragingStage
    from shoal.averaging.control import StepControl as StepControl
    from shoal.averaging.report import RoundReport as RoundReport
    from shoal.swarm.protocol.errors import AveragingError as AveragingError
    from shoal.swarm.protocol.plan import load_balance_peers as load_balance_peers
    from shoal.swarm.protocol.view import Role as Role

_HOMES = {
    "AveragingError": "shoal.swarm.protocol.errors",
    "AveragingStage": "shoal.averaging.control",
    "DecentralizedAverager": "shoal.averaging.averager",
    "Role": "shoal.swarm.protocol.view",
    "RoundReport": "shoal.averaging.report",
    "StepControl": "shoal.averaging.control",
    "load_balance_peers": "shoal.swarm.protocol.plan",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # Imported when it is used: the rest of this room needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.averaging' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
