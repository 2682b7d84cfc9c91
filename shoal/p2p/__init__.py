"""Peers and their communication: identity, addresses, transport, typed messages. Imports no torch and no other room.

This room promises to the rooms above it:

- A message that a handler sees came from the peer that is named with it (the transport proves this), was within its
  size bound, and was decoded and checked against its declared type. Nothing received is unpickled or evaluated.
- Every request ends: with a reply, with the reason of a refusal, with `PeerLost` as soon as the connection is gone, or
  with `TimeoutError` at its deadline.
- The loss of a peer is reported once, after every message that had arrived from that peer was handled.
- A buffer given to `send` without a name may be written again as soon as `send` returns. A named buffer may be written
  again when it has arrived, or when `cancel` has returned.

It runs on one asyncio loop: the reactor's (`reactor.py`), or that of `shoal.simulation` with its virtual clock.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.p2p.identity import PeerID as PeerID
    from shoal.p2p.multiaddr import Multiaddr as Multiaddr

_HOMES = {"Multiaddr": "multiaddr", "PeerID": "identity"}
__all__ = ["Multiaddr", "PeerID"]


def __getattr__(name: str) -> Any:
    # Imported when first used, like all public names of Shoal.
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.p2p' has no attribute {name!r}")
    return getattr(import_module(f"shoal.p2p.{_HOMES[name]}"), name)
