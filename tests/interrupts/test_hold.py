"""Signal handlers wait until a call of Shoal is whole, or until it waits. What they raise comes out as it is."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import pytest

from shoal.interrupts import check, finished, held, result_of, unbroken, users_handlers


class Late(TimeoutError):
    """What an alarm raises."""


Handler = Callable[[int, object], None]


@contextmanager
def handling(handler: Handler, number: int = signal.SIGUSR1) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


@pytest.fixture
def late() -> Iterator[Late]:
    """The exception that the handler of SIGUSR1 raises."""
    raised = Late("rung")

    def bell(number: int, frame: object) -> None:
        raise raised

    with handling(bell):
        yield raised


def ring(number: int = signal.SIGUSR1) -> None:
    os.kill(os.getpid(), number)


def ring_and_bring(future: Future[None]) -> None:
    ring()
    future.set_result(None)


def later(do: Callable[[], object], seconds: float = 0.05) -> threading.Timer:
    timer = threading.Timer(seconds, do)
    timer.start()
    return timer


def test_a_handler_waits_for_the_end_of_the_call(late: Late) -> None:
    done = []
    with pytest.raises(Late) as found, held():  # noqa: PT012
        ring()
        done.append("whole")
        with held():
            done.append("inner calls, too")
    assert done == ["whole", "inner calls, too"]
    assert found.value is late
    assert late.__context__ is None


def test_it_ends_a_wait_at_once_and_no_except_takes_it_for_an_error_of_the_work(late: Late) -> None:
    future: Future[None] = Future()
    timer = later(ring)
    with pytest.raises(Late) as found, held():  # noqa: PT012
        try:
            result_of(future, 60)
        except Exception as error:
            raise AssertionError("the wait itself has raised") from error
    timer.join()
    assert found.value is late
    assert future.cancelled()
    assert late.__context__ is None
    assert "result_of" in {frame.name for frame in traceback.extract_tb(late.__traceback__)}, "says where it waited"


def test_what_is_raised_is_not_lost_where_cleaning_up_raises(late: Late) -> None:
    timer = later(ring)
    with pytest.raises(Late) as found, held():  # noqa: PT012
        try:
            finished(Future(), 60)
        finally:
            raise ValueError("cleaning up")
    timer.join()
    assert found.value is late
    assert isinstance(late.__context__, ValueError)


@pytest.mark.parametrize("error", [KeyboardInterrupt("a"), SystemExit(3), ValueError("b"), OSError(5, "c")])
def test_an_error_of_the_work_stays_what_it_is(error: BaseException) -> None:
    future: Future[None] = Future()
    future.set_exception(error)
    with pytest.raises(type(error)) as found, held():
        result_of(future)
    assert found.value is error


def test_a_signal_from_before_the_wait_ends_it(late: Late) -> None:
    with pytest.raises(Late), held():  # noqa: PT012
        ring()
        finished(Future(), 60)
    with pytest.raises(Late), held():  # noqa: PT012
        ring()
        check()
        raise AssertionError("check has not raised")


def test_within_unbroken_work_the_waits_go_on(late: Late) -> None:
    future: Future[str] = Future()
    done = []
    timers = [later(ring), later(lambda: future.set_result("done"), 0.15)]
    with pytest.raises(Late), held(), unbroken():
        done.append(result_of(future))
    for timer in timers:
        timer.join()
    assert done == ["done"]


def test_users_code_is_interrupted_as_ever(late: Late) -> None:
    caught = []
    with held():
        with users_handlers():
            try:
                ring()
                time.sleep(60)
            except TimeoutError as error:
                caught.append(error)
        ring_inside: list[str] = []
        with pytest.raises(Late), users_handlers():  # noqa: PT012
            ring()
            time.sleep(60)
        ring_inside.append("held again")
    assert caught == [late]
    assert ring_inside == ["held again"]


def test_a_handler_that_raises_nothing_ends_no_wait() -> None:
    future: Future[str] = Future()
    rung: list[str] = []

    def bell(number: int, frame: object) -> None:
        with held():  # as optimizer.state_dict() in a handler
            rung.append(result_of(done))

    done: Future[str] = Future()
    done.set_result("called Shoal")
    timers = [later(ring), later(ring, 0.1), later(lambda: future.set_result("done"), 0.2)]
    with handling(bell), held():
        assert result_of(future) == "done"
    for timer in timers:
        timer.join()
    assert rung == ["called Shoal"] * 2


def test_the_thread_that_brings_the_result_never_hangs(late: Late) -> None:
    """`Future.result` left the lock of the future locked, if a handler raised in its last lines."""
    for _ in range(50):
        future: Future[None] = Future()
        timer = threading.Thread(target=ring_and_bring, args=(future,))
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(Late))
            with held():
                timer.start()
                finished(future, 60)
                timer.join()
        timer.join(10)
        assert not timer.is_alive()
        assert future.done()


def test_other_threads_and_a_handler_that_the_user_sets_meanwhile(late: Late) -> None:
    def other() -> None:
        with held(), unbroken(), users_handlers():
            check()
            assert not finished(Future(), 0.01)

    thread = threading.Thread(target=other)
    mine = signal.default_int_handler
    before = signal.getsignal(signal.SIGUSR2)
    with held():
        thread.start()
        thread.join()
        signal.signal(signal.SIGUSR2, mine)
        with users_handlers():
            assert signal.getsignal(signal.SIGUSR2) is mine
    assert signal.getsignal(signal.SIGUSR2) is mine
    signal.signal(signal.SIGUSR2, before)


def test_a_wait_ends_after_its_time() -> None:
    with held():
        assert not finished(Future(), 0.01)
        with pytest.raises(TimeoutError):
            result_of(Future(), 0.01)
        assert not finished(Future(), -1.0)


def test_work_that_never_ends_is_ended_by_another_signal(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.interrupts.hold.PATIENCE_SECONDS", 0.1)
    timers = [later(ring), later(ring, 0.1), later(ring, 0.3)]
    began = time.monotonic()
    with pytest.raises(Late), held():
        time.sleep(60)
    for timer in timers:
        timer.join()
    assert 0.25 < time.monotonic() - began < 30


def test_a_handler_that_calls_shoal_leaves_the_call_held(late: Late) -> None:
    """A handler for preemption saves: the signals after it are held as those before."""
    done = []

    def save(number: int, frame: object) -> None:
        with held():
            done.append("saved")

    with handling(save, signal.SIGUSR2), pytest.raises(Late), held():  # noqa: PT012
        future: Future[None] = Future()
        timer = later(lambda: ring(signal.SIGUSR2))
        later(lambda: future.set_result(None), 0.2)
        finished(future)
        timer.join()
        ring()
        done.append("whole")
    assert done == ["saved", "whole"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_another_thread_forks_in_a_call_has_its_handlers() -> None:
    statuses = []

    def leave(number: int, frame: object) -> None:
        os._exit(7)

    def fork() -> None:
        child = os.fork()
        if not child:
            ring()
            time.sleep(0.2)
            os._exit(1)
        statuses.append(os.waitpid(child, 0)[1])

    with handling(leave), held():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [7]
