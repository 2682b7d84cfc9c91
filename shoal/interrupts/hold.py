"""Holds signal handlers back while the main thread is in a call of Shoal.

Python runs a signal's handler in the main thread, between two bytecodes of whatever runs there. An exception of the
handler then appears at that place: between a lock and its `try`, between a step of the optimizer and the tip that names
its result. No order of statements is safe at all of these places. So a call holds the handlers: while it is on, a
recorder stands in for each handler that is a Python function. The handlers run

- when the call ends;
- while the call waits (`shoal.interrupts.waiting`), so that Ctrl-C ends a wait at once;
- as soon as user's code runs within the call (`users_handlers`), as ever.

An exception of a handler that runs during a wait passes through Shoal's frames as an `Interrupted`, which no `except
Exception` or `except TimeoutError` takes for an error of the work. It comes out of the call as it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn, ParamSpec, TypeAlias, TypeVar

from shoal.interrupts._python import getsignal, set_handler, valid_signals

P = ParamSpec("P")
T = TypeVar("T")
Handler: TypeAlias = Callable[[int, FrameType | None], Any]

_SIGNALS: Final = tuple(sorted(map(int, valid_signals())))
_get_ident = threading.get_ident


PATIENCE_SECONDS = 30.0
"""How long a signal waits until the next one comes through at once, wherever the call is. Then the state may be torn,
but Ctrl-C ends a hook of the user that never returns."""


class Interrupted(BaseException):
    """A handler has raised an exception while this call was waiting. The call ends by that exception.

    Args:
        raised: the exception.
    """

    def __init__(self, raised: BaseException) -> None:
        super().__init__(raised)
        self.raised = raised


def raised_by(error: BaseException | None) -> BaseException | None:
    """The exception by which the call ends for its user, if `error` goes through it now."""
    return error.raised if isinstance(error, Interrupted) else error


class _Recorder:
    """Stands in for a handler. Without a hold, for example if one was left by an exception before all handlers were
    back in place, it calls the handler."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        hold = _process.hold
        if hold is None:
            self.handler(number, frame)
        elif hold.is_open or hold.is_stuck:
            hold.run(self.handler, number, frame)
        else:
            hold.since = hold.since or time.monotonic()
            hold.pending.append((self.handler, number, frame))


class _Process:
    """What the main thread of this process has to do with handlers.

    Attributes:
        main: the main thread, the only one in which handlers run.
        hold: the present hold; None outside, and while user's code runs.
        handlers: the handler of each signal, as last seen.
        recorders: (signal, handler, recorder) for those among them that are Python functions.
    """

    __slots__ = ("handlers", "hold", "main", "recorders")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.hold: _Hold | None = None
        self.handlers: list[Any] = []
        self.recorders: list[tuple[int, Handler, _Recorder]] = []

    def put_recorders(self) -> list[tuple[int, Handler, _Recorder]]:
        """Let recorders stand in for all handlers. Returns them."""
        handlers = list(map(getsignal, _SIGNALS))
        if handlers != self.handlers:
            found = [(number, one) for number, one in zip(_SIGNALS, handlers, strict=True) if callable(one)]
            # A recorder is found where an exception came before the handler was back in its place.
            pairs = [(number, one.handler if isinstance(one, _Recorder) else one) for number, one in found]
            self.recorders = [(number, handler, _Recorder(handler)) for number, handler in pairs]
            self.handlers = handlers
        recorders = self.recorders
        try:
            for number, _, recorder in recorders:
                set_handler(number, recorder)
        except BaseException:  # of a handler whose recorder has no hold yet
            _put_back(recorders)
            raise
        return recorders


def _put_back(recorders: list[tuple[int, Handler, _Recorder]]) -> None:
    """Put the handlers back, unless the user has set others meanwhile. They may run, and raise, from here on."""
    for number, handler, recorder in recorders:
        if getsignal(number) is recorder:
            set_handler(number, handler)


class _Hold:
    """A context of the main thread in which handlers wait, see `held`.

    Attributes:
        is_open: whether handlers run at once, because the call waits.
        is_unbroken: whether the waits of the call stay closed.
        pending: the signals that have arrived: handler, number and frame.
        since: when the first of them arrived; 0 before.
        recorders: what stands in for the handlers.
    """

    __slots__ = ("_raised", "is_open", "is_unbroken", "pending", "recorders", "since")

    def __init__(self) -> None:
        self.is_open = self.is_unbroken = False
        self.since = 0.0
        self.pending: list[tuple[Handler, int, FrameType | None]] = []
        self._raised: BaseException | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a signal has waited for so long that the next one does not."""
        return self.since > 0 and time.monotonic() - self.since > PATIENCE_SECONDS

    def __enter__(self) -> None:
        self.recorders = _process.put_recorders()
        _process.hold = self  # last: a handler that runs before leaves no hold behind

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        while self.pending:
            try:
                self.run(*self.pending.pop(0))
            except BaseException as raised:  # noqa: BLE001 (each pending handler runs; below, the last error is raised)
                self._raised = raised_by(raised)
        _process.hold = None
        try:
            _put_back(self.recorders)
        except BaseException:  # of a handler that was back in its place
            _put_back(self.recorders)
            raise
        if self._raised is not None:
            _raise_for(self._raised, error)

    def run(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Run a handler now. It is user's code: what it calls of Shoal has a hold of its own.

        Raises:
            Interrupted: if it raises.
        """
        was_open, self.is_open, _process.hold = self.is_open, False, None
        try:
            handler(number, frame)
        except BaseException as error:  # noqa: BLE001 (`__exit__` raises it)
            self._raised = error
            raise Interrupted(error) from None
        finally:
            self.recorders = _process.put_recorders()  # a call of Shoal in the handler has put handlers back
            _process.hold = self
        self.is_open = was_open

    def run_pending(self) -> None:
        """Run the handlers of all signals that have arrived. Raises `Interrupted` if one raises."""
        while self.pending:
            self.since = 0.0
            self.run(*self.pending.pop(0))


class _Nothing:
    """A context that does nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _UsersCode:
    """A context within a hold in which the handlers are in their places, see `users_handlers`."""

    __slots__ = ("_hold",)

    def __init__(self, hold: _Hold) -> None:
        self._hold = hold

    def __enter__(self) -> None:
        if not self._hold.is_unbroken:
            self._hold.run_pending()
        _process.hold = None
        _put_back(self._hold.recorders)

    def __exit__(self, *_: object) -> None:
        self._hold.recorders = _process.put_recorders()
        _process.hold = self._hold


class _Unbroken:
    """A context within a hold in which no wait is open, see `unbroken`."""

    __slots__ = ("_before", "_hold")

    def __init__(self, hold: _Hold) -> None:
        self._hold, self._before = hold, hold.is_unbroken

    def __enter__(self) -> None:
        self._hold.is_unbroken = True

    def __exit__(self, *_: object) -> None:
        self._hold.is_unbroken = self._before


_process = _Process()
_nothing = _Nothing()


def held() -> _Hold | _Nothing:
    """A context for a call of Shoal: until its end, signal handlers run only where it waits, or in user's code.

    In other threads, where no handler runs, and within another such context it does nothing.
    """
    return _Hold() if _process.hold is None and _get_ident() == _process.main else _nothing


def holding(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: the function is a call of Shoal, see `held`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with held():
            return function(*args, **kwargs)

    return call


def users_handlers() -> _UsersCode | _Nothing:
    """A context within `held` for user's code, which signal handlers interrupt as ever."""
    hold = present_hold()
    return _nothing if hold is None else _UsersCode(hold)


def unbroken() -> _Unbroken | _Nothing:
    """A context within `held` for work that belongs together, although some of it waits: handlers run after it."""
    hold = present_hold()
    return _nothing if hold is None else _Unbroken(hold)


def check() -> None:
    """Within `held`, run the handlers of all signals that have arrived. Raises `Interrupted` if one raises."""
    hold = present_hold()
    if hold is not None and not hold.is_unbroken:
        hold.run_pending()


def present_hold() -> _Hold | None:
    """The hold in which this thread is; None if it is in none."""
    hold = _process.hold
    return hold if hold is not None and _get_ident() == _process.main else None


def _raise_for(raised: BaseException, error: BaseException | None) -> NoReturn:
    """Raise what a handler has raised. Users know nothing of an `Interrupted`, which may be on its way as `error`."""
    context = error
    if isinstance(error, Interrupted):
        context = raised.__context__
        _show_where(raised, error)
    try:
        raise raised
    finally:
        raised.__context__ = context
        del raised, error, context  # a frame that is held by its own traceback would keep what it has


def _show_where(raised: BaseException, interrupted: Interrupted) -> None:
    """Let the traceback say where the call was waiting, as it would if the handler had not been held."""
    tail, frames = raised.__traceback__, []
    traceback: TracebackType | None = interrupted.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    for each in reversed(frames[:-1]):  # the last one is of `run`, with which the handler's own traceback begins
        tail = TracebackType(tail, each.tb_frame, each.tb_lasti, each.tb_lineno)
    raised.__traceback__ = tail


def _in_child() -> None:
    """The thread that has forked is the main thread of the child. The one that was in a call is not there."""
    hold, is_other = _process.hold, _process.main != _get_ident()
    _process.main = _get_ident()
    if is_other and hold is not None:
        _process.hold = None
        _put_back(hold.recorders)


os.register_at_fork(after_in_child=_in_child)
