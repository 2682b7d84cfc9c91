"""A donor that knows how a state is encoded: what it sends is refused before anything changes, or does no harm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from shoal.compression import NoCompression
from shoal.optim import tree
from shoal.optim.checkpoint import rest_of
from shoal.optim.contents import device_of
from shoal.optim.state import TrainingState
from shoal.optim.tree import _Kind
from tests.optim.conftest import Alone
from tests.optim.models import make_model
from tests.optim.test_own_form import trained
from tests.optim.test_state import TIP, downloaded


def momentum(seed: int = 0) -> torch.optim.Optimizer:
    return torch.optim.SGD(make_model(seed).parameters(), lr=0.1, momentum=0.9, foreach=False)


def sent(changes: dict[str, Any], **scalars: Any) -> Any:
    """A state whose tree has other values, as it arrives."""
    donor = trained(momentum())
    snapshot = donor.snapshot(TIP, NoCompression())
    whole = msgspec.msgpack.decode(msgspec.msgpack.decode(snapshot.scalars)["tree"])
    entries = dict(zip(whole[1::2], whole[2::2], strict=True)) | changes
    node = [_Kind.DICT, *(item for key in sorted(entries, key=msgspec.msgpack.encode) for item in (key, entries[key]))]
    return downloaded(snapshot, tree=msgspec.msgpack.encode(node), **scalars)


COUNT = sum(1 for _ in make_model().parameters())
STATISTIC = [_Kind.TENSOR, COUNT, "float32", []]
"""The first statistic: the momentum of parameter 0."""
PARAMETER = [_Kind.PARAMETER, True, 0, "float32", []]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rest": [_Kind.DICT, [_Kind.KEY, 0], "x"]}, "the state of no parameter is that of one"),
        ({"values": [_Kind.DICT, 0, [_Kind.DICT, "again", STATISTIC]]}, "has a statistic twice"),
        ({"values": [_Kind.DICT, 1, [_Kind.DICT, "other", STATISTIC]]}, "has a statistic twice"),
        ({"values": [_Kind.DICT, 0, [_Kind.DICT, "momentum_buffer", 1.0]]}, "has a statistic twice"),
        ({"values": [_Kind.DICT, COUNT, [_Kind.DICT]]}, "a parameter that does not exist"),
        ({"groups": [_Kind.LIST, [_Kind.DICT, "lr", PARAMETER]]}, "lr is a Parameter"),
        ({"groups": [_Kind.LIST, [_Kind.DICT, "lr", [_Kind.COMPLEX, 1.0, 1.0]]]}, "lr is a complex"),
        ({"groups": [_Kind.LIST, [_Kind.DICT, 5, 0.1]]}, "an option of a parameter group has no name"),
        ({"form": 1}, "has a form of its own"),
        ({"more": 1}, "has not the parts of one"),
    ],
    ids=str,
)
def test_it_is_refused_and_nothing_has_changed(changes: dict[str, Any], says: str) -> None:
    newcomer = TrainingState(momentum(1), None, [])
    before = newcomer.digest()
    with pytest.raises(ValueError, match=says):
        newcomer.load(sent(changes))
    assert newcomer.digest() == before
    assert not newcomer.optimizer.state
    assert newcomer.optimizer.param_groups[0]["lr"] == 0.1


def test_a_statistic_that_is_listed_twice_is_refused() -> None:
    newcomer = TrainingState(momentum(1), None, [])
    twice = [(0, "momentum_buffer")] * COUNT
    with pytest.raises(ValueError, match="has 'momentum_buffer' twice"):
        newcomer.load(sent({}, statistics=twice))
    assert not newcomer.optimizer.state


def test_kernels_and_names_stay_this_peers_own() -> None:
    newcomer = TrainingState(momentum(1), None, [])
    group = [_Kind.DICT, "lr", 0.3, "fused", True, "capturable", True, "param_names", 5]
    newcomer.load(sent({"groups": [_Kind.LIST, group]}))
    own = newcomer.optimizer.param_groups[0]
    assert own["lr"] == 0.3
    assert not own.get("capturable")
    assert not own["fused"]
    assert "param_names" not in own


def test_conjugated_tensors_are_refused_by_name() -> None:
    whole = torch.ones(2, dtype=torch.complex64)
    for odd in (whole.conj(), whole.conj().imag):
        with pytest.raises(tree.CannotTravel, match="conjugated or negated"):
            tree.encode([odd], [])


def test_tensors_that_share_memory_stay_where_the_optimizer_has_made_them() -> None:
    """In flat memory, a tensor and a view of it would be two."""
    optimizer = momentum()
    first = optimizer.param_groups[0]["params"][0]
    kept = torch.zeros(6)
    optimizer.state[first].update(whole=kept, part=kept[2:5])
    state = TrainingState(optimizer, None, [])
    kept.fill_(3.0)
    assert optimizer.state[first]["part"].tolist() == [3.0] * 3
    assert "'whole' is a tensor that shares a part of its memory" in state.why_it_cannot_travel(at_start=True)


@pytest.mark.parametrize("option", ["fused", "capturable", "neither"])
def test_where_a_tensor_belongs(option: str) -> None:
    parameter = torch.empty(3, device="meta")
    count = device_of(torch.tensor(1.0), parameter, {option: True})
    assert count.type == ("cpu" if option == "neither" else "meta")
    assert device_of(torch.zeros(2), parameter, {option: True}).type == "meta"


def test_what_a_checkpoint_of_strands_can_not_have_is_refused_by_name() -> None:
    optimizer = momentum()
    parameters = optimizer.param_groups[0]["params"]
    optimizer.state[parameters[1]]["parts"] = [torch.zeros(2)]
    with pytest.raises(ValueError, match=r"can't be saved in a checkpoint of strands.*state of parameter 1: 'parts'"):
        rest_of(optimizer, parameters)
    optimizer.state.clear()
    optimizer.state["k"] = 1  # type: ignore[index]
    with pytest.raises(ValueError, match="state of no parameter: 'k'"):
        rest_of(optimizer, parameters)


def test_a_newcomer_takes_as_much_as_it_was_told(alone: Alone) -> None:
    given = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "target_batch_size": 8}
    assert alone(make_model(), max_state_bytes=1 << 33, **given)._state.max_nbytes == 1 << 33
    assert alone(make_model(), **given)._state.max_nbytes < 1 << 33
