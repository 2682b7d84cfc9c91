"""A state that is left is kept as it was, in memory or in a file, and can be continued from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shoal
from shoal.membership.pin import Pin
from shoal.optim import kept
from shoal.optim.kept import Keeper, read_kept
from tests.optim.conftest import Alone
from tests.optim.models import backward, fixed_batch, flat, make_model

ME = bytes(32)


def trained(alone: Alone, epochs: int) -> tuple[torch.nn.Module, shoal.Optimizer]:
    model = make_model()
    made = alone(
        model, run_id="kept", target_batch_size=64, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )  # fmt: skip
    for epoch in range(epochs):
        backward(model, *fixed_batch(epoch))
        made.step(batch_size=64)
        made.zero_grad()
    return model, made


def pin_of(state: kept.Kept, *, rewind: bool = False, back: int = 1) -> Pin:
    return Pin("x", 5, 1, 1.0, state.line[-back], rewind)


def test_a_file_brings_back_all_of_a_state(alone: Alone, tmp_path: Path) -> None:
    model, made = trained(alone, 3)
    keeper, other = Keeper(tmp_path / "new", ME), Keeper(tmp_path / "new", b"\1" * 32)
    assert not (tmp_path / "new").exists()
    other.keep(made._state.exact_copy())
    keeper.keep(made._state.exact_copy())
    saved, tip = flat(model).clone(), made.tip
    for epoch in range(3, 5):
        backward(model, *fixed_batch(epoch))
        made.step(batch_size=64)
        made.zero_grad()
    after = flat(model).clone()
    where = keeper.keep(made._state.exact_copy())
    assert len(list((tmp_path / "new").iterdir())) == 2, "one for each peer"
    assert str(tmp_path / "new") in where
    (path,) = (tmp_path / "new").glob("left-0101*.pt")
    made.load_kept_state(path)
    assert made.tip == tip
    assert torch.equal(flat(model), saved)
    assert made.param_groups[0]["lr"] == pytest.approx(0.001)
    for epoch in range(3, 5):
        backward(model, *fixed_batch(epoch))
        made.step(batch_size=64)
        made.zero_grad()
    assert torch.equal(flat(model), after), "it goes on as it did the first time"


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_kept_is_found_by_a_pin(alone: Alone, tmp_path: Path, on_disk: bool) -> None:
    _, made = trained(alone, 3)
    copy = made._state.exact_copy()
    keeper = Keeper(tmp_path if on_disk else None, ME)
    assert keeper.find(pin_of(copy)) is None
    keeper.keep(copy)
    for rewind in (False, True):
        found = keeper.find(pin_of(copy, rewind=rewind))
        assert found is not None
        assert found.line == copy.line
        assert found.as_downloaded(5).manifest.tip.pin == 5
    assert keeper.find(pin_of(copy, back=2)) is not None
    assert keeper.find(pin_of(copy, back=2, rewind=True)) is None
    assert keeper.find(Pin("x", 5, 1, 1.0, b"\7" * 32, False)) is None


def test_a_state_that_does_not_fit_into_memory_is_not_kept_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "free_memory", lambda: 4000)
    assert Keeper(None, ME).fits(1000)
    assert not Keeper(None, ME).fits(1001)
    assert Keeper("somewhere", ME).fits(1 << 60)


def test_the_kernel_says_how_much_is_free() -> None:
    assert kept.free_memory() > 1 << 20


@pytest.mark.parametrize("content", [b"", b"x", b"PK\3\4"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "left-x.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no state that a peer has left"):
        read_kept(path)


def test_a_file_of_other_things_is_refused(tmp_path: Path) -> None:
    for thing in ({}, [1], {"format": 2}, {"format": 1, "tip": (1, b"", 1.0, 0)}, torch.nn.Linear(2, 2)):
        torch.save(thing, tmp_path / "x.pt")
        with pytest.raises(ValueError, match="is no state that a peer has left"):
            read_kept(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError):
        read_kept(tmp_path / "y.pt")
