"""A virtual clock: an asyncio loop that never waits, because its time jumps to the next timer."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any, NoReturn, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SHOWN_TASKS = 16

# Whose work is being done; a task inherits it from whoever creates it, and keeps it as `Task.owner`.
owner: ContextVar[object] = ContextVar("owner", default=None)


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, so that what is being run can never end."""


class OutOfTime(RuntimeError):
    """What is being run has not ended when the virtual clock reached its bound."""


class Task(asyncio.Task[Any]):
    """A task of a `VirtualLoop`. Its hash is its number, not its address: sets of tasks then keep their order from one
    process to the next, and asyncio and its users do iterate over such sets."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        number: int,
        loop: VirtualLoop,
        name: str | None,
        context: Context | None,
    ) -> None:
        self.number = number  # first: creating a task puts it in a set
        self.owner = owner.get()
        super().__init__(coroutine, loop=loop, name=name or f"task {number}", context=context)

    def __hash__(self) -> int:
        return self.number


class _NeverWaiting(selectors.SelectSelector):
    """Where a loop would wait for the next timer, move its clock there. No file is ever ready."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time, which starts at 0. It has no threads and no sockets.

    Args:
        until: seconds of virtual time after which it raises `OutOfTime`.
    """

    def __init__(self, until: float = 3600.0) -> None:
        self._now = 0.0
        self._until = until
        self._numbers = itertools.count(1)
        self._held: dict[object, list[asyncio.Handle]] = {}  # who stands still, and what it is to do then
        super().__init__(_NeverWaiting(self._advance))
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused with RuntimeError: what a thread does takes real time, and no seed says when it ends."""
        raise RuntimeError(
            f"{func!r} was to run in a thread, which a simulation refuses: its result would depend on real time. "
            "Do the work on the loop, in pieces with `await asyncio.sleep(0)` between them if it is long."
        )

    def hold(self, whose: object) -> None:
        """Until `go_on`, nothing is done that belongs to this owner: it is done then, in the same order."""
        self._held.setdefault(whose, [])

    def go_on(self, whose: object) -> None:
        """Do what this owner could not do while it was held, if it was."""
        for handle in self._held.pop(whose, ()):
            self._ready.append(handle)  # type: ignore[attr-defined]

    def is_held(self, whose: object) -> bool:
        """Whether this owner stands still."""
        return whose in self._held

    def unless_held(self, whose: object, callback: Callable[..., object], *args: Any) -> None:
        """Call it now, or when this owner goes on."""
        if whose in self._held:
            self.call_soon(callback, *args)
        else:
            callback(*args)

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's; what belongs to an owner that is held waits for it."""
        handle = super().call_soon(callback, *args, context=context)
        if self._held:
            whose = owner.get() if context is None else context.get(owner)
            if whose in self._held:
                self._held[whose].append(self._ready.pop())  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's; what belongs to an owner that is held waits for it."""

        def due() -> None:
            if self._held and (whose := owner.get()) in self._held:
                self._held[whose].append(handle)
            else:
                callback(*args)

        handle = super().call_at(when, due, context=context)
        return handle

    def _make_task(
        self,
        _loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
        **_eager: Any,  # 3.14 also says whether to start eagerly: never
    ) -> Task:
        return Task(coroutine, number=next(self._numbers), loop=self, name=name, context=context)

    def _advance(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock(f"nothing is ready and no timer is set at {self._now:g} s.{self._waiting()}")
        if self._now + timeout > self._until:
            raise OutOfTime(f"not done after {self._until:g} s of virtual time.{self._waiting()}")
        self._now += timeout

    def _waiting(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"\n  {task.get_name()}: {_place(task)}" for task in tasks[:SHOWN_TASKS]]
        more = f"\n  and {len(tasks) - SHOWN_TASKS} more" if len(tasks) > SHOWN_TASKS else ""
        return " These tasks wait:" + "".join(lines) + more


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost place of our own at which a task waits."""
    place = ""
    awaited: object = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        awaited = getattr(awaited, "cr_await", None)
    return place


def run(coroutine: Coroutine[Any, Any, T], *, until: float = 3600.0) -> T:
    """Run `coroutine` on a `VirtualLoop` of its own and return its result; other tasks are cancelled when it ends.

    Args:
        until: bound on virtual time, in seconds.

    Raises `Deadlock` if it can never end, `OutOfTime` if it has not ended by `until`; both say which tasks wait where.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(until)) as runner:
        try:
            return runner.run(coroutine)
        finally:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            for held in list(loop._held):
                loop.go_on(held)  # so that its tasks can be cancelled
