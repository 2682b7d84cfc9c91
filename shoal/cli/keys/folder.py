"""The folder in which an owner keeps the keys of closed runs, and the last revocations and pin of each. The files are
named by the run's id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from shoal.membership import ClosedRun, OwnerKey, Pin, Revocations
from shoal.membership.pin import PIN
from shoal.membership.revocations import REVOCATIONS
from shoal.membership.signed import Statement, StatementKind

S = TypeVar("S", bound=Statement)
DEFAULT_FOLDER = Path("~/.config/shoal/keys")


class Keys:
    """A folder with keys of closed runs. Every method raises OSError if a file can't be read or written, and ValueError
    if a file has other content than its name says.

    Args:
        folder: the folder. `make` creates it if it does not exist; then only its owner can read it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()

    def make(self, name: str) -> OwnerKey:
        """Make and save a new key. Raises FileExistsError if the folder has a run of that name already."""
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
        """The key of that run. Raises ValueError if it is not in the folder."""
        run = closed(run_id)
        path = self._key_file(run)
        if not path.exists():
            here = ", ".join(found.name.removesuffix(".key") for found in sorted(self.folder.glob("*.key")))
            raise ValueError(
                f"there is no {path}: this needs the run's key, which only its owner has; {self.folder} has the keys "
                f"of {here or 'no run'}"
            )
        return OwnerKey.load(path, run)

    def has(self, run: ClosedRun) -> bool:
        """Whether the key of that run is in the folder."""
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
    """The closed run with that id. Raises ValueError if it is no id of a closed run."""
    run = ClosedRun.of(run_id)
    if run is None or run.run_id != run_id:
        raise ValueError(f"{run_id!r} is no closed run: give its id, name@key, as `shoal keys run` has printed it")
    return run


def write_line(path: Path, line: str) -> None:
    """Write a file of one line atomically. It replaces an existing file."""
    new = path.with_name(path.name + ".new")
    new.write_text(line + "\n")
    os.replace(new, path)


def read_line(path: Path) -> str:
    """The text of a file, "" if there is none."""
    return path.read_text().strip() if path.exists() else ""


def _statement(path: Path, kind: StatementKind[S], run: ClosedRun) -> S | None:
    return kind.read(read_line(path), run) if path.exists() else None
