"""Where there is no memory: a donor refuses, and a newcomer gives the download up."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import weakref
from typing import Any

import pytest
import torch

from shoal.compression import Float16Compression
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.transfer import transfer
from shoal.transfer.donor import StateDonor, encoded
from shoal.transfer.manifest import Manifest
from shoal.transfer.transfer import DownloadFailed, NoMemoryForState
from tests.transfer.test_transfer import NAME, assert_same, donate, donate_by, download, snapshot, swarm

TORCH = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
ERRORS = [
    RuntimeError(f"{TORCH} to allocate 9 bytes. Error code 12 (Cannot allocate memory)\nException raised from …"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("can't start new thread"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError(),
]


def fails(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_a_donor_without_memory_refuses_and_another_one_sends(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        newcomer, donors = await swarm(World(1), 2)
        StateDonor(donors[0], NAME, fails(error), lambda: snapshot().tip)
        donate(donors[1])
        result = await download(newcomer, donors)
        assert_same(result, snapshot())
        assert "there is no memory for a copy of this peer's state" in result.dropped[donors[0].peer_id]
        with pytest.raises(DownloadFailed, match="there is no memory for a copy of this peer's state") as failed:
            await download(newcomer, donors[:1])
        assert not isinstance(failed.value, NoMemoryForState), "it is not this peer that lacks memory"

    run(scenario())
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(caplog.records) == 2


def test_a_donor_with_memory_again_sends() -> None:
    async def scenario() -> None:
        newcomer, donors = await swarm(World(1), 1)
        errors: list[Exception] = [MemoryError()]

        async def take() -> Any:
            if errors:
                raise errors.pop()
            return encoded(snapshot())

        StateDonor(donors[0], NAME, take, lambda: snapshot().tip)
        with pytest.raises(DownloadFailed):
            await download(newcomer, donors)
        assert_same(await download(newcomer, donors), snapshot())

    run(scenario())


def check_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """The download fails at once, and not after the time without any progress; nothing is logged as a bug."""

    async def scenario() -> None:
        newcomer, donors = await swarm(World(1), 2)
        for donor in donors:
            donate(donor, snapshot(codec=Float16Compression()))
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoMemoryForState, match="there is no memory for"):
            await download(newcomer, donors)
        assert asyncio.get_running_loop().time() - began < 5

    run(scenario())
    assert not caplog.records


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_memory_that_ends_while_chunks_arrive(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Float16Compression, "decode", fails(error))
    check_given_up(caplog)


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_no_memory_for_the_state(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "empty", fails(error))
    check_given_up(caplog)


@pytest.mark.parametrize("what", ["id", "chunk_digests"])  # read when it arrives, and when it is chosen
def test_no_memory_for_the_manifest(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = encoded(snapshot()).manifest
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, what, property(fails(MemoryError())))

        async def scenario() -> None:
            newcomer, donors = await swarm(World(1), 1)
            donate_by(donors[0], manifest, fails(AssertionError("no chunk is asked for")))
            with pytest.raises(NoMemoryForState, match="there is no memory for"):
                await download(newcomer, donors)

        run(scenario())
    assert not caplog.records


def test_memory_that_ends_at_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(transfer, "bytes", fails(MemoryError()), raising=False)
    check_given_up(caplog)


def test_other_errors_of_a_donor_are_bugs(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        newcomer, donors = await swarm(World(1), 1)
        StateDonor(donors[0], NAME, fails(RuntimeError("size mismatch")), lambda: snapshot().tip)
        with pytest.raises(DownloadFailed, match="internal error"):
            await download(newcomer, donors)

    run(scenario())
    assert "size mismatch" in caplog.text


def test_the_memory_of_a_failed_download_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lives on, for example in a log, and holds nothing of what has arrived."""

    async def scenario() -> None:
        newcomer, donors = await swarm(World(1), 1)
        donate(donors[0])
        parts: list[weakref.ref[torch.Tensor]] = []

        def take(self: Any, *_: Any) -> None:
            parts.extend(map(weakref.ref, self.parts))
            raise MemoryError

        monkeypatch.setattr(transfer._Fetch, "take", take)
        with pytest.raises(NoMemoryForState):
            await download(newcomer, donors)
        await asyncio.sleep(1)  # the tasks that were cancelled end
        assert parts
        assert not [part for part in parts if part() is not None]

    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()
