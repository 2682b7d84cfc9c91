"""Checks of state dicts: formats, other numbers of ranks, refusals, checkpoints, copies on the CPU."""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim.lr_scheduler import StepLR

import shoal
from shoal.sharding.state_dict import pack_groups
from tests.counting import Counting
from tests.old_checkpoints import CLASSES, FORMS, assert_close, go_on, old_checkpoint, torchs
from tests.sharding.zero_models import assert_equal, assert_same_on_all_ranks, assert_states_equal, copies
from tests.state_dict_hooks import register_hooks


def trained(network: nn.Module, optimizer: Any, steps: int = 2) -> None:
    """Steps with gradients that are equal on all ranks."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in network.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def on_all_ranks(zero: Any) -> dict[str, Any]:
    """The consolidated state dict, given to all ranks."""
    target = dist.get_world_size() - 1
    zero.consolidate_state_dict(to=target)
    box = [zero.state_dict() if dist.get_rank() == target else None]
    dist.broadcast_object_list(box, src=target)
    assert box[0] is not None
    return box[0]


def check_load_from_the_plain_optimizer_and_from_torch_zero_and_back() -> None:
    ours, plain, torchs = copies(3)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.5)
    theirs = TorchZero(torchs.parameters(), torch.optim.Adam)
    trained(plain, optimizer)
    zero.load_state_dict(optimizer.state_dict())
    assert zero.param_groups[0]["lr"] == 0.5
    saved = on_all_ranks(zero)
    assert_states_equal(saved, optimizer.state_dict())
    theirs.load_state_dict(copy.deepcopy(saved))
    theirs.consolidate_state_dict()
    box = [theirs.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    zero.load_state_dict(box[0])
    assert_states_equal(on_all_ranks(zero), optimizer.state_dict())
    ours.load_state_dict(plain.state_dict())
    trained(ours, zero)
    trained(plain, optimizer)
    assert_equal(ours.parameters(), plain.parameters())


def check_state_of_no_parameter() -> None:
    ours, plain, later = copies(3)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), Counting, lr=0.1)
    optimizer = Counting(plain.parameters(), lr=0.1)
    trained(ours, zero)
    trained(plain, optimizer)
    assert zero.state_dict()["state"]["k"] == 2
    saved = on_all_ranks(zero)
    assert saved["state"] == optimizer.state_dict()["state"] == {"k": torch.tensor(2)}
    again: Any = shoal.ZeroRedundancyOptimizer(later.parameters(), Counting, lr=0.1)
    later.load_state_dict(ours.state_dict())
    again.load_state_dict(saved)
    trained(later, again, 3)
    optimizer.load_state_dict(saved)
    trained(plain, optimizer, 3)
    assert_equal(later.parameters(), plain.parameters())
    again.optim.state["k"] += dist.get_rank()
    target = dist.get_world_size() - 1
    if dist.get_rank() == target > 0:
        with pytest.raises(ValueError, match=r"state 'k', which is of no parameter, is tensor\(5\) on rank 0 and "):
            again.consolidate_state_dict(to=target)
    else:
        again.consolidate_state_dict(to=target)


def check_it_is_not_copied() -> None:
    (ours,) = copies(1)
    for options in ({}, {"reduce_scatter": True}, {"parameters_as_bucket_view": True}):
        zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, **options)
        for way in (copy.copy, copy.deepcopy, pickle.dumps, lambda given: torch.save(given, io.BytesIO())):
            for given in (zero, StepLR(zero, 1)) if way is not copy.copy else (zero,):
                with pytest.raises(TypeError, match=r"a ZeroRedundancyOptimizer is neither copied .* state_dict\(\)"):
                    way(given)
        trained(ours, zero)
        copy.deepcopy(ours)


def check_loading_neither_changes_nor_shares_the_callers_dict() -> None:
    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam)
    optimizer = torch.optim.Adam(plain.parameters())
    trained(plain, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved)
    zero.load_state_dict(saved)
    trained(ours, zero)
    assert_states_equal(saved, before)


def check_state_dicts_of_an_older_torch() -> None:
    """Numbers are ints, floats or tensors of one element, and groups lack options. The parameter of 33 elements is cut
    so that some rank has one element of it, whose state has the shape of a number in a tensor of one element.
    """
    for kind, form in [(kind, "number") for kind in CLASSES] + [(torch.optim.NAdam, form) for form in FORMS]:
        values, state = old_checkpoint(kind, form)
        before = copy.deepcopy(state)
        params = [nn.Parameter(value.clone()) for value in values]
        zero: Any = shoal.ZeroRedundancyOptimizer(params, kind, **CLASSES[kind])
        zero.load_state_dict(state)
        zero.load_state_dict(on_all_ranks(zero))
        go_on(params, zero.step)
        assert_close(params, torchs(kind, values, state))
        assert repr(state) == repr(before)
    vector = nn.Parameter(torch.zeros(33))
    state = {"step": torch.tensor([3.0]), "exp_avg": torch.arange(33.0), "exp_avg_sq": torch.ones(33)}
    one: Any = shoal.ZeroRedundancyOptimizer([vector], torch.optim.Adam)
    one.load_state_dict({"state": {0: state}, "param_groups": pack_groups(one.param_groups)})
    found = on_all_ranks(one)["state"][0]
    assert found["step"].tolist() == [3.0]
    assert torch.equal(found["exp_avg"], state["exp_avg"])


def check_hooks_of_state_dicts_are_called_as_torch_calls_them() -> None:
    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.5)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.5)
    trained(ours, zero)
    trained(plain, optimizer)
    called: dict[Any, list[Any]] = {zero: [], optimizer: []}
    for each in (zero, optimizer):
        register_hooks(each, called[each])
    zero.consolidate_state_dict(to=0)
    assert called[zero] == [], "this is no state_dict()"
    for each in (zero, optimizer):
        saved = each.state_dict()
        assert saved.pop("note") == "saved"
        each.load_state_dict(saved)
        assert saved["param_groups"][0]["lr"] == 0.5, "the user's dict has changed"
        assert each.param_groups[0]["lr"] == 0.25
    assert called[zero] == called[optimizer] == ["saving", "saved first", "saved", "loading", "loaded 0.25"]


def check_a_wrong_state_dict_is_refused_before_anything_changes() -> None:
    (ours,) = copies(1)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam)
    trained(ours, zero)
    good = on_all_ranks(zero)
    other = torch.optim.Adam(nn.Linear(3, 3).parameters(), lr=0.7)
    wrong_shape, unknown, bare = copy.deepcopy(good), copy.deepcopy(good), copy.deepcopy(good)
    last = max(wrong_shape["state"])
    wrong_shape["param_groups"][0]["lr"] = 0.7
    wrong_shape["state"][last]["exp_avg"] = torch.zeros(2, 3)
    unknown["state"][77] = unknown["state"][0]
    del bare["state"]
    for wrong, words in (
        (other.state_dict(), "has 2 parameters in the state dict and 6"),
        (wrong_shape, r"'exp_avg' of parameter 5 has shape \(2, 3\)"),
        (unknown, "'77'"),
        (bare, "dictionary 'state'"),
    ):
        with pytest.raises(ValueError, match=words):
            zero.load_state_dict(wrong)
    assert_states_equal(on_all_ranks(zero), good)


def check_state_is_even() -> None:
    ranks = dist.get_world_size()
    params = [nn.Parameter(torch.zeros(10_001, 8)), *(nn.Parameter(torch.zeros(size)) for size in range(1, 40))]
    for param in params:
        param.grad = torch.zeros_like(param)
    zero: Any = shoal.ZeroRedundancyOptimizer(params, torch.optim.Adam)
    zero.step()
    mine = sum(
        value.nbytes for state in zero.optim.state.values() for name, value in state.items() if name == "exp_avg"
    )
    sizes = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([float(mine)]))
    assert max(sizes) - min(sizes) <= 64
    assert sum(sizes) == sum(param.nbytes for param in params)


def _folder() -> Path:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return Path(box[0])


def check_checkpoint_without_consolidation() -> None:
    ours, again, plain = copies(3)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.5)
    trained(ours, zero)
    reference = torch.optim.Adam(plain.parameters(), lr=0.5)
    trained(plain, reference)
    folder = _folder()
    dcp.save({"optim": get_optimizer_state_dict(ours, zero)}, checkpoint_id=folder)
    # A new optimizer with the parameters cut elsewhere: as on another number of ranks.
    loaded: Any = shoal.ZeroRedundancyOptimizer(
        again.parameters(), torch.optim.Adam, partition="elements", parameters_as_bucket_view=True
    )
    content = {"optim": get_optimizer_state_dict(again, loaded)}
    dcp.load(content, checkpoint_id=folder)
    set_optimizer_state_dict(again, loaded, content["optim"])
    assert_states_equal(on_all_ranks(loaded), reference.state_dict())
    # And the plain optimizer, which wants the whole of every tensor.
    (network,) = copies(1)
    whole = torch.optim.Adam(network.parameters())
    content = {"optim": get_optimizer_state_dict(network, whole)}
    dcp.load(content, checkpoint_id=folder)
    set_optimizer_state_dict(network, whole, content["optim"])
    assert_states_equal(whole.state_dict(), reference.state_dict())


def check_checkpoints_of_any_number_of_ranks_load_on_any_other() -> None:
    """Saved by the first ranks only, loaded by others: more, fewer, the same; cut or in whole parameters."""
    (plain,) = copies(1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.5)
    trained(plain, reference)
    ranks = dist.get_world_size()
    groups = [dist.new_group(range(count)) for count in range(1, ranks + 1)]
    first, before, whole = groups[0], groups[max(0, ranks - 2)], groups[-1]
    for savers, loaders, partition in (
        (first, whole, "elements"),
        (whole, before, "elements"),
        (whole, first, "parameters"),
        (before, whole, "parameters"),
    ):
        folder = _folder()
        if isinstance(savers, dist.ProcessGroup):
            (ours,) = copies(1)
            saved: Any = shoal.ZeroRedundancyOptimizer(
                ours.parameters(), torch.optim.Adam, process_group=savers, partition=partition, lr=0.5
            )
            trained(ours, saved)
            content = {"model": ours.state_dict(), "optim": get_optimizer_state_dict(ours, saved)}
            dcp.save(content, checkpoint_id=folder, process_group=savers)
        dist.barrier()
        if isinstance(loaders, dist.ProcessGroup):
            (again,) = copies(1)
            loaded: Any = shoal.ZeroRedundancyOptimizer(
                again.parameters(),
                torch.optim.Adam,
                process_group=loaders,
                partition=partition,
                reduce_scatter=partition == "elements",
            )
            content = {"model": again.state_dict(), "optim": get_optimizer_state_dict(again, loaded)}
            dcp.load(content, checkpoint_id=folder, process_group=loaders)
            set_optimizer_state_dict(again, loaded, content["optim"])
            assert_equal(again.parameters(), plain.parameters())
            loaded.consolidate_state_dict()
            if dist.get_rank() == 0:
                assert_states_equal(loaded.state_dict(), reference.state_dict())


def check_a_sharded_state_dict_is_not_saved_by_accident() -> None:
    (ours,) = copies(1)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam)
    trained(ours, zero)
    state = zero.state_dict()
    cut = [
        value for entries in state["state"].values() for value in entries.values() if type(value) is not torch.Tensor
    ]
    assert bool(cut) == (dist.get_world_size() > 1)
    for value in cut:
        with pytest.raises(RuntimeError, match="consolidate"):
            value + 1
        with pytest.raises(RuntimeError, match="consolidate"):
            torch.save(value, os.devnull)
    zero.consolidate_state_dict()
    trained(ours, zero)
    again = [value for entry in zero.state_dict()["state"].values() for value in entry.values()]
    assert any(type(value) is not torch.Tensor for value in again) == bool(cut)  # what was consolidated is out of date


def check_offload_and_master_weights() -> None:
    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, offload=True)
    trained(ours, zero)
    optimizer = torch.optim.AdamW(plain.parameters())
    trained(plain, optimizer)
    assert_equal(ours.parameters(), plain.parameters())

    # bfloat16 with master weights is float32 that is rounded for the model after every step.
    low, exact = copies(2, torch.bfloat16)
    exact = exact.float()
    for flat in (False, True):
        network, reference = copy.deepcopy(low), copy.deepcopy(exact)
        zero = shoal.ZeroRedundancyOptimizer(
            network.parameters(),
            torch.optim.AdamW,
            master_weights=True,
            parameters_as_bucket_view=flat,
            lr=1e-4,
        )
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-4)
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            for param, other in zip(network.parameters(), reference.parameters(), strict=True):
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
                other.grad = param.grad.float()
            zero.step()
            optimizer.step()
        assert_equal(network.parameters(), [param.bfloat16() for param in reference.parameters()])
        assert_same_on_all_ranks(network.parameters())
        # They are saved, and loaded.
        saved = on_all_ranks(zero)
        assert_equal(
            [saved["state"][n]["master_weights"] for n in range(6)],
            [param.detach() for param in reference.parameters()],
        )
        second = shoal.ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, master_weights=True)
        second.load_state_dict(saved)
        assert_states_equal(on_all_ranks(second), saved)
        # Values that are loaded into the model count for more.
        network.load_state_dict(low.state_dict())
        for param in network.parameters():
            param.grad = torch.zeros_like(param)
        second.param_groups[0]["lr"] = 0.0
        second.step()
        assert_equal(network.parameters(), low.parameters())


def check_groups_and_state_that_users_set() -> None:
    """As in torch, with the parameters as the keys of the state; what does not fit is refused."""
    for options in ({}, {"master_weights": True}, {"partition": "parameters"}, {"reduce_scatter": True}):
        ours, plain = copies(2, torch.bfloat16 if "master_weights" in options else torch.float32)
        zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1, momentum=0.5, **options)
        exact = plain.float()
        optimizer: Any = torch.optim.SGD(exact.parameters(), lr=0.1, momentum=0.5)
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            for param, other in zip(ours.parameters(), exact.parameters(), strict=True):
                other.grad = torch.randint(-2, 3, param.shape, generator=generator) / 4
                param.grad = other.grad.to(param.dtype)
            zero.step()
            optimizer.step()
            assert set(zero.state) <= set(ours.parameters())
            if number == 0:
                for each in (zero, optimizer):
                    each.param_groups = [{**group, "lr": 0.2} for group in each.param_groups]
            elif number == 1:
                for each in (zero, optimizer):
                    each.state = defaultdict(dict)
            else:
                for each in (zero, optimizer):
                    each.state.clear()
        assert_equal(ours.parameters(), [param.to(next(ours.parameters()).dtype) for param in exact.parameters()])
        group = zero.param_groups[0]
        for given, words in (([group, group], "has 2 groups"), ([{**group, "params": group["params"][:1]}], "fixed")):
            with pytest.raises(ValueError, match=words):
                zero.param_groups = given
        with pytest.raises(TypeError, match="give a mapping"):
            zero.state = 3
        removed = group["params"].pop()
        with pytest.raises(ValueError, match="parameters of this optimizer are fixed"):
            zero.step()
        group["params"].append(removed)
        zero.step()
