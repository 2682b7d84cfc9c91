"""Peers, and how they talk: identity, addresses, transport, typed messages. Imports no torch and no other room.

What this room promises to the rooms above it:

- A message that a handler sees came from the peer that is named with it (the transport proves it), was within its size
  bound, and was decoded and checked against its declared type. Nothing received is unpickled or evaluated.
- Every request ends: with a reply, with the reason of a refusal, with `PeerLost` as soon as the connection is gone, or
  with `TimeoutError` at its deadline.
- A lost peer is an event, told once, after everything that had already arrived from that peer was handled.
- A buffer handed to `send` without a name may be written again as soon as `send` returns; a named one when it has
  arrived, or `cancel` has returned.

It runs on one asyncio loop, the reactor's (`reactor.py`), or on the virtual clock of `shoal.simulation`.
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
    # Imported when it is used, as everything of Shoal.
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.p2p' has no attribute {name!r}")
    return getattr(import_module(f"shoal.p2p.{_HOMES[name]}"), name)
