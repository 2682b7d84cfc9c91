"""The id of a closed run, which names its owner: `name@<public key>`."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from shoal.p2p.identity import KEY_BYTES, PeerID

MAX_NAME = 47
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
_CLOSED = re.compile(rf"({_NAME.pattern})@([a-z2-7]{{52}})(?![A-Za-z0-9])")


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """A run that takes only the members that its owner admits.

    Attributes:
        run_id: `name@<public key of the owner in base32, 52 characters>`.
        owner: that key, as a peer id.
    """

    run_id: str
    owner: PeerID

    @classmethod
    def owned_by(cls, name: str, owner: PeerID) -> ClosedRun:
        """The closed run with that name and owner. Raises ValueError if no such run can have that name."""
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"a closed run can't be named {name!r}: give 1 to {MAX_NAME} letters, digits, '.', '_' and '-', the "
                "first of them a letter or a digit"
            )
        return cls(f"{name}@{base64.b32encode(owner.key).decode().lower().rstrip('=')}", owner)

    @classmethod
    def of(cls, run_id: str) -> ClosedRun | None:
        """The closed run to which a run id belongs: the run itself, or the run that contains it (as in `<run
        id>/grad`).

        Returns None for an open run, whose id has no `@`.

        Raises:
            ValueError: if there is an `@` without an owner's key after it. A typing mistake must not make a run open
                that was meant to be closed.
        """
        if "@" not in run_id:
            return None
        match = _CLOSED.match(run_id)
        if match is not None:
            key = base64.b32decode(match[2].upper() + "====")
            run = cls.owned_by(match[1], PeerID(key))
            if len(key) == KEY_BYTES and run_id.startswith(run.run_id):
                return run
        raise ValueError(
            f"run_id={run_id!r}: '@' stands before the 52 characters of its owner's key in the id of a closed run; "
            "give the id as `shoal keys run` has printed it, or, for an open run, one without '@'"
        )
