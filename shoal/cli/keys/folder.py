"""Where an owner keeps the keys of closed runs, and the last words of each: one file each, by the run's id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from shoal.membership import ClosedRun, OwnerKey, Pin, Revocations
from shoal.membership.pin import PIN
from shoal.membership.revocations import REVOCATIONS
from shoal.membership.signed import Kind, Statement

S = TypeVar("S", bound=Statement)
DEFAULT_FOLDER = Path("~/.config/shoal/keys")


class Keys:
    """A folder of owners' keys. Every method raises OSError for files that can't be read or written, and ValueError for
    those that hold something else.

    Args:
        folder: made if it does not exist, readable by its owner only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()

    def make(self, name: str) -> OwnerKey:
        """A new key, saved. Raises FileExistsError rather than make a second run of that name here."""
        key = OwnerKey(name)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = sorted(self.folder.glob(f"{name}@*.key"))
        if present:
            raise FileExistsError(
                f"{self.folder} has the key of {present[0].name.removesuffix('.key')!r}: choose another name or folder"
            )
        key.save(self._key_file(key.run))
        return key

    def key_of(self, run_id: str) -> OwnerKey:
        """The key of that run."""
        run = closed(run_id)
        path = self._key_file(run)
        if not path.exists():
            here = ", ".join(found.name.removesuffix(".key") for found in sorted(self.folder.glob("*.key")))
            raise ValueError(
                f"there is no {path}: only who has the run's key can do this; {self.folder} has the keys of "
                f"{here or 'no run'}"
            )
        return OwnerKey.load(path, run)

    def has(self, run: ClosedRun) -> bool:
        """Whether the key of that run is here."""
        return self._key_file(run).exists()

    def revocations(self, run: ClosedRun) -> Revocations | None:
        """The last list of revocations that was signed here."""
        return _statement(self.revocations_file(run), REVOCATIONS, run)

    def pin(self, run: ClosedRun) -> Pin | None:
        """The last pin that was signed here."""
        return _statement(self.pin_file(run), PIN, run)

    def revocations_file(self, run: ClosedRun) -> Path:
        return self.folder / f"{run.run_id}.revocations"

    def pin_file(self, run: ClosedRun) -> Path:
        return self.folder / f"{run.run_id}.pin"

    def _key_file(self, run: ClosedRun) -> Path:
        return self.folder / f"{run.run_id}.key"


def closed(run_id: str) -> ClosedRun:
    """The closed run with that id. Raises ValueError if it is none."""
    run = ClosedRun.of(run_id)
    if run is None or run.run_id != run_id:
        raise ValueError(f"{run_id!r} is no closed run: give its id, name@key, as `shoal keys run` has printed it")
    return run


def write_line(path: Path, line: str) -> None:
    """Write a file of one line, in place of the one that is there, if any; never half of it."""
    new = path.with_name(path.name + ".new")
    new.write_text(line + "\n")
    os.replace(new, path)


def read_line(path: Path) -> str:
    """The text of a file, "" if there is none."""
    return path.read_text().strip() if path.exists() else ""


def _statement(path: Path, kind: Kind[S], run: ClosedRun) -> S | None:
    return kind.read(read_line(path), run) if path.exists() else None
