"""The key of a run's owner: its file, and what it signs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from shoal.membership.membership import DAY, MAX_DAYS, MEMBERSHIP, Membership, Part
from shoal.membership.pin import PIN, Pin
from shoal.membership.revocations import REVOCATIONS, Revocations
from shoal.membership.run import ClosedRun
from shoal.p2p.identity import KEY_BYTES, Identity, PeerID


class OwnerKey:
    """The key pair of the owner of one closed run.

    Args:
        name: of the run.
        identity: the key pair; None draws a new one.

    Attributes:
        run: the closed run.
        identity: as given.

    Raises:
        ValueError: for a name that no run can have.
    """

    def __init__(self, name: str, identity: Identity | None = None) -> None:
        self.identity = Identity() if identity is None else identity
        self.run = ClosedRun.owned_by(name, self.identity.peer_id)

    def save(self, path: Path) -> None:
        """Write the secret to a new file that only its owner can read. Raises FileExistsError if there is one: a key is
        never overwritten."""
        secret = self.identity.secret.private_bytes_raw()
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(secret)

    @classmethod
    def load(cls, path: Path, run: ClosedRun) -> OwnerKey:
        """The key in that file. Raises ValueError if it is not that of the owner of `run`, OSError if it can't be
        read."""
        seed = path.read_bytes()
        if len(seed) != KEY_BYTES or Identity(seed).peer_id != run.owner:
            raise ValueError(f"{path} is not the key of {run.run_id!r}: name the file that `shoal keys run` has made")
        return cls(run.run_id.split("@")[0], Identity(seed))

    def admit(self, peer: PeerID, parts: Iterable[Part], days: float, now: float) -> str:
        """A membership of `peer` from `now` on, as a line of text.

        Raises:
            ValueError: for no part, and for a time that no membership lasts.
        """
        if not 0 < days <= MAX_DAYS:
            raise ValueError(f"a membership lasts more than 0 and at most {MAX_DAYS} days, not {days:g}")
        given = tuple(dict.fromkeys(parts))
        if not given:
            raise ValueError("a membership needs a part: train, client, auxiliary or watch")
        expires = max(int(now) + 1, int(now + days * DAY))
        serial = max(1, int(now * 1000))
        return MEMBERSHIP.sign(self.identity, Membership(self.run.run_id, peer.key, given, int(now), expires, serial))

    def revoke(self, peers: Iterable[PeerID], last: Revocations | None, now: float) -> str:
        """The list of revocations after `last` (the last one of the run, if there is one) with these peers on it."""
        keys = [peer.key for peer in peers]
        return REVOCATIONS.sign(self.identity, Revocations.after(last, self.run.run_id, keys, now))

    def pin(self, tip: str, last: Pin | None, now: float, *, rewind: bool = False) -> str:
        """The pin after `last` (the last one of the run, if there is one) of the state with that text form."""
        number = max(int(now), 1, 0 if last is None else last.number + 1)
        return PIN.sign(self.identity, Pin.of_text(self.run.run_id, number, tip, rewind=rewind))
