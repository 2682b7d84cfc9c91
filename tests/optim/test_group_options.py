"""Options of parameter groups as JOIN and BEGIN carry them: small, exact, and refused where no step can be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.group_options import EVERYTHING, GroupOptions, pack, structure, unpack
from shoal.optim.host_copy import HostCopy
from shoal.optim.shown_copies import shown_of
from shoal.swarm.protocol.messages import MAX_OPTIONS_BYTES

Make = Callable[..., torch.optim.Optimizer]


def parameters(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]


def adamw(*rates: float, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters(len(rates)), rates, strict=True)]
    return torch.optim.AdamW(groups, **options)


def seen(optimizer: torch.optim.Optimizer, name: str) -> list[Any]:
    return [group[name] for group in optimizer.param_groups]


def test_all_of_torchs_optimizers_tell_all_that_their_step_reads() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop, torch.optim.ASGD):
        made: Any = kind(parameters(2), lr=0.1)
        told = unpack(GroupOptions(made).own(0))
        assert set(told) == set(made.defaults) - {"foreach", "fused", "capturable", "differentiable"}
        assert len(GroupOptions(made).own(0)) < 300


@given(st.lists(st.floats(allow_nan=False), min_size=3, max_size=3), st.floats(allow_nan=False))
def test_values_arrive_to_the_bit(rates: list[float], eps: float) -> None:
    sender, receiver = adamw(*rates), adamw(1.0, 2.0, 3.0)
    for group in sender.param_groups:
        group["eps"] = eps
    with GroupOptions(receiver).of_run(GroupOptions(sender).own(0)):
        assert [rate.hex() for rate in seen(receiver, "lr")] == [float(rate).hex() for rate in rates]
        assert [value.hex() for value in seen(receiver, "eps")] == [eps.hex()] * 3
        assert seen(receiver, "betas") == [(0.9, 0.999)] * 3
    assert seen(receiver, "lr") == [1.0, 2.0, 3.0]
    assert seen(receiver, "eps") == [1e-8] * 3


@pytest.mark.parametrize(("groups", "hashed"), [(1, set()), (60, set()), (150, {"lr"})])
def test_it_is_small(groups: int, hashed: set[str]) -> None:
    told = GroupOptions(adamw(*(0.001 * (n + 1) for n in range(groups)))).own(0)
    assert len(told) <= MAX_OPTIONS_BYTES
    assert {name for name, entry in unpack(told).items() if isinstance(entry, bytes)} == hashed


def test_many_groups_with_few_values() -> None:
    optimizer = adamw(*([0.1, 0.2] * 300))
    options = GroupOptions(optimizer)
    told = options.own(0)
    assert len(told) <= MAX_OPTIONS_BYTES
    assert isinstance(unpack(told)["lr"], tuple)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    with options.of_run(told):
        assert seen(optimizer, "lr") == [0.1, 0.2] * 300


def test_a_hash_names_what_differs() -> None:
    rates = [0.001 * (n + 1) for n in range(150)]
    mine, alike, other = (GroupOptions(adamw(*one)) for one in (rates, rates, [0.5, *rates[1:]]))
    assert mine.unknown_of(alike.own(0)) == ""
    assert mine.unknown_of(other.own(0)) == "lr"
    assert mine.fits(other.own(0))


def test_more_options_than_even_hashes_of_them_have_room_for() -> None:
    columns = {f"option {n}": [n * 0.1] for n in range(200)}
    assert unpack(pack(columns)).keys() == {EVERYTHING}
    assert pack(columns) == pack(dict(reversed(columns.items())))


@pytest.mark.parametrize(
    "entries",
    [
        {"lr": ([None], b"")},
        {"lr": (["0.1"], b"")},
        {"lr": ([True], b"")},
        {"lr": ([[0.1]], b"")},
        {"lr": ([0.1, 0.2], b"\0\1\1")},
        {"lr": ([0.1, 0.2], b"\0\2")},
        {"lr": ([], b"")},
        {"betas": ([[0.9]], b"")},
        {"betas": ([0.9], b"")},
        {"betas": ([[0.9, None]], b"")},
        {"amsgrad": ([1], b"")},
        {"lr": 0.1},
        [],
        0,
    ],
    ids=str,
)
def test_options_with_which_no_step_can_be_made(entries: Any) -> None:
    options = GroupOptions(adamw(0.1, 0.2))
    assert not options.fits(msgspec.msgpack.encode(entries))
    assert not options.fits(b"")
    assert options.fits(msgspec.msgpack.encode({"lr": ([1], b""), "of another version of torch": (["?"], b"")}))


@given(st.binary(max_size=100))
def test_any_bytes_fit_or_do_not(data: bytes) -> None:
    GroupOptions(adamw(0.1)).fits(data)


def test_tensors_stay_where_they_are() -> None:
    """A captured graph has their addresses."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(parameters(1), lr=rate)
    with GroupOptions(optimizer).of_run(GroupOptions(torch.optim.SGD(parameters(1), lr=torch.tensor(0.3))).own(0)):
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == torch.tensor(0.3).item()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == torch.tensor(0.1).item()


def test_what_the_step_itself_changes_stays() -> None:
    """As Prodigy's estimate of the distance."""
    optimizer = adamw(0.1, 0.2)
    options = GroupOptions(optimizer)
    with options.of_run(GroupOptions(adamw(0.3, 0.4)).own(0)):
        optimizer.param_groups[0]["lr"] *= 2
    assert seen(optimizer, "lr") == [0.6, 0.2]
    assert [group["lr"] for group in options.at_tip] == [0.6, 0.4]


def test_own_options_come_back_after_a_step_that_raised() -> None:
    optimizer = adamw(0.1)
    options = GroupOptions(optimizer)
    with pytest.raises(RuntimeError), options.of_run(GroupOptions(adamw(0.3)).own(0)):
        raise RuntimeError
    assert seen(optimizer, "lr") == [0.1]
    assert [group["lr"] for group in options.at_tip] == [0.1], "no step was made"


def test_notes_of_schedulers_get_no_vote() -> None:
    optimizer = adamw(0.1)
    optimizer.param_groups[0]["initial_lr"] = 0.5
    assert "initial_lr" not in unpack(GroupOptions(optimizer).own(0))


def test_what_users_write_during_a_step_is_set_aside() -> None:
    """The step is made on another thread, with the options of the run."""
    host = HostCopy([{"params": parameters(1), "lr": 0.1}])
    optimizer = torch.optim.SGD(host.params)
    host.adopt(optimizer)
    [shown] = shown_of(optimizer, host).groups
    options = GroupOptions(optimizer, None, host)
    told = GroupOptions(torch.optim.SGD(parameters(1), lr=0.3)).own(0)
    with host.set_aside(optimizer):
        with options.of_run(told):
            assert shown["lr"] == 0.1
            shown["lr"] = 0.7
            assert shown["lr"] == 0.7
            assert optimizer.param_groups[0]["lr"] == 0.3
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert shown["lr"] == optimizer.param_groups[0]["lr"] == 0.7
    with host.set_aside(optimizer):
        optimizer.param_groups[0]["lr"] = 0.2  # as scheduler= does
    assert shown["lr"] == 0.2


def test_the_structure_of_groups_is_compared() -> None:
    first, second = parameters(2), parameters(3)
    assert structure([{"params": first, "lr": 0.1}]) == "2 tensors"
    flagged = [{"params": first, "lr": 0.1, "muon": True}, {"params": second, "lr": None}]
    assert structure(flagged) == "2 tensors with muon, 3 tensors with lr None"


def test_a_difference_is_told_once_and_only_if_the_user_had_a_chance(caplog: pytest.LogCaptureFixture) -> None:
    """Not of an epoch that ends in the same call of `step` in which its state was downloaded."""
    told = GroupOptions(adamw(0.3)).own(0)
    options = GroupOptions(adamw(0.1))
    for seen_epoch, ended_epoch, lines in ((0, 4, 0), (4, 4, 1), (5, 5, 1)):
        options.look(seen_epoch)
        options.own(ended_epoch)
        with options.of_run(told):
            pass
        assert len(caplog.messages) == lines
