"""What the ranks of a cluster exchange at one place of the code."""

from __future__ import annotations

from enum import Enum
from types import UnionType
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from shoal.cluster.ties import ClusterError

M = TypeVar("M")
T = TypeVar("T")


class _Nothing(Enum):
    NOTHING = "nothing"


Nothing: TypeAlias = Literal[_Nothing.NOTHING]
NOTHING: Final = _Nothing.NOTHING
"""What a rank brings to a decision that is rank 0's alone."""


class Question(Generic[M, T]):
    """What the ranks exchange at one place of the code. It is a constant of the module that uses it.

    >>> CLOSE = Question("close", bool, float)

    Args:
        name: its name, for errors.
        mine: the type of what each rank brings; `NoneType` if rank 0 decides alone.
        answer: the type of the answer. In `Team.all` it is the list of what all bring.
        may_wait: whether rank 0 sends the answer together with the next one, because each message wakes its receivers.
            Until then the others have nothing to do, and rank 0 makes no collectives.

    Attributes:
        name, may_wait: as given.
    """

    def __init__(
        self, name: str, mine: type[M] | UnionType, answer: type[T] | UnionType, *, may_wait: bool = False
    ) -> None:
        self.name, self.may_wait = name, may_wait
        self._mine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(mine)
        self._answer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(answer)

    def brought(self, data: bytes, name: str) -> M:
        """What the rank `name` has brought. Raises ClusterError if it has another type."""
        try:
            return cast(M, self._mine.decode(data))
        except msgspec.MsgspecError as error:
            raise ClusterError(f"{name} has brought to {self.name!r} what does not belong there: {error}") from error

    def answered(self, data: bytes) -> T:
        """The answer of rank 0."""
        return cast(T, self._answer.decode(data))
