"""If there is no memory for a download, nothing of it is loaded, and the peer goes on as it was."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cluster.team import Alone as Team
from shoal.optim import pilot, state_averager
from shoal.optim.kept import Kept
from shoal.optim.state import TrainingState
from shoal.optim.transfers import Fetched
from shoal.swarm.protocol.errors import AveragingError, Rejected
from shoal.transfer.transfer import Downloaded, NoMemoryForState
from tests.forked import ROOT
from tests.optim.conftest import Alone
from tests.optim.lack import Lack
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model
from tests.optim.test_strand_state import Net
from tests.optim.test_strand_state import made as made_with_strands
from tests.optim.test_strand_state import train as train_strands

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

ERRORS = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
]

DELTA = {"use_local_updates": True, "average_state_every": 1}
OUTER = {"outer": shoal.DiLoCo(inner_steps=4), "batch_size_per_step": 64, "target_batch_size": None}
MODES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": OPTIMIZERS["sgd"]},
    "offloaded": {"offload_optimizer": True},
    "local": DELTA,
    "outer": OUTER,
    "outer, mixed": {**OUTER, "outer": shoal.DiLoCo(inner_steps=4, mix=0.5, fragments=2)},
    "outer, bfloat16": {**OUTER, "dtype": torch.bfloat16},
}


def trained(alone: Alone, steps: int, seed: int = 0, **given: Any) -> tuple[nn.Module, shoal.Optimizer]:
    given = dict(given)
    model = make_model(seed).to(given.pop("dtype", torch.float32))
    usual = {
        "target_batch_size": 64,
        "optimizer": OPTIMIZERS["adamw"],
        "extra_tensors": [torch.full((99,), 1.0 * seed)],
    }
    made = alone(model, **{**usual, **given})
    for step in range(steps):
        train(model, made, step)
    return model, made


def train(model: nn.Module, optimizer: shoal.Optimizer, step: int) -> None:
    inputs, outputs = (each.to(next(model.parameters()).dtype) for each in fixed_batch(step))
    backward(model, inputs, outputs)
    optimizer.step(batch_size=64)
    optimizer.zero_grad()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


def everything(model: nn.Module, optimizer: Any) -> Any:
    extras = optimizer._state.extra_tensors
    own = plain([list(model.parameters()), extras, optimizer._state.parameters])
    return own, plain(optimizer.state_dict()), optimizer.tip, optimizer._state.state_digest


def found(optimizer: shoal.Optimizer, state: Kept | Downloaded, *, keeps: bool = False) -> pytest.MonkeyPatch:
    """From now on, the state is what others hold. With `keeps`, this peer keeps what it leaves."""
    patch = pytest.MonkeyPatch()
    patch.setattr(optimizer._run, "donors", lambda: [optimizer.dht.peer_id])
    if not keeps:
        patch.setattr(optimizer._epoch._pilot.forks, "leave", lambda *_: None)
    given = state.as_downloaded(0) if isinstance(state, Kept) else state
    patch.setattr(optimizer._epoch._transfers, "fetch", lambda *_, **__: [given])
    return patch


def check_all_or_nothing(model: nn.Module, optimizer: shoal.Optimizer, load: Callable[[], object]) -> int:
    """Make each allocation of `load` fail once. Returns how many there are."""
    before = everything(model, optimizer)
    for nth in range(1, 1000):
        lack, failed = Lack(nth), ""
        try:
            with lack:
                load()
        except AveragingError as error:
            failed = str(error)
        if not failed:
            assert lack.made < nth
            return lack.made
        assert "there is no memory for" in failed
        assert everything(model, optimizer) == before, f"allocation {nth} failed, and something has changed"
    raise AssertionError("it never loads")


@pytest.mark.long
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("mode", MODES)
def test_all_memory_is_there_before_anything_changes(alone: Alone, mode: str, steps: int) -> None:
    _, giver = trained(alone, 9, **MODES[mode])
    state = giver._state.exact_copy()
    model, optimizer = trained(alone, steps, seed=1, **MODES[mode])
    found(optimizer, state)
    count = check_all_or_nothing(model, optimizer, optimizer.load_state_from_peers)
    assert optimizer.tip == giver.tip
    assert optimizer._state.digest() == giver._state.digest()
    kept = optimizer._state.optimizer.state_dict()["state"]
    assert plain(kept) == plain(giver._state.optimizer.state_dict()["state"])
    assert count or steps, "a newcomer needs memory for statistics"
    train(model, optimizer, 9)


@pytest.mark.long
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("outer")])
def test_a_drift_that_others_may_have_is_given_up_with_the_load(alone: Alone, mode: str) -> None:
    _, giver = trained(alone, 9, **MODES[mode])
    model, optimizer = trained(alone, 6, seed=1, **MODES[mode])
    found(optimizer, giver._state.exact_copy()).setattr(optimizer._epoch._pilot, "may_be_in", lambda _: True)
    assert check_all_or_nothing(model, optimizer, optimizer.load_state_from_peers)
    assert optimizer.tip == giver.tip


def strands_of(giver: Any) -> list[Downloaded]:
    state = giver._state
    exact = shoal.compression.NoCompression()
    return [Kept(state.snapshot(state.tip, exact, part=part), ()).as_downloaded(0) for part in state.parts]


@pytest.mark.long
def test_a_cluster_of_strands_loads_all_of_them_or_none(alone: Alone) -> None:
    donor, newcomer = Net(300), Net(300)
    giver, taker = made_with_strands(alone, donor), made_with_strands(alone, newcomer, run_id="s")
    train_strands(donor, giver, 3)
    state, of_giver, strands = taker._state, giver._state, strands_of(giver)

    def load() -> None:
        state.make_ready(strands)()

    assert check_all_or_nothing(newcomer, taker, load)
    assert state.state_digest == of_giver.state_digest
    kept = plain(state.optimizer.state_dict()["state"])
    assert kept == plain(of_giver.optimizer.state_dict()["state"])


class TeamOfTwo(Team):
    """Stands in for a rank that answers as given."""

    def __init__(self, answer: Fetched) -> None:
        super().__init__()
        self.size, self.names, self._answer = 2, ["rank 0", "rank 1"], answer

    def all(self, question: Any, mine: Any) -> list[Any]:
        return [mine, self._answer]


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "kind"), [(("no memory", True), NoMemoryForState), (("no such parameter", False), Rejected)]
)
def test_what_another_rank_can_not_load_is_loaded_by_none(alone: Alone, answer: Any, kind: type[Exception]) -> None:
    donor, newcomer = Net(), Net()
    giver, taker = made_with_strands(alone, donor), made_with_strands(alone, newcomer, run_id="s")
    train_strands(donor, giver, 1)
    before = everything(newcomer, taker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taker._epoch._transfers, "_team", TeamOfTwo(Fetched(*answer)))
        with pytest.raises(kind, match="rank 1: no "):
            taker._epoch._transfers.make_ready(strands_of(giver), copies=False)
    assert everything(newcomer, taker) == before


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_step_goes_on_after_one_warning(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    _, giver = trained(alone, 4)
    model, optimizer = trained(alone, 1, seed=1)
    others = found(optimizer, giver._state.exact_copy())

    def fails(*_: Any) -> Iterator[None]:
        raise error

    monkeypatch.setattr(TrainingState, "_memory_for_statistics", fails)
    before = everything(model, optimizer)
    optimizer._epoch._synchronise()
    assert everything(model, optimizer) == before
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "could not download the state that others hold: there is no memory" in said
    others.undo()
    train(model, optimizer, 1)
    assert optimizer.local_epoch == 2
    found(optimizer, giver._state.exact_copy())
    monkeypatch.undo()
    optimizer._epoch._synchronise()
    assert optimizer.tip == giver.tip


def test_another_error_is_no_lack_of_memory(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    _, giver = trained(alone, 4)
    _, optimizer = trained(alone, 0, seed=1)
    found(optimizer, giver._state.exact_copy())

    def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(TrainingState, "_memory_for_statistics", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        optimizer.load_state_from_peers()


def test_what_has_arrived_is_given_back(alone: Alone) -> None:
    _, giver = trained(alone, 4)
    _, optimizer = trained(alone, 0, seed=1)
    states = [giver._state.exact_copy().as_downloaded(0)]
    arrived = weakref.ref(states[0].buffers[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer._run, "donors", lambda: [optimizer.dht.peer_id])
        patch.setattr(optimizer._epoch._transfers, "fetch", lambda *_, **__: [states.pop()])
        patch.setattr(pilot.log, "disabled", True)  # pytest keeps what is logged, and with it the error
        gc.disable()
        try:
            with Lack(1):
                optimizer._epoch._synchronise()
            assert arrived() is None, "the error keeps it"
        finally:
            gc.enable()


def test_a_kept_state_without_memory_is_loaded_later(alone: Alone, tmp_path: Any) -> None:
    model, optimizer = trained(alone, 3)
    copy = optimizer._state.exact_copy()
    keeper = optimizer._state.keeper
    keeper.keep(copy)
    train(model, optimizer, 3)
    optimizer._state.optimizer.state.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer._epoch._pilot.forks, "leave", lambda *_: None)
        assert check_all_or_nothing(model, optimizer, optimizer.load_kept_state)
    assert optimizer._state.tip == copy.snapshot.tip


@pytest.mark.long
def test_a_state_that_can_not_be_copied_is_lost_and_the_download_goes_on(
    alone: Alone, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    _, giver = trained(alone, 9)
    _, optimizer = trained(alone, 5, seed=1, kept_state_dir=tmp_path)
    found(optimizer, giver._state.exact_copy(), keeps=True)
    with Lack(1):
        assert optimizer.load_state_from_peers()
    assert optimizer.tip == giver.tip
    assert "is lost, since it could not be kept (there is no memory for a copy of it" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_a_process_that_gets_no_more_memory_loads_later() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tests.optim.limited"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *failed, loaded = said.stdout.splitlines()
    assert len(failed) == 3
    for line in failed:
        assert "True 0 0 NoMemoryForState: there is no memory for the state that this peer would load" in line
    assert loaded == "200 False 1 2 True"


def test_a_state_averager_loads_all_or_nothing(alone: Alone, dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    _, giver = trained(alone, 4, extra_tensors=[])
    model = make_model(seed=1)
    averager = state_averager.TrainingStateAverager(
        dht=dht, prefix="own", optimizer=torch.optim.AdamW(model.parameters()), start=False, initialize_optimizer=False
    )
    state = giver._state.exact_copy().as_downloaded(0)
    before = plain(list(model.parameters()))
    with pytest.raises(AveragingError, match="there is no memory"), Lack(1):
        averager._state.load(state)
    assert plain(list(model.parameters())) == before
    averager.shutdown()
