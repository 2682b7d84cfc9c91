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
`manifest.py`, `download.py` and `transfer.py` hand a whole state to a newcomer; `averager.py` is the public face.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.averaging.averager import DecentralizedAverager as DecentralizedAverager

__all__ = ["DecentralizedAverager"]


def __getattr__(name: str) -> Any:
    # Imported when it is used: the rest of this room needs no torch.
    if name == "DecentralizedAverager":
        from shoal.averaging.averager import DecentralizedAverager

        return DecentralizedAverager
    raise AttributeError(f"module 'shoal.averaging' has no attribute {name!r}")
