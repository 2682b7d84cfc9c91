"""Detects two processes that use one identity."""

from __future__ import annotations

import logging

from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)

MAX_TWINS = 1024
_WAY_OUT = (
    ". Give each process an identity of its own: end one of the two, delete its copy of the identity file or give it "
    "another identity_path, and start it again"
)
_OWN = (
    "another process uses the identity of this one, peer %s (is it a copied home folder?), and every other peer talks "
    "to one of the two only" + _WAY_OUT
)
_OTHERS = (
    "two processes use the identity of peer %s (is it a copied home folder?), and this peer talks to the one that it "
    "met first" + _WAY_OUT
)


class Twins:
    """The identities that two processes are known to use. A warning is logged once for each.

    Args:
        me: the identity of this process.
    """

    def __init__(self, me: PeerID) -> None:
        self._me = me
        self._found: set[PeerID] = set()

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._found

    def found(self, peer: PeerID) -> None:
        """Two living processes use the identity `peer`: log a warning, once."""
        if peer in self._found or len(self._found) >= MAX_TWINS:
            return
        self._found.add(peer)
        log.warning(_OWN if peer == self._me else _OTHERS, peer)
