"""Who decides: the ranks of a cluster, which make the same calls and share the decisions of rank 0."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

M = TypeVar("M")
T = TypeVar("T")


@dataclass(frozen=True)
class Asked(Generic[M, T]):
    name: str
    mine: Any
    answer: Any
    raises: tuple[type[Exception], ...] = ()


class Team(ABC):
    rank: int
    size: int
    names: list[str]

    @abstractmethod
    def call(self, name: str) -> contextlib.AbstractContextManager[None]: ...
    @abstractmethod
    def all(self, asked: Asked[Any, Any], mine: Any) -> list[Any]: ...
    @abstractmethod
    def decided(
        self,
        asked: Asked[M, T],
        decide: Callable[[list[M]], T],
        mine: M | None = None,
        then: Callable[[T], object] = lambda answer: None,
    ) -> T: ...
    @abstractmethod
    def at_first(self, make: Callable[[], T]) -> T: ...
    @abstractmethod
    def said(self, rank: int, why: str) -> str: ...
    @abstractmethod
    def ends(self, make: Callable[[], Future[None]]) -> contextlib.AbstractContextManager[Future[None]]: ...


class Alone(Team):
    rank, size, names = 0, 1, ["this process"]

    def call(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def all(self, asked: Asked[Any, Any], mine: Any) -> list[Any]:
        return [mine]

    def decided(self, asked, decide, mine=None, then=None):  # type: ignore[no-untyped-def]
        return decide([mine])

    def at_first(self, make: Callable[[], T]) -> T:
        return make()

    def said(self, rank: int, why: str) -> str:
        return why

    @contextlib.contextmanager
    def ends(self, make: Callable[[], Future[None]]) -> Iterator[Future[None]]:
        future = make()
        try:
            yield future
        finally:
            future.cancel()
