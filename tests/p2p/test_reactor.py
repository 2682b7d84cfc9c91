"""The reactor: one thread for all users in a process, gone with the last of them."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from shoal.p2p.reactor import SWITCH_INTERVAL, Reactor


def reactor_threads() -> int:
    return sum(thread.name == "shoal-reactor" for thread in threading.enumerate())


def test_users_share_one_thread_and_the_last_one_ends_it():
    first, second = Reactor.acquire(), Reactor.acquire()
    try:
        assert first is second
        assert reactor_threads() == 1
    finally:
        first.release()
    assert second.run(asyncio.sleep(0, "still running")) == "still running"
    second.release()
    assert reactor_threads() == 0
    third = Reactor.acquire()
    assert third is not first
    assert third.run(asyncio.sleep(0, "anew")) == "anew"
    third.release()
    assert reactor_threads() == 0


def test_the_switch_interval_is_short_while_there_is_a_reactor():
    before = sys.getswitchinterval()
    first, second = Reactor.acquire(), Reactor.acquire()
    try:
        assert sys.getswitchinterval() == pytest.approx(min(before, SWITCH_INTERVAL))
        first.release()
        assert sys.getswitchinterval() == pytest.approx(min(before, SWITCH_INTERVAL))
    finally:
        second.release()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_results_errors_and_cancellation_cross_over():
    async def fail():
        raise KeyError("here")

    reactor = Reactor.acquire()
    try:
        assert reactor.submit(asyncio.sleep(0, 7)).result(60) == 7
        with pytest.raises(KeyError, match="here"):
            reactor.run(fail())
        future = reactor.submit(asyncio.sleep(60))
        future.cancel()
        with pytest.raises(CancelledError):
            future.result(60)
    finally:
        reactor.release()


def test_waiting_on_its_own_thread_is_an_error_and_not_a_deadlock():
    reactor = Reactor.acquire()

    async def wait_for_itself():
        reactor.run(asyncio.sleep(0))

    try:
        with pytest.raises(RuntimeError, match="on the reactor's thread"):
            reactor.run(wait_for_itself())
    finally:
        reactor.release()


def test_what_still_runs_is_cancelled_at_the_end():
    before = threading.active_count()
    reactor = Reactor.acquire()
    cleaned = threading.Event()

    async def linger():
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    async def use_executor():
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)

    future = reactor.submit(linger())
    reactor.run(use_executor())
    reactor.release()
    assert cleaned.is_set()
    assert future.cancelled()
    assert threading.active_count() <= before


def test_it_is_alive_until_its_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.is_alive` of Python 3.11 says False of a living thread once a signal handler has raised within it."""
    reactor = Reactor.acquire()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "is_alive", lambda self: False)
        assert reactor.is_alive()
        second = Reactor.acquire()
        assert second is reactor
        assert reactor.run(asyncio.sleep(0, "runs")) == "runs"
    second.release()
    reactor.release()
    assert not reactor.is_alive()
