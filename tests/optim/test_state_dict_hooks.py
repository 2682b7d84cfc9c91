"""Hooks of `state_dict` and `load_state_dict` are called as torch calls them: in the user's own calls, and once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import shoal
from shoal.flat import without_hooks
from tests.optim.conftest import Alone
from tests.optim.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "on the host": {"offload_optimizer": True},
    "in the background": {"offload_optimizer": True, "delay_optimizer_step": True, "delay_grad_averaging": True},
    "local updates": {"use_local_updates": True},
    "outer": {"outer": shoal.DiLoCo()},
    "strands": {"cluster": shoal.Cluster(strands=4)},
    "strands with outer": {"cluster": shoal.Cluster(strands=4), "outer": shoal.DiLoCo()},
}


def made(alone: Alone, model: nn.Module, **given: Any) -> shoal.Optimizer:
    usual = {"optimizer": lambda params: torch.optim.Adam(params, lr=0.1), "batch_size_per_step": 4}
    return alone(model, **{"target_batch_size": 4, **usual, **given})


def train(model: nn.Module, optimizer: shoal.Optimizer) -> None:
    model(torch.ones(4, 10)).square().mean().backward()
    optimizer.step()


def register_all(optimizer: torch.optim.Optimizer, called: list[Any], name: str = "") -> None:
    """Hooks of all four kinds, that say that they were called, of what, and what they have seen."""

    def seen(state: dict[str, Any]) -> bool:
        return set(state) >= {"state", "param_groups"} and isinstance(state["param_groups"][0]["lr"], float)

    def called_with(what: str, given: torch.optim.Optimizer, *state: dict[str, Any]) -> None:
        called.append(f"{name}{what}" if given is optimizer and all(map(seen, state)) else (name, what, given, state))

    optimizer.register_state_dict_pre_hook(lambda each: called_with("saving", each))
    optimizer.register_state_dict_post_hook(lambda each, state: called_with("saved", each, state))
    optimizer.register_load_state_dict_pre_hook(lambda each, state: called_with("loading", each, state))
    optimizer.register_load_state_dict_post_hook(lambda each: called_with("loaded", each))


@pytest.mark.parametrize("mode", MODES)
def test_all_four_kinds_are_called_once(alone: Alone, mode: str) -> None:
    """Those of the wrapped optimizer, too, within those of the optimizer that the user calls."""
    optimizer = made(alone, model := make_model(), **MODES[mode])
    called: list[Any] = []
    register_all(optimizer, called)
    register_all(optimizer.optimizer, called, "wrapped ")
    train(model, optimizer)
    assert called == []
    state = optimizer.state_dict()
    assert called == ["saving", "wrapped saving", "wrapped saved", "saved"]
    called.clear()
    optimizer.load_state_dict(state)
    assert called == ["loading", "wrapped loading", "wrapped loaded", "loaded"]
    called.clear()
    train(model, optimizer)
    optimizer.shutdown()
    assert called == []
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(called) == 8, "after the run, too"


@pytest.mark.parametrize("mode", ["default", "strands"])
def test_in_their_order_and_with_what_they_return(alone: Alone, mode: str) -> None:
    optimizer = made(alone, make_model(), **MODES[mode])
    plain = torch.optim.Adam(make_model().parameters(), lr=0.1)
    orders: list[list[Any]] = []
    for each in (optimizer, plain):
        order: list[Any] = []
        orders.append(order)

        def saved(_: Any, state: dict[str, Any], order: list[Any] = order) -> dict[str, Any]:
            order.append(sorted(set(state) - {"shoal"}))
            return {**state, "note": "saved"}

        def loading(_: Any, state: dict[str, Any], order: list[Any] = order) -> dict[str, Any]:
            order.append(sorted(set(state) - {"shoal"}))
            groups = copy.deepcopy(state["param_groups"])
            groups[0]["lr"] += 1.0
            return {**{key: value for key, value in state.items() if key != "note"}, "param_groups": groups}

        def loaded(optimizer: torch.optim.Optimizer, order: list[Any] = order) -> None:
            order.append(optimizer.param_groups[0]["lr"])

        for prepend in (False, True):
            each.register_state_dict_post_hook(saved, prepend=prepend)
            each.register_load_state_dict_pre_hook(loading, prepend=prepend)
        each.register_load_state_dict_pre_hook(lambda *_, order=order: order.append("first"), prepend=True)  # type: ignore[misc]
        removed = each.register_load_state_dict_post_hook(loaded)
        state = each.state_dict()
        before = copy.deepcopy(state["param_groups"])
        assert state["note"] == "saved"
        each.load_state_dict(state)
        assert state["note"] == "saved"
        assert state["param_groups"] == before, "the user's dict has changed"
        removed.remove()
        each.load_state_dict(state)
    assert orders[0] == orders[1]
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 2.1
    optimizer.step(batch_size=0)
    assert optimizer.param_groups[0]["lr"] == 2.1


@pytest.mark.parametrize("mode", ["default", "in the background", "strands"])
def test_a_hook_may_ask_for_the_state(alone: Alone, mode: str) -> None:
    """As torch's tutorial does, to adapt a state dict to this optimizer."""
    optimizer = made(alone, model := make_model(), **MODES[mode])
    train(model, optimizer)

    def adapt(each: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**each.state_dict(), "param_groups": state["param_groups"]}

    state = optimizer.state_dict()
    state["state"] = {}
    optimizer.register_load_state_dict_pre_hook(adapt)
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("mode", ["default", "strands"])
def test_an_error_in_a_hook_comes_before_anything_changes(alone: Alone, mode: str) -> None:
    optimizer = made(alone, model := make_model(), **MODES[mode])
    state = optimizer.state_dict()
    train(model, optimizer)

    def refuse(*_: Any) -> None:
        raise LookupError("not this one")

    hook = optimizer.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(LookupError):
        optimizer.load_state_dict(state)
    hook.remove()
    assert (optimizer.local_epoch, optimizer.state_dict()["state"][0]["step"]) == (1, 1)
    train(model, optimizer)
    assert optimizer.local_epoch == 2


@pytest.mark.long
@pytest.mark.parametrize("of", ["shoal", "inner", "outer"])
@pytest.mark.parametrize("mode", ["outer", "strands with outer"])
def test_nor_with_an_outer_optimizer(alone: Alone, mode: str, of: str) -> None:
    optimizer = made(alone, model := make_model(), **MODES[mode])
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    train(model, optimizer)

    def refuse(*_: Any) -> None:
        raise LookupError("not this one")

    before = [copy.deepcopy(optimizer.state_dict()), [parameter.detach().clone() for parameter in model.parameters()]]
    hooked = {"shoal": optimizer, "inner": optimizer.optimizer, "outer": optimizer.outer_optimizer}[of]
    assert hooked is not None
    hook = hooked.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(LookupError):
        optimizer.load_state_dict(state)
    hook.remove()
    torch.testing.assert_close([optimizer.state_dict(), list(model.parameters())], before, rtol=0, atol=0)
    optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)


@pytest.mark.long
def test_of_a_strand_state_each_rank_calls_its_own(alone: Alone, tmp_path: Path) -> None:
    """Saving by torch.distributed.checkpoint asks for the state once, and loading once before it loads."""
    called: list[str] = []
    states: list[dict[str, Any]] = []

    def noted(what: str) -> Callable[..., None]:
        def hook(_: Any, *state: dict[str, Any]) -> None:
            called.append(what)
            states.extend(state)

        return hook

    for mode in ("strands", "strands with outer"):
        optimizer = made(alone, model := make_model(), **MODES[mode])
        train(model, optimizer)
        optimizer.register_state_dict_pre_hook(noted("saving"))
        optimizer.register_state_dict_post_hook(noted("saved"))
        optimizer.register_load_state_dict_pre_hook(noted("loading"))
        optimizer.register_load_state_dict_post_hook(noted("loaded"))
        register_all(optimizer.optimizer, called, "wrapped ")
        dcp.save({"optimizer": optimizer.strand_state()}, checkpoint_id=tmp_path / mode)
        assert called == ["saving", "saved"]
        dcp.load({"optimizer": optimizer.strand_state()}, checkpoint_id=tmp_path / mode)
        assert called == ["saving", "saved"] * 2 + ["loading", "loaded"]
        assert all("strand 0" in state for state in states)
        called.clear()
        optimizer.shutdown()


def test_a_changed_strand_state_is_the_one_that_counts(alone: Alone) -> None:
    optimizer = made(alone, make_model(), **MODES["strands"])
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    assert optimizer.strand_state().state_dict()["note"] == 1

    def other(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key != "strand 1"}

    optimizer.register_load_state_dict_pre_hook(other)
    with pytest.raises(ValueError, match="strand 1 is not in the state"):
        optimizer.strand_state().load_state_dict(optimizer.strand_state().state_dict())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["default", "outer", "strands"])
def test_no_download_and_no_kept_state_calls_any(alone: Alone, mode: str) -> None:
    first = made(alone, model := make_model(), run_id="one", **MODES[mode])
    train(model, first)
    called: list[Any] = []
    register_all(first, called)
    register_all(first.optimizer, called)
    with shoal.DHT(start=True, initial_peers=first.dht.get_visible_maddrs()) as dht:
        second = made(alone, make_model(1), run_id="one", dht=dht, **MODES[mode])
        register_all(second, called)
        register_all(second.optimizer, called)
        try:
            assert second.load_state_from_peers()
            assert second.tip == first.tip
            if mode != "strands":
                first._state.exact_copy()
        finally:
            second.shutdown()
    assert called == []


def test_within_without_hooks_none_is_called() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    called: list[Any] = []
    register_all(optimizer, called)
    with without_hooks(optimizer):
        optimizer.load_state_dict(optimizer.state_dict())
    assert called == []
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["saving", "saved", "loading", "loaded"]


def test_hooks_of_step_are_called_once(alone: Alone) -> None:
    """They were before; those of the wrapped optimizer are called in its own steps, once for each epoch."""
    optimizer = made(alone, model := make_model(), target_batch_size=8)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.optimizer.register_step_pre_hook(lambda *_: called.append("wrapped before"))
    optimizer.optimizer.register_step_post_hook(lambda *_: called.append("wrapped after"))
    train(model, optimizer)
    assert called == ["before", "after"]
    train(model, optimizer)
    assert called == ["before", "after", "before", "wrapped before", "wrapped after", "after"]
