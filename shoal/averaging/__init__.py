"""Averaging a vector among the peers of a run, so that all of them end with the same bits. Leans on flat, compression,
p2p and dht.

What this room promises to `optim`:

- a round either commits, and then every member holds bit-identical results, or fails with an `AveragingError`, and then
  nothing that was given to it has changed;
- nothing is applied before COMMIT; what was handed in as input is only read;
- one lost peer, in any role and at any moment, costs the time to notice it and the chunks that only it had;
- a peer that breaks the rules is left out with a reason that it is told, and the round of the others goes on.

How to read it: `tip.py`, `member.py` and `messages.py` are the words; `membership.py`, `coordinator.py`,
`participant.py`, `rules.py`, `plan.py` and `book.py` decide (plain classes: events in, actions out, no I/O, no torch);
`swarm.py` and `coordination.py` drive them on a `shoal.p2p.Node`; `exchange.py` moves and sums the bytes;
`manifest.py`, `download.py` and `transfer.py` hand a whole state to a newcomer; `averager.py` and `control.py` are the
public face.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.averaging.averager import DecentralizedAverager as DecentralizedAverager
    from shoal.averaging.control import AveragingStage as AveragingStage
    from shoal.averaging.control import StepControl as StepControl
    from shoal.averaging.errors import AveragingError as AveragingError
    from shoal.averaging.load_balancing import load_balance_peers as load_balance_peers
    from shoal.averaging.member import Role as Role
    from shoal.averaging.report import RoundReport as RoundReport

_HOMES = {
    "AveragingError": "errors",
    "AveragingStage": "control",
    "DecentralizedAverager": "averager",
    "Role": "member",
    "RoundReport": "report",
    "StepControl": "control",
    "load_balance_peers": "load_balancing",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # Imported when it is used: the rest of this room needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.averaging' has no attribute {name!r}")
    return getattr(import_module(f"shoal.averaging.{_HOMES[name]}"), name)
