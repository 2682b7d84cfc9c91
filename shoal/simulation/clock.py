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

# The peer whose work is being done. A task inherits it from its creator, and keeps it as `Task.owner`.
owner: ContextVar[object] = ContextVar("owner", default=None)


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, so the run can never end."""


class OutOfTime(RuntimeError):
    """The run has not ended when the virtual clock reached its bound."""


class Task(asyncio.Task[Any]):
    """A task of a `VirtualLoop`. Its hash is its number, not its address. So sets of tasks, over which asyncio and its
    users iterate, have the same order in every process."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        number: int,
        loop: VirtualLoop,
        name: str | None,
        context: Context | None,
    ) -> None:
        self.number = number  # before `super().__init__`, which puts the task in a set
        self.owner = owner.get()
        super().__init__(coroutine, loop=loop, name=name or f"task {number}", context=context)

    def __hash__(self) -> int:
        return self.number


class _NeverWaiting(selectors.SelectSelector):
    """A selector that never waits: it moves the loop's clock to the next timer instead. No file is ever ready."""

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
        self._held: dict[object, list[asyncio.Handle]] = {}  # owners that are held, each with its postponed callbacks
        super().__init__(_NeverWaiting(self._advance))
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        """Raises RuntimeError: a thread takes real time, and no seed decides when it ends."""
        raise RuntimeError(
            f"{func!r} was to run in a thread, which a simulation refuses: its result would depend on real time. "
            "Do the work on the loop, in pieces with `await asyncio.sleep(0)` between them if it is long."
        )

    def hold(self, whose: object) -> None:
        """Hold an owner: until `go_on`, its callbacks are postponed. Their order stays."""
        self._held.setdefault(whose, [])

    def go_on(self, whose: object) -> None:
        """Release an owner, and run its postponed callbacks. Does nothing if it is not held."""
        for handle in self._held.pop(whose, ()):
            self._ready.append(handle)  # type: ignore[attr-defined]

    def is_held(self, whose: object) -> bool:
        """Whether this owner is held."""
        return whose in self._held

    def unless_held(self, whose: object, callback: Callable[..., object], *args: Any) -> None:
        """Call a function now, or if this owner is held, when it is released."""
        if whose in self._held:
            self.call_soon(callback, *args)
        else:
            callback(*args)

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Like asyncio's, but postpones callbacks of an owner that is held."""
        handle = super().call_soon(callback, *args, context=context)
        if self._held:
            whose = owner.get() if context is None else context.get(owner)
            if whose in self._held:
                self._held[whose].append(self._ready.pop())  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Like asyncio's, but postpones callbacks of an owner that is held."""

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
        **_eager: Any,  # Python 3.14 also passes whether to start eagerly; tasks here never do
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
    """The innermost coroutine of Python code in which a task waits."""
    place = ""
    awaited: object = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        awaited = getattr(awaited, "cr_await", None)
    return place


def run(coroutine: Coroutine[Any, Any, T], *, until: float = 3600.0) -> T:
    """Run `coroutine` on a `VirtualLoop` of its own and return its result. All other tasks are cancelled when it ends.

    Args:
        coroutine: the coroutine to run.
        until: the bound of virtual time, in seconds.

    Raises:
        Deadlock: if it can never end. The message says which tasks wait where.
        OutOfTime: if it has not ended by `until`; with the same message.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(until)) as runner:
        try:
            return runner.run(coroutine)
        finally:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            for held in list(loop._held):
                loop.go_on(held)  # so that its tasks can be cancelled
