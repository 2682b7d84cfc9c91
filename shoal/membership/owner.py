"""The key of a run's owner: its file, and the statements that it signs."""

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
        name: the run's name.
        identity: the key pair; None makes a new one.

    Attributes:
        run: the closed run.
        identity: the key pair.

    Raises:
        ValueError: if no run can have that name.
    """

    def __init__(self, name: str, identity: Identity | None = None) -> None:
        self.identity = Identity() if identity is None else identity
        self.run = ClosedRun.owned_by(name, self.identity.peer_id)

    def save(self, path: Path) -> None:
        """Write the secret key to a new file that only its owner can read.

        Args:
            path: the file to create.

        Raises:
            FileExistsError: if the file exists: a key is never overwritten.
        """
        secret = self.identity.secret.private_bytes_raw()
        with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(secret)

    @classmethod
    def load(cls, path: Path, run: ClosedRun) -> OwnerKey:
        """Read the key of the owner of `run` from a file.

        Args:
            path: the file that `save` has written.
            run: the closed run.

        Raises:
            ValueError: if it is not that owner's key.
            OSError: if the file can't be read.
        """
        seed = path.read_bytes()
        if len(seed) != KEY_BYTES or Identity(seed).peer_id != run.owner:
            raise ValueError(f"{path} is not the key of {run.run_id!r}: name the file that `shoal keys run` has made")
        return cls(run.run_id.split("@")[0], Identity(seed))

    def admit(self, peer: PeerID, parts: Iterable[Part], days: float, now: float) -> str:
        """A membership of `peer` from `now` on, as a line of text.

        Args:
            peer: the peer to admit.
            parts: the parts that it may take.
            days: the days until the membership expires, at most 366.
            now: the time, in seconds since 1970.

        Raises:
            ValueError: if there is no part, or if no membership can last that long.
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
        """The next list of revocations, with these peers added, as a line of text.

        Args:
            peers: the peers whose memberships end.
            last: the last list of the run; None if there is none.
            now: the time, in seconds since 1970.

        Raises:
            ValueError: if the list is full.
        """
        keys = [peer.key for peer in peers]
        return REVOCATIONS.sign(self.identity, Revocations.after(last, self.run.run_id, keys, now))

    def pin(self, tip: str, last: Pin | None, now: float, *, rewind: bool = False) -> str:
        """The next pin of the run, as a line of text.

        Args:
            tip: the text form of the state to follow.
            last: the last pin of the run; None if there is none.
            now: the time, in seconds since 1970.
            rewind: see `Pin`.

        Raises:
            ValueError: if `tip` is no tip.
        """
        number = max(int(now), 1, 0 if last is None else last.number + 1)
        return PIN.sign(self.identity, Pin.of_text(self.run.run_id, number, tip, rewind=rewind))
