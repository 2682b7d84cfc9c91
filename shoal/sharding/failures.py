"""Which rank is to blame when communication fails, and how the other ranks learn of it.

A missing message names the rank that should have sent it. But that rank may itself have waited for another one, or may
have raised an error that only it knows. So a rank that fails first leaves a note in the process group's store. A rank
that fails because of it passes on the text of the note. All this happens within the timeout of the process group: a
closed connection is noticed at once, a silent rank after the timeout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shoal.sharding._torch import store_of

_NOTE_BYTES = 2000


class RankLost(RuntimeError):
    """A message from or to rank ``rank`` of the process group did not get through; None if the rank is not known."""

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class Failures:
    """The notes of one process group.

    Args:
        group: the process group.
        rank: this process's rank in it.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._store = store_of(group)
        self._ranks = group.size()
        self._rank = rank
        self._noted = False

    @contextmanager
    def named(self, doing: str) -> Iterator[None]:
        """Runs a block that communicates, and turns its failures into errors that name the rank.

        Args:
            doing: what the block does, for the message.

        Raises:
            RuntimeError: if a rank was lost. The message names it, and gives its note if it left one. Every other error
                passes through, after this rank has left a note for the others.
        """
        if self._noted:  # the caller has gone on after an error
            self._store.delete_key(self._key(self._rank))
            self._noted = False
        try:
            yield
        except RankLost as error:
            rank, why = self._culprit(error)
            self._leave_note(rank, why)
            name = "another rank" if rank is None else f"rank {rank}"
            raise RuntimeError(f"{name} failed while rank {self._rank} was {doing}: {why}") from error
        except Exception as error:
            self._leave_note(self._rank, f"it raised {type(error).__name__}: {error}")
            raise

    def _culprit(self, error: RankLost) -> tuple[int | None, str]:
        suspects = range(self._ranks) if error.rank is None else (error.rank,)
        for suspect in suspects:
            if suspect != self._rank and (note := self._read_note(suspect)):
                return note
        return error.rank, str(error)

    def _leave_note(self, rank: int | None, why: str) -> None:
        try:
            self._store.set(self._key(self._rank), json.dumps([rank, why[:_NOTE_BYTES]]))
            self._noted = True
        except RuntimeError:  # the store died with the rank that held it; the error is raised anyway
            return

    def _read_note(self, rank: int) -> tuple[int | None, str] | None:
        key = self._key(rank)
        try:
            if not self._store.check([key]):
                return None
            blamed, why = json.loads(self._store.get(key))
        except (RuntimeError, ValueError):
            return None
        return (blamed if isinstance(blamed, int) else None), str(why)[:_NOTE_BYTES]

    @staticmethod
    def _key(rank: int) -> str:
        return f"shoal/failed/{rank}"
