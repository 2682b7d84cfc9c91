"""Keeps the state that a peer has left for another line of states, so that nothing is lost when a run has forked."""

from __future__ import annotations

import logging
import os
import pickle  # only for its error: torch.load with weights_only unpickles nothing but tensors and plain data
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.compression import CodecPlan, CodecSpan, NoCompression
from shoal.membership.pin import Pin
from shoal.swarm.protocol.line import MAX_OFFERED, split
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Snapshot, encoded
from shoal.transfer.transfer import Downloaded

log = logging.getLogger(__name__)

FORMAT = 1
# The errors that torch and unpacking raise for a file of another kind.
_OTHER_FILES = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError)
SHARE_OF_MEMORY = 0.25  # the share of the free memory that a kept state may take


@dataclass(frozen=True, slots=True)
class Kept:
    """A state that a peer has left.

    Attributes:
        snapshot: an exact snapshot of the state.
        line: the lineages that lead to the state, its own last.
    """

    snapshot: Snapshot
    line: tuple[bytes, ...]

    def leads_to(self, pin: Pin) -> bool:
        """Whether this state is the pinned one, or follows from it and the pin does not rewind."""
        return self.snapshot.tip.lineage == pin.lineage or (not pin.rewind and pin.lineage in self.line)

    def as_downloaded(self, pin: int) -> Downloaded:
        """The state in the form that `Replica.load` takes, with `pin` as the number of its pin."""
        before, snapshot = self.snapshot.tip, self.snapshot
        tip = Tip(before.epoch, before.lineage, before.samples, pin)
        state = encoded(Snapshot(tip, snapshot.layout, snapshot.buffers, snapshot.scalars, snapshot.codecs))
        return Downloaded(
            state.manifest, list(snapshot.buffers), False, snapshot.scalars, {}, {}, 0, 0.0, self.line
        )  # fmt: skip


class Keeper:
    """Keeps one state: in a file if there is a folder, else in memory.

    Args:
        folder: the folder, which is made when it is needed; None for memory.
        me: this peer's key, of which a part is in the file's name.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, me: bytes) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        self._me = me.hex()[:16]
        self._kept: Kept | None = None

    def fits(self, nbytes: int) -> bool:
        """Whether a state of `nbytes` bytes can be kept."""
        return self._folder is not None or nbytes <= SHARE_OF_MEMORY * free_memory()

    def keep(self, kept: Kept) -> str:
        """Keep this state instead of the last one. Returns where it is, in words; a file's name is in quotes.

        Raises:
            OSError: if the file can't be written. Then the last state is still there.
        """
        if self._folder is None:
            self._kept = kept
            return "in this peer's memory"
        tip = kept.snapshot.tip
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"left-{self._me}-epoch{tip.epoch}-{tip.lineage.hex()[:16]}.pt"
        new = path.with_suffix(".new")
        try:
            torch.save(_to_plain(kept), new)
            os.replace(new, path)
        except RuntimeError as error:  # torch raises it if the disk is full
            new.unlink(missing_ok=True)
            raise OSError(f"{new} can't be written: {error}") from error
        for old in self._folder.glob(f"left-{self._me}-*.pt"):
            if old != path:
                old.unlink(missing_ok=True)
        return f"in {str(path)!r}"

    def find(self, pin: Pin) -> Kept | None:
        """The kept state, if `pin` allows it (see `Kept.leads_to`); else None."""
        if self._kept is not None:
            return self._kept if self._kept.leads_to(pin) else None
        for path in sorted(self._folder.glob(f"left-{self._me}-*.pt")) if self._folder is not None else ():
            try:
                kept = read_kept(path)
            except (OSError, ValueError) as error:
                log.warning("%s", error)
                continue
            if kept.leads_to(pin):
                return kept
        return None


def read_kept(path: str | os.PathLike[str]) -> Kept:
    """Read the state from a file that a `Keeper` has written.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is another kind of file.
    """
    try:
        plain = torch.load(path, weights_only=True)
        if plain["format"] != FORMAT:
            raise ValueError(f"it is of format {plain['format']}, and this version of Shoal reads {FORMAT}")
        epoch, lineage, samples, pin = plain["tip"]
        buffers = list(plain["buffers"])
        spans = (CodecSpan(index, 0, one.numel(), NoCompression()) for index, one in enumerate(buffers) if one.numel())
        codecs = CodecPlan(tuple(spans), len(buffers))
        snapshot = Snapshot(Tip(epoch, lineage, samples, pin), plain["layout"], buffers, plain["scalars"], codecs)
        return Kept(snapshot, split(plain["line"]))
    except OSError:
        raise
    except _OTHER_FILES as error:
        raise ValueError(f"{os.fspath(path)} is no state that a peer has left: {error}") from error


def _to_plain(kept: Kept) -> dict[str, Any]:
    snapshot, tip = kept.snapshot, kept.snapshot.tip
    return {
        "format": FORMAT,
        "tip": (tip.epoch, tip.lineage, tip.samples, tip.pin),
        "layout": snapshot.layout,
        "buffers": list(snapshot.buffers),
        "scalars": snapshot.scalars,
        "line": b"".join(kept.line[-MAX_OFFERED:]),
    }


def free_memory() -> int:
    """The memory that the kernel reports as available, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
