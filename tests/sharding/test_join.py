"""Unequal inputs over 2 to 4 real ranks: nobody hangs, and what comes out is what one process would have computed.

All cases run in one start of the ranks (see `join_ranks`), each in a process group of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import Join
from shoal.sharding.join import announcement, read_announcement
from tests.sharding.join_ranks import Call, run_ranks

PATTERNS = [
    *([1, 2, 3, 4], [2, 5, 0, 1], [0, 4, 4, 0]),
    *([3, 0, 2], [4, 2, 3]),
    *([0, 3], [3, 1], [2, 2], [0, 0]),
]
"""Inputs per rank: none on one or on all, all different, even; the last to join is the first rank, or two."""

STEPS: list[dict[str, Any]] = [
    {"divide_by_live": True},
    {"every": 2},
    {"zero_first": True},
    {"closure": True},
    {"zero": "shoal", "divide_by_live": True},
    {"zero": "shoal", "every": 2},
    {"zero": "shoal", "zero_first": True},
    {"zero": "shoal", "closure": True},
    {"zero": "shoal", "scheduled": True},
    {"zero": "shoal", "scheduled": True, "join": "torch"},
    {"scheduled": True},
    {"clip": 0.1, "optimizer": "sgd"},
    {"clip": 0.1, "optimizer": "sgd", "zero": "shoal"},
    {"clip": 0.1, "optimizer": "sgd", "zero": "shoal", "join": "torch"},
]
"""Ways to train with a model and a sharded optimizer ..."""

STEPPED = [[4, 0, 2], [2, 4, 4]]
"""... and the inputs per rank for that."""

RATES = ("torch", "shoal", "reduced")

EPOCHS = [
    *(([1, 4, 2], "shoal", name) for name in ("StepLR", "MultiStepLR", "LambdaLR", "OneCycleLR", "SequentialLR")),
    *((inputs, zero, "StepLR") for zero in ("torch", "reduced") for inputs in ([1, 4, 2], [3, 2])),
]

OTHERS: list[Call] = [
    ("count", {"inputs": [5, 6]}),
    ("count", {"inputs": [5, 6], "torchs": True}),
    ("count", {"inputs": [4, 6], "joinables": 3}),
    ("count", {"inputs": [4, 3], "joinables": 2, "throw": True}),
    ("train", {"inputs": [5, 3], "throw": True}),
    ("train", {"inputs": [3, 5], "every": 3}),
    ("subgroup", {"inputs": [0, 2, 4]}),
    ("two_optimizers", {"inputs": [3, 6]}),
    ("only_optimizers", {"inputs": [3, 5]}),
    ("only_optimizers", {"inputs": [3, 5], "throw": True}),
    ("afterwards", {"inputs": [1, 2]}),
    ("raises", {"inputs": [2, 2]}),
    ("not_enabled", {"inputs": [3, 3]}),
    ("add_up", {"inputs": [2, 4], "joinables": 2}),
    ("add_up", {"inputs": [2, 4], "counter": True}),
    ("add_up", {"inputs": [2, 4], "throw": True}),
    ("reduced", {"inputs": [2, 4], "throw": True}),
    *(("reduced", {"inputs": [2, 4], "throw": True, "join": join}) for join in ("shoal", "torch")),
    *(("reduced", {"inputs": [4, 2, 3], "join": join, "bucket_bytes": 8}) for join in ("shoal", "torch")),
    ("reduced", {"inputs": [4, 2, 3], "divide_by_live": True}),
    ("reduced", {"inputs": [4, 2, 3], "join": "torch"}),
    ("two_models", {"inputs": [1, 3, 4]}),
    ("two_models", {"inputs": [1, 3, 4], "leader": "counter"}),
    *(("rates", {"inputs": inputs, "zero": zero}) for inputs in ([1, 4, 2], [3, 3]) for zero in RATES),
    ("rates", {"inputs": [1, 4, 2], "zero": "shoal", "join": "torch"}),
    *(("epochs", {"inputs": inputs, "zero": zero, "name": name}) for inputs, zero, name in EPOCHS),
    *(("whole_optimizer", {"inputs": [0, 4, 2], "tensor": tensor}) for tensor in (False, True)),
    ("collecting", {"inputs": [1, 3]}),
]


def all_calls() -> list[Call]:
    calls = OTHERS.copy()
    for inputs in PATTERNS:
        calls += [(scenario, {"inputs": inputs}) for scenario in ("count", "replicated", "add_up", "reduced")]
        calls += [("train", {"inputs": inputs, "zero": zero}) for zero in ("torch", "shoal")]
    calls += [("train", {"inputs": inputs, **steps}) for inputs in STEPPED for steps in STEPS]
    # Those of all ranks first, so that no rank waits for others that are busy without it.
    return sorted(calls, key=lambda call: -len(call[1]["inputs"]))


pytestmark = pytest.mark.timeout(290)  # the first test runs them all, maybe on a machine with much else to do

every_pattern = pytest.mark.parametrize("inputs", PATTERNS, ids=str)
EXHAUSTED, DETECTED = "Rank {} exhausted all inputs.", "Detected at least one rank that exhausted inputs. Throwing"

Ask = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Gives the answers of all ranks to one call."""
    calls = all_calls()
    answers = run_ranks(calls, tmp_path_factory.mktemp("ranks"))

    def ask(scenario: str, **arguments: Any) -> list[Any]:
        said = answers[calls.index((scenario, arguments))]
        for answer in said:
            assert "failed" not in answer, answer["failed"]
        return said

    return ask


def live_counts(inputs: list[int]) -> list[int]:
    """How many ranks are live in each iteration."""
    return [sum(number > iteration for number in inputs) for iteration in range(max(inputs))]


@pytest.mark.long
def test_the_tutorials_numbers(ask: Ask) -> None:
    said = ask("count", inputs=[5, 6])
    assert [(answer["count"], answer["max"]) for answer in said] == [(10, 11), (11, 11)]


@pytest.mark.long
def test_what_is_written_for_ours_works_in_torchs(ask: Ask) -> None:
    assert ask("count", inputs=[5, 6], torchs=True) == ask("count", inputs=[5, 6])


@every_pattern
def test_hooks_run_once_per_iteration_and_know_the_last(ask: Ask, inputs: list[int]) -> None:
    live = live_counts(inputs)
    for number, answer in zip(inputs, ask("count", inputs=inputs), strict=True):
        assert answer["count"] == sum(live[:number])
        assert answer["max"] == sum(inputs)
        assert answer["last"] == (number == max(inputs))


def test_several_joinables_need_one_heartbeat(ask: Ask) -> None:
    said = ask("count", inputs=[4, 6], joinables=3)
    assert [(answer["count"], answer["max"]) for answer in said] == [(8, 10), (10, 10)]


@every_pattern
def test_all_end_with_the_parameters_of_a_last_joiner(ask: Ask, inputs: list[int]) -> None:
    said = ask("replicated", inputs=inputs)
    last = max(rank for rank, number in enumerate(inputs) if number == max(inputs))
    assert [answer["values"] for answer in said] == [said[last]["left"]] * len(inputs)
    assert said[last]["left"] == pytest.approx(said[0]["expected"], rel=1e-12)


@every_pattern
@pytest.mark.parametrize("zero", ["torch", "shoal"])
def test_a_sharded_optimizer_does_what_one_process_would(ask: Ask, inputs: list[int], zero: str) -> None:
    """Also torch's, which in torch's Join steps the shards of joined ranks with old gradients."""
    expect_as_alone(ask("train", inputs=inputs, zero=zero))


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("inputs", STEPPED, ids=str)
def test_a_sharded_optimizer_stepped_otherwise(ask: Ask, inputs: list[int], steps: dict[str, Any]) -> None:
    """The mean of the live ranks, accumulation under no_sync, the optimizer first in the list, steps with a closure,
    a learning rate that only live ranks change, and Shoal's optimizer in torch's Join.
    """
    expect_as_alone(ask("train", inputs=inputs, **steps))


def test_the_mean_of_live_ranks_in_every_model(ask: Ask) -> None:
    expect_as_alone(ask("two_models", inputs=[1, 3, 4]))
    expect_as_alone(ask("two_models", inputs=[1, 3, 4], leader="counter"))


@pytest.mark.parametrize("inputs", [[1, 4, 2], [3, 3]], ids=str)
@pytest.mark.parametrize("zero", RATES)
def test_a_scheduler_leaves_all_ranks_with_the_rate_of_the_last(ask: Ask, inputs: list[int], zero: str) -> None:
    calls = [ask("rates", inputs=inputs, zero=zero)]
    if inputs == [1, 4, 2] and zero == "shoal":
        calls.append(ask("rates", inputs=inputs, zero=zero, join="torch"))
    for said in calls:
        assert [answer["rate"] for answer in said] == [said[0]["expected rate"]] * len(inputs)
        assert all(answer["values"] == said[0]["values"] for answer in said)


@pytest.mark.parametrize(("inputs", "zero", "name"), EPOCHS, ids=str)
def test_what_is_stepped_for_every_batch_does_not_stay_behind(
    ask: Ask, inputs: list[int], zero: str, name: str
) -> None:
    said = ask("epochs", inputs=inputs, zero=zero, name=name)
    expect_as_alone(said)
    for answer in said:
        assert answer["schedule"] == answer["expected schedule"]
        assert answer["scale"] == answer["expected scale"]


@pytest.mark.parametrize("tensor", [False, True])
def test_the_rate_of_an_optimizer_that_is_not_in_the_list_does_not_stay_behind(ask: Ask, tensor: bool) -> None:
    for answer in ask("whole_optimizer", inputs=[0, 4, 2], tensor=tensor):
        assert answer["rates"] == answer["expected"]


def test_a_scheduler_that_collects_is_refused_on_all_ranks(ask: Ask) -> None:
    for answer in ask("collecting", inputs=[1, 3]):
        assert "Collector holds more or fewer numbers on rank 0 than on rank 1" in answer["error"]


def expect_as_alone(said: list[Any]) -> None:
    assert all(answer.get("error", "") == "" for answer in said)
    assert all(answer["values"] == said[0]["values"] for answer in said)
    assert said[0]["values"] == pytest.approx(said[0]["expected"], rel=1e-12)


def test_some_of_the_ranks_in_a_group_of_their_own(ask: Ask) -> None:
    said = ask("subgroup", inputs=[0, 2, 4])
    assert said[1]["values"] == said[2]["values"] == pytest.approx(said[1]["expected"], rel=1e-12)


def test_running_out_in_the_middle_of_an_accumulation_does_not_hang(ask: Ask) -> None:
    said = ask("train", inputs=[3, 5], every=3)
    assert [answer["done"] for answer in said] == [3, 5]
    assert said[0]["values"] == said[1]["values"]


def test_of_two_optimizers_the_one_that_steps_is_shadowed(ask: Ask) -> None:
    said = ask("two_optimizers", inputs=[3, 6])
    assert said[0]["values"] == said[1]["values"] == pytest.approx(said[0]["expected"], rel=1e-12)


def test_an_optimizer_alone(ask: Ask) -> None:
    said = ask("only_optimizers", inputs=[3, 5])
    assert said[0]["values"] == said[1]["values"]
    assert [answer["done"] for answer in said] == [3, 5]


@pytest.mark.parametrize(
    ("scenario", "arguments", "first"),
    [
        ("count", {"inputs": [4, 3], "joinables": 2, "throw": True}, 1),
        ("train", {"inputs": [5, 3], "throw": True}, 1),
        ("only_optimizers", {"inputs": [3, 5], "throw": True}, 0),
        ("add_up", {"inputs": [2, 4], "throw": True}, 0),
        ("reduced", {"inputs": [2, 4], "throw": True}, 0),
    ],
)
def test_early_termination_raises_on_every_rank_in_the_same_iteration(
    ask: Ask, scenario: str, arguments: dict[str, Any], first: int
) -> None:
    said = ask(scenario, **arguments)
    assert [answer["done"] for answer in said] == [min(arguments["inputs"])] * 2
    assert said[first]["error"] == EXHAUSTED.format(first)
    assert said[1 - first]["error"].startswith(DETECTED)
    assert said[0].get("values") == said[1].get("values")


def test_afterwards_all_is_as_before(ask: Ask) -> None:
    for answer in ask("afterwards", inputs=[1, 2]):
        assert answer["restored"]
        assert answer["error"] < 1e-12
        assert answer["messages"] == 0


def test_an_exception_in_the_block_comes_out_and_runs_no_hook(ask: Ask) -> None:
    assert ask("raises", inputs=[2, 2]) == [{"error": "mine", "last": None, "restored": True}] * 2


def test_switched_off_it_sends_nothing(ask: Ask) -> None:
    assert ask("not_enabled", inputs=[3, 3]) == [{"count": 6, "messages": 3}] * 2


@every_pattern
def test_what_counts_live_ranks_itself_costs_one_message_at_the_exit(ask: Ask, inputs: list[int]) -> None:
    live = live_counts(inputs)
    for answer in ask("add_up", inputs=inputs):
        assert answer["totals"] == [sum(count * 10**iteration for iteration, count in enumerate(live))]
        assert answer["counts"] == live
        assert answer["messages"] == max(inputs) + 1


@every_pattern
def test_shoals_own_reduction_makes_no_collectives_for_join(ask: Ask, inputs: list[int]) -> None:
    said = ask("reduced", inputs=inputs)
    expect_as_alone(said)
    for answer in said:
        assert set(answer["kinds"]) <= {"isend", "irecv"}
        if min(inputs) == max(inputs):  # as many messages as without Join, and some at the exit
            exit_messages = answer["messages"] - inputs[0] * answer["messages of a step"]
            assert 0 < exit_messages <= answer["messages of a step"]


def test_shoals_own_reduction_to_the_mean_of_live_ranks(ask: Ask) -> None:
    expect_as_alone(ask("reduced", inputs=[4, 2, 3], divide_by_live=True))


@pytest.mark.parametrize("join", ["shoal", "torch"])
def test_shoals_own_reduction_goes_on_after_early_termination(ask: Ask, join: str) -> None:
    said = ask("reduced", inputs=[2, 4], throw=True, join=join)
    assert said[0]["a step later"] == said[1]["a step later"] != said[0]["values"]


@pytest.mark.parametrize("join", ["shoal", "torch"])
def test_shoals_own_reduction_in_more_buckets_than_are_under_way(ask: Ask, join: str) -> None:
    expect_as_alone(ask("reduced", inputs=[4, 2, 3], join=join, bucket_bytes=8))


def test_shoals_own_reduction_in_torchs_join(ask: Ask) -> None:
    expect_as_alone(ask("reduced", inputs=[4, 2, 3], join="torch"))


def test_two_that_count(ask: Ask) -> None:
    for answer in ask("add_up", inputs=[2, 4], joinables=2):
        assert answer["totals"] == [1122, 1122]
        assert answer["messages"] == 2 * 4 + 1


def test_what_counts_beside_what_does_not(ask: Ask) -> None:
    for answer in ask("add_up", inputs=[2, 4], counter=True):
        assert answer["totals"] == [1122]
        assert answer["messages"] == 3 * 4 + 1


@given(st.integers(1, 2000), st.integers(0, 3), st.data())
def test_announcements_of_any_number_of_live_ranks_are_told_apart(ranks: int, order: int, data: st.DataObject) -> None:
    live = data.draw(st.integers(1, ranks))
    assert read_announcement(live * announcement(order, ranks), ranks) == (order, live)


def test_nothing_to_join() -> None:
    with pytest.raises(ValueError, match="no joinables"):
        Join([])


def test_what_is_no_joinable() -> None:
    with pytest.raises(TypeError, match="Join got Adam, which is no Joinable"):
        Join([torch.optim.Adam([torch.zeros(1)])])  # type: ignore[list-item]


def test_different_process_groups() -> None:
    class Grouped:
        def __init__(self, group: object) -> None:
            self.join_process_group = group

        def join_hook(self) -> None: ...

    with pytest.raises(ValueError, match="different process groups"):
        Join([Grouped("one"), Grouped("other")])  # type: ignore[list-item]
