"""A state that can't be written to its folder stays in memory, if there is room, and the log says where it is."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.membership.pin import Pin
from shoal.optim import kept
from shoal.optim.kept import Keeper, Kept, NotKept, read_kept
from tests.optim.conftest import Alone
from tests.optim.models import flat, make_model
from tests.optim.test_no_memory import found, train

ME = bytes(32)


def trained(alone: Alone, epochs: int, width: int = 20, **given: Any) -> tuple[nn.Module, shoal.Optimizer]:
    model = make_model(width=width)
    made = alone(model, target_batch_size=64, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), **given)
    for epoch in range(epochs):
        train(model, made, epoch)
    return model, made


def pin_of(state: Kept) -> Pin:
    return Pin("x", 5, 1, 1.0, state.line[-1], True)


Broken = Callable[[Path], Any]


@contextmanager
def no_space(_: Path) -> Iterator[str]:
    """Files end at 20 kB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield os.strerror(errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def fails_with(number: int, call: str) -> Iterator[str]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, fail)
        yield os.strerror(number)


@contextmanager
def a_file_in_its_place(folder: Path) -> Iterator[str]:
    away = folder.with_name("away")
    if folder.exists():
        folder.rename(away)
    folder.touch()
    yield os.strerror(errno.EEXIST)
    folder.unlink()
    if away.exists():
        away.rename(folder)


BROKEN: dict[str, Broken] = {
    "no space": no_space,
    "no space at the end": lambda _: fails_with(errno.ENOSPC, "os.fsync"),
    "a quota": lambda _: fails_with(errno.EDQUOT, "os.fsync"),
    "read-only": lambda _: fails_with(errno.EROFS, "pathlib.Path.mkdir"),
    "no right to write": lambda _: fails_with(errno.EACCES, "pathlib.Path.open"),
    "no right to replace": lambda _: fails_with(errno.EPERM, "pathlib.Path.replace"),
    "a file": a_file_in_its_place,
}


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("kind", BROKEN)
def test_it_stays_in_memory_and_a_file_from_before_on_the_disk(
    alone: Alone, tmp_path: Path, kind: str, earlier: bool
) -> None:
    folder = tmp_path / "kept"
    keeper = Keeper(folder, ME)
    model, made = trained(alone, 1, width=100)
    before = made._state.exact_copy()
    files = []
    if earlier:
        keeper.keep(before)
        files = list(folder.iterdir())
    train(model, made, 1)
    state = made._state.exact_copy()
    with BROKEN[kind](folder) as why:
        said = keeper.keep(state)
    assert "in this peer's memory until its process ends, because" in said
    assert f"{str(folder)!r}"[:-1] in said
    assert f"could not be written: {why} (Optimizer.load_kept_state() loads it" in said
    assert "(file)" not in said
    assert (list(folder.iterdir()) if folder.exists() else []) == files, "no part of a file is left"
    assert keeper.find(pin_of(state)) is state
    assert (keeper.find(pin_of(before)) is not None) == earlier
    for file in files:
        assert read_kept(file).line == before.line
    assert "load_kept_state(file)" in keeper.keep(state), "there is room again"
    assert keeper.in_memory is None
    (file,) = folder.iterdir()
    assert read_kept(file).line == state.line


def test_it_is_lost_if_it_is_more_than_a_quarter_of_what_is_free(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = trained(alone, 1, width=100)
    state = made._state.exact_copy()
    nbytes = sum(buffer.nbytes for buffer in state.snapshot.buffers)
    keeper = Keeper(tmp_path, ME)
    with no_space(tmp_path):
        monkeypatch.setattr(kept, "free_memory", lambda: 3 * nbytes - 4)
        with pytest.raises(
            NotKept, match=r"could not be written: File too large; and its 0 MB are more than a quarter"
        ):
            keeper.keep(state)
        assert keeper.find(pin_of(state)) is None
        monkeypatch.setattr(kept, "free_memory", lambda: 3 * nbytes)  # its own memory was free, too
        assert "in this peer's memory" in keeper.keep(state)
    assert not list(tmp_path.iterdir())


def test_the_log_says_where_it_is_and_the_user_gets_it_back(
    alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, giver = trained(alone, 4)
    model, made = trained(alone, 2, width=20, kept_state_dir=tmp_path / "kept")
    tip, mine = made.tip, flat(model).clone()
    others = found(made, giver._state.exact_copy(), keeps=True)
    with a_file_in_its_place(tmp_path / "kept"):
        assert made.load_state_from_peers()
    others.undo()
    assert made.tip == giver.tip
    (said,) = [record.getMessage() for record in caplog.records if "has left its state" in record.getMessage()]
    assert "is in this peer's memory until its process ends, because" in said
    assert "could not be written: File exists (Optimizer.load_kept_state() loads it" in said
    made.load_kept_state()
    assert made.tip == tip
    assert torch.equal(flat(model), mine)


def test_without_a_state_in_memory_the_file_is_asked_for(alone: Alone) -> None:
    _, made = trained(alone, 1)
    with pytest.raises(ValueError, match="this peer has kept no state in its memory: give the file"):
        made.load_kept_state()


def test_what_is_lost_has_no_way_back(alone: Alone, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    _, giver = trained(alone, 4)
    _, made = trained(alone, 2)
    monkeypatch.setattr(kept, "free_memory", lambda: 0)
    found(made, giver._state.exact_copy(), keeps=True)
    assert made.load_state_from_peers()
    (said,) = [record.getMessage() for record in caplog.records if "has left its state" in record.getMessage()]
    assert "is lost, for its" in said
    assert "load_kept_state" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk of its own size")
def test_a_disk_that_is_full(alone: Alone, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "shoal", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.decode().strip()}")
    try:
        _, made = trained(alone, 1, width=200)
        keeper, state = Keeper(tmp_path / "kept", ME), made._state.exact_copy()
        assert "could not be written: No space left on device (Optimizer.load_kept_state()" in keeper.keep(state)
        assert keeper.in_memory is state
        assert not list((tmp_path / "kept").iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)
