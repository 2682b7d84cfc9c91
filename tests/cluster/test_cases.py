"""Models, calls and errors that a cluster has to get right, each in processes of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import case
from tests.groups import in_group

pytestmark = pytest.mark.processes


of_both_kinds = pytest.mark.parametrize("strands", [1, 4])


def found_by(act: Callable[[], Any], size: int, folder: Path, strands: int = 1) -> list[Any]:
    """What each rank has found."""
    return in_group(size, folder, case.found_by, act.__name__, strands)


def test_parameters_on_a_part_of_the_ranks_have_the_numbers_of_one_process(tmp_path: Path) -> None:
    assert found_by(case.two_meshes, 4, tmp_path) == [[2, True]] * 4


def test_parameters_with_other_strides_are_those_of_rank_0(tmp_path: Path) -> None:
    first, second = found_by(case.other_strides, 2, tmp_path)
    assert first == second
    assert first[0]


@of_both_kinds
def test_values_that_are_loaded_later_count(tmp_path: Path, strands: int) -> None:
    assert found_by(case.loaded_later, 2, tmp_path, strands) == [[0.5, 0.25]] * 2


def test_the_groups_of_all_ranks_have_the_same_parameters(tmp_path: Path) -> None:
    grouped = ["2.bias", "2.weight", "1.bias", "1.weight"]
    assert found_by(case.some_parameters, 2, tmp_path) == [[grouped, True]] * 2


@pytest.mark.parametrize("strands", [1, 2])
def test_groups_that_are_set_count_and_other_parameters_are_refused(tmp_path: Path, strands: int) -> None:
    for found in found_by(case.groups_are_set, 2, tmp_path, strands):
        assert all(found[:-1])
        assert found[-1] == 4


@pytest.mark.parametrize("strands", [pytest.param(1, marks=pytest.mark.long), 2])
def test_closures_have_the_loss_of_all_ranks_or_are_refused_at_all(tmp_path: Path, strands: int) -> None:
    for rank, (epoch, alike, again, as_before, early, unmoved) in enumerate(
        found_by(case.closures, 2, tmp_path, strands)
    ):
        assert (epoch, alike, as_before, unmoved) == (3, True, "True", "True")
        assert "Twice calls its closure a second time" in again
        only_of_rank_0 = strands == 1 and rank > 0  # which has no optimizer that steps
        assert again.startswith("ClusterError: rank 0 " if only_of_rank_0 else "ClosureCalledAgain")
        assert "with cluster= or grad_scaler=, step has called the closure before" in early


def test_finish_applies_the_last_step_everywhere(tmp_path: Path) -> None:
    first, second = found_by(case.finished, 2, tmp_path)
    assert first == second
    assert first[0] == 3


def test_what_one_rank_can_not_load_is_loaded_by_none(tmp_path: Path) -> None:
    for errors, *rest in found_by(case.own_strands, 2, tmp_path, 4):
        assert rest == [True, 3, 1, True]
        assert [error.partition(" ")[0] for error in errors] == ["ValueError:"] * 2
        assert "strand 0 is not in the state" in errors[0]
        assert "strand 2 is not in the state" in errors[1]


@pytest.mark.long
def test_a_state_for_which_one_rank_has_no_memory_is_loaded_by_none(tmp_path: Path) -> None:
    for first, second, loaded in found_by(case.no_memory, 2, tmp_path, 4):
        for culprit, (error, same, epoch) in enumerate((first, second)):
            assert (same, epoch) == (True, 0)
            assert error.startswith(f"NoMemoryForState: rank {culprit} ")
            assert "there is no memory for the state that this peer would load" in error
        assert loaded == ["", True, 3]


@of_both_kinds
def test_what_one_rank_raises_is_raised_at_all_and_they_go_on(tmp_path: Path, strands: int) -> None:
    first, second = found_by(case.errors, 2, tmp_path, strands)
    assert first[1] == second[1] == 1
    (spilt, half, none), (spilt_there, half_there, none_there) = first[0][:3], first[0][3:]
    assert spilt == "ValueError: spilt coffee"
    assert half.startswith("ValueError: batch_size=0.5")
    assert "gradients of other parameters" in none
    assert spilt_there.startswith("ClusterError: rank 1 ")
    assert spilt_there.endswith("has raised ValueError: spilt coffee")
    assert "ClusterError: rank 1 " in half_there
    assert "gradients of other parameters" in none_there
    (spilt, half, none), (spilt_there, half_there, none_there) = second[0][:3], second[0][3:]
    assert spilt.startswith("ClusterError: rank 0 ")
    assert "batch_size=0.5" in half
    assert none.startswith("ClusterError: rank 0 ")
    assert spilt_there == "ValueError: spilt coffee"
    assert half_there.startswith("ValueError: batch_size=0.5")
    assert "gradients of other parameters" in none_there


@pytest.mark.parametrize("strands", [1, 2])
def test_after_an_error_at_the_end_of_an_epoch_the_model_has_the_step(tmp_path: Path, strands: int) -> None:
    by_rank = found_by(case.after_the_step, 2, tmp_path, strands)
    assert all(failed[1:] == smooth[1:] == by_rank[0][1][1:] for failed, smooth in by_rank)
    assert by_rank[0][1][:2] == [[""] * 4, 2]
    (first, _, _), (second, _, _) = (failed for failed, _ in by_rank)
    assert first == ["", "ValueError: spilt coffee", "", ""]
    assert second[1].startswith("ClusterError: rank 0 ")
    assert second[::2] + second[3:] == [""] * 3


def test_a_callback_at_rank_0_makes_any_call_with_one_strand(tmp_path: Path) -> None:
    first, second = found_by(case.in_callbacks, 2, tmp_path)
    assert (first[0], second[0]) == ([1, 2, 3], [])
    assert first[1:] == second[1:]
    assert first[1] == 3


def test_a_dht_that_has_no_run_has_no_effect(tmp_path: Path) -> None:
    first, second = found_by(case.unused_dht, 2, tmp_path)
    assert first == second
    assert first[:2] == [True, 1]


def test_a_rank_that_lacks_a_step_is_named_until_all_load_a_state(tmp_path: Path) -> None:
    first, second = found_by(case.lagging, 2, tmp_path, 2)
    assert first[1:] == second[1:]
    assert first[1] == 1
    for errors in (first[0], second[0]):
        assert "spilt coffee" in errors[0]
        assert all("rank 1 " in each and "has the state of epoch 0" in each for each in errors[1:3])
        assert not errors[3]


def test_ranks_agree_on_what_was_written_before_a_load(tmp_path: Path) -> None:
    first, second = found_by(case.one_element, 2, tmp_path, 2)
    assert first == second
    assert first[:2] == [["", ""], 1]


@of_both_kinds
def test_what_rank_0_refuses_in_another_call_is_heard(tmp_path: Path, strands: int) -> None:
    first, second = found_by(case.other_calls, 2, tmp_path, strands)
    assert first[0].startswith("ValueError: timeout=-1.0")
    assert second[0].startswith("ClusterError: rank 0 " if strands == 1 else "ValueError: timeout=-1.0")
    assert first[1] is second[1] is False


@of_both_kinds
def test_a_rank_that_can_not_make_its_optimizer_tells_the_others(tmp_path: Path, strands: int) -> None:
    found = found_by(case.not_made, 2, tmp_path, strands)
    for rank in range(2):
        (mine, theirs), alive = found[rank][0] if rank == 0 else found[rank][0][::-1], found[rank][1]
        for refusal in found[rank][2]:  # of a parameter that no rank can train
            assert re.search(r"ValueError: parameter 0 \('wave.*(is|are) complex, and peers average", refusal)
        assert mine.startswith("ValueError: averaging_timeout=-1.0")
        assert theirs.startswith(f"ClusterError: rank {1 - rank} ")
        assert not alive


def test_ranks_that_were_made_otherwise_than_rank_0_are_told_in_what(tmp_path: Path) -> None:
    for found, alive in found_by(case.unlike, 2, tmp_path):
        assert "rank 1 " in found
        assert "max_grad_norm is 2 here, and 1 at rank 0" in found
        assert alive


@of_both_kinds
def test_an_optimizer_that_was_shut_down_has_its_state(tmp_path: Path, strands: int) -> None:
    first, second = found_by(case.late, 2, tmp_path, strands)
    assert first == [[1, 5], 6, True]
    assert second == [[1, 5], 0, True]


@of_both_kinds
def test_a_rank_whose_training_an_error_ends_says_which(tmp_path: Path, strands: int) -> None:
    said, _ = found_by(case.ended, 2, tmp_path, strands)
    assert said.startswith("ClusterError: rank 1 ")
    assert "is lost (it has raised KeyError: 'mine')" in said


@of_both_kinds
def test_rank_0_calls_its_hooks_and_each_rank_those_of_its_strands(tmp_path: Path, strands: int) -> None:
    first, second = found_by(case.hooks, 2, tmp_path, strands)
    saving = ["saving", "wrapped saving", "wrapped saved", "saved"]
    assert first[0] == [*saving, "loading", "wrapped loading", "wrapped loaded", "loaded"]
    assert second[0] == []
    assert first[1] == second[1] == (["saving", "saved", "loading", "loaded"] if strands > 1 else [])
    assert first[3] == second[3] == 2
    if strands > 1:
        (mine, theirs), (heard, own) = first[2], second[2]
        assert mine == own == "ValueError: spilt coffee"
        assert heard.startswith("ClusterError: rank 0 ")
        assert theirs.startswith("ClusterError: rank 1 ")
