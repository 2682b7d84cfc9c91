"""Keeps the state that a peer has left for another line of states, so that nothing is lost when a run has forked."""

from __future__ import annotations

import errno
import logging
import os
import pickle  # only for its error: torch.load with weights_only unpickles nothing but tensors and plain data
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.compression import CodecPlan, CodecSpan, NoCompression
from shoal.flat.allocation import memory_for
from shoal.membership.pin import Pin
from shoal.swarm.protocol.line import MAX_OFFERED, split
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import FrozenState, encoded
from shoal.transfer.transfer import Downloaded, NoMemoryForState

log = logging.getLogger(__name__)

FORMAT = 1
# The errors that torch and unpacking raise for a file of another kind.
_OTHER_FILES = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError)
PIN = "and in a closed run `shoal keys pin` leads all back to it"
SHARE_OF_MEMORY = 0.25  # the share of the free memory that a kept state may take


@dataclass(frozen=True, slots=True)
class Kept:
    """A state that a peer has left.

    Attributes:
        snapshot: an exact snapshot of the state.
        line: the lineages that lead to the state, its own last.
    """

    snapshot: FrozenState
    line: tuple[bytes, ...]

    def leads_to(self, pin: Pin) -> bool:
        """Whether this state is the pinned one, or follows from it and the pin does not rewind."""
        return self.snapshot.tip.lineage == pin.lineage or (not pin.rewind and pin.lineage in self.line)

    def as_downloaded(self, pin: int) -> Downloaded:
        """The state in the form that `State.load` takes, with `pin` as the number of its pin.

        Raises:
            NoMemoryForState: if there is no memory for that.
        """
        before, snapshot = self.snapshot.tip, self.snapshot
        tip = Tip(before.epoch, before.lineage, before.samples, pin)
        with memory_for("the state that was kept", NoMemoryForState):
            state = encoded(FrozenState(tip, snapshot.layout, snapshot.buffers, snapshot.scalars, snapshot.codecs))
        return Downloaded(
            state.manifest, list(snapshot.buffers), False, snapshot.scalars, {}, {}, 0, 0.0, self.line
        )  # fmt: skip


class NotKept(Exception):
    """A state could not be kept. The message says why."""


class Keeper:
    """Keeps one state: in a file if there is a folder, else in memory. If a file can't be written, its state stays in
    memory, and the file of the state before stays, too.

    Args:
        folder: the folder, which is made when it is needed; None for memory.
        me: this peer's key, of which a part is in the file's name.

    Attributes:
        in_memory: the state that is kept in memory; None if there is none.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, me: bytes) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        self._me = me.hex()[:16]
        self.in_memory: Kept | None = None

    def fits(self, nbytes: int) -> bool:
        """Whether a state of `nbytes` bytes can be kept."""
        return self._folder is not None or nbytes <= SHARE_OF_MEMORY * free_memory()

    def keep_copy(self, nbytes: int, copy: Callable[[], Kept]) -> str:
        """Keep a state.

        Args:
            nbytes: about how large it is.
            copy: makes a copy of it.

        Returns:
            Where it is, and how to load it, in words; or why it is lost.
        """
        if not self.fits(nbytes):
            return (
                f"lost, for its {nbytes / 1e6:.0f} MB are more than a quarter of the memory that is free: give "
                "kept_state_dir= to keep such states on disk"
            )
        try:
            with memory_for("a copy of it", NotKept):
                return self.keep(copy())
        except (NotKept, ValueError) as error:
            return f"lost, since it could not be kept ({error})"

    def keep(self, kept: Kept) -> str:
        """Keep this state instead of the last one. Returns where it is, and how to load it, in words; a file's name is
        in quotes.

        Raises:
            NotKept: if the file can't be written, and the state takes too much memory to stay there. Then the last
                state is still kept.
        """
        why = ""
        if self._folder is not None:
            tip = kept.snapshot.tip
            path = self._folder / f"left-{self._me}-epoch{tip.epoch}-{tip.lineage.hex()[:16]}.pt"
            try:
                _write(kept, path)
            except OSError as error:
                # The state is in memory already. So it counts as free, as it did before it was copied.
                nbytes = sum(buffer.nbytes for buffer in kept.snapshot.buffers)
                why = f"{str(path)!r} could not be written: {error.strerror or error}"
                if nbytes > SHARE_OF_MEMORY * (free_memory() + nbytes):
                    raise NotKept(
                        f"{why}; and its {nbytes / 1e6:.0f} MB are more than a quarter of the memory that is free"
                    ) from error
            else:
                for old in self._files():
                    if old != path:
                        with suppress(OSError):
                            old.unlink()
                self.in_memory = None
                return f"in {str(path)!r} (Optimizer.load_kept_state(file) loads it, {PIN})"
        self.in_memory = kept
        because = f", because {why}" if why else ""
        return f"in this peer's memory until its process ends{because} (Optimizer.load_kept_state() loads it, {PIN})"

    def find(self, pin: Pin) -> Kept | None:
        """The kept state, if `pin` allows it (see `Kept.leads_to`); else None.

        Raises:
            NoMemoryForState: if there is no memory to read it.
        """
        if self.in_memory is not None and self.in_memory.leads_to(pin):
            return self.in_memory
        for path in self._files():
            try:
                kept = read_kept(path)
            except (OSError, ValueError) as error:
                log.warning("%s", error)
                continue
            if kept.leads_to(pin):
                return kept
        return None

    def _files(self) -> list[Path]:
        """The files of this peer's states; none if the folder can't be read."""
        with suppress(OSError):
            return [] if self._folder is None else sorted(self._folder.glob(f"left-{self._me}-*.pt"))
        return []


def _write(kept: Kept, path: Path) -> None:
    """Write a state to a file. A file of that name is replaced only when the new one is on the disk.

    Raises:
        OSError: if that fails. Then no part of a file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            torch.save(_to_plain(kept), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except RuntimeError as error:  # torch raises it from the error of the file
        raise (error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error))) from error
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def read_kept(path: str | os.PathLike[str]) -> Kept:
    """Read the state from a file that a `Keeper` has written.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is another kind of file.
        NoMemoryForState: if there is no memory to read it.
    """
    try:
        with memory_for(f"the state in {os.fspath(path)}", NoMemoryForState):
            plain = torch.load(path, weights_only=True)
        if plain["format"] != FORMAT:
            raise ValueError(f"it is of format {plain['format']}, and this version of Shoal reads {FORMAT}")
        epoch, lineage, samples, pin = plain["tip"]
        buffers = list(plain["buffers"])
        spans = (CodecSpan(index, 0, one.numel(), NoCompression()) for index, one in enumerate(buffers) if one.numel())
        codecs = CodecPlan(tuple(spans), len(buffers))
        snapshot = FrozenState(Tip(epoch, lineage, samples, pin), plain["layout"], buffers, plain["scalars"], codecs)
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
    """The memory that the kernel reports as available, in bytes; if it does not, the memory that nobody uses."""
    with suppress(OSError):  # also of too many open files, which may be why a state could not be written
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
