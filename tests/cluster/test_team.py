"""What all teams promise, alone or of several ranks: the same values and decisions everywhere, and errors by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import NoneType
from typing import Any

import msgspec
import pytest

from shoal.cluster import calls
from shoal.cluster.question import Question
from shoal.cluster.team import Alone, Gang, Team
from shoal.cluster.ties import ClusterError, Ties
from tests.cluster.threads import at_ranks, gang_of, kill


class Turn(msgspec.Struct):
    what: str
    numbers: list[int]


SAMPLES: Question[int, list[int]] = Question("samples", int, list[int])
SUM = Question("sum", int, int)
NEXT = Question("next", NoneType, Turn)
LOSS: Question[float | None, float] = Question("loss", float | None, float)


@contextmanager
def teams_of(size: int) -> Iterator[Sequence[Team]]:
    """Those of all ranks; `size` 0: of a process that is alone."""
    if size == 0:
        yield [Alone()]
        return
    with gang_of(size) as gang:
        yield gang


@pytest.fixture(params=[0, 1, 2, 4], ids=["alone", "gang of 1", "gang of 2", "gang of 4"])
def teams(request: pytest.FixtureRequest) -> Iterator[Sequence[Team]]:
    with teams_of(request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 says when it has waited for long helps no other test."""
    monkeypatch.setattr(calls, "LATE_SECONDS", 600.0)


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 soon says what it waits for."""
    monkeypatch.setattr(calls, "LATE_SECONDS", 0.05)


def summed(team: Team) -> int:
    """A call in which nothing goes wrong."""
    with team.call("good"):
        return team.decided(SUM, sum, team.rank)


def is_well(teams: Sequence[Team]) -> None:
    """They make a call together."""
    size = len(teams)
    assert at_ranks(teams, summed) == [size * (size - 1) // 2] * size


def errors_of(ended: Sequence[Any]) -> list[str]:
    return [f"{type(each).__name__}: {each}" for each in ended]


# -- values and decisions


def test_all_have_the_values_of_all_in_the_order_of_ranks(teams: Sequence[Team]) -> None:
    def step(team: Team) -> list[int]:
        with team.call("step"):
            return team.all(SAMPLES, 10 * team.rank)

    assert at_ranks(teams, step) == [[10 * rank for rank in range(len(teams))]] * len(teams)


def test_rank_0_decides_and_the_others_do_the_same_then(teams: Sequence[Team]) -> None:
    done: list[tuple[int, Turn]] = []

    def step(team: Team) -> list[Any]:
        with team.call("step"):
            total = team.decided(SUM, sum, team.rank + 1)
            turn = team.decided(NEXT, lambda _: Turn("end", [total]), then=lambda turn: done.append((team.rank, turn)))
            loss = team.decided(LOSS, lambda losses: float(losses.count(None)), None)
            return [total, turn, loss]

    size = len(teams)
    total = size * (size + 1) // 2
    assert at_ranks(teams, step) == [[total, Turn("end", [total]), float(size)]] * size
    assert sorted(rank for rank, _ in done) == list(range(1, size))
    assert all(turn == Turn("end", [total]) for _, turn in done)
    is_well(teams)


def test_what_rank_0_has_is_not_at_the_others(teams: Sequence[Team]) -> None:
    for team in teams:
        pilot = team.at_first(lambda: Turn("pilot", []))
        if team.rank == 0:
            assert pilot.what == "pilot"
            continue
        with pytest.raises(AttributeError, match="what is at rank 0 of the cluster only, which is the peer of the run"):
            print(pilot.what)
        with pytest.raises(AttributeError, match="at rank 0 of the cluster only"):
            pilot.what = "mine"


# -- errors


def spill(*_: object) -> Any:
    raise ValueError("spilt coffee")


PLACES = ["before", "in the decision", "between", "after"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("culprit", range(3))
def test_an_error_of_one_rank_is_an_error_of_all_and_they_go_on(culprit: int, place: str) -> None:
    """The rank raises its own; the others raise a ClusterError in the same call, or in the next one if the error came
    after the last exchange."""

    def step(team: Team) -> int:
        def at(this: str) -> None:
            if team.rank == culprit and place == this:
                spill()

        def decide(values: list[int]) -> int:
            at("in the decision")
            return sum(values)

        with team.call("step"):
            at("before")
            team.all(SAMPLES, team.rank)
            at("between")
            total = team.decided(SUM, decide, team.rank, then=lambda _: at("in the decision"))
            at("after")
        return total

    with gang_of(3) as teams:
        first = at_ranks(teams, step)
        said = f"ClusterError: rank {culprit} has raised ValueError: spilt coffee"
        second = [said] * 3 if culprit == 0 else [said, *[f"ClusterError: rank 0 has raised {said}"] * 2]
        assert errors_of(first)[culprit] == "ValueError: spilt coffee"
        if place in ("before", "between") or culprit == 0:
            assert [e for r, e in enumerate(errors_of(first)) if r != culprit] == [
                e for r, e in enumerate(second) if r != culprit
            ]
        else:
            assert [each for rank, each in enumerate(first) if rank != culprit] == [3, 3]
            assert errors_of(at_ranks(teams, summed)) == second
        is_well(teams)
        is_well(teams)


def test_a_rank_whose_work_has_failed_stays_until_it_brings_something(teams: Sequence[Team]) -> None:
    """Else the others would wait for it in the collectives of the call."""
    seen: list[int] = []

    def step(team: Team) -> None:
        with team.call("step"):
            team.decided(NEXT, lambda _: Turn("add", []), then=spill)
            team.decided(NEXT, lambda _: Turn("go on", []))
            seen.append(team.rank)  # a collective
            team.all(SAMPLES, 1)

    ended = at_ranks(teams, step)
    assert sorted(seen) == list(range(len(teams)))
    assert errors_of(ended[1:]) == ["ValueError: spilt coffee"] * (len(teams) - 1)
    if len(teams) > 1:
        assert "has raised ValueError: spilt coffee" in str(ended[0])
    is_well(teams)


def test_an_error_of_rank_0_that_is_caught_is_one_of_all() -> None:
    def step(team: Team) -> int:
        with team.call("step"):
            try:
                team.decided(SUM, spill, 1)
            except ValueError:
                return -1
            return team.decided(SUM, sum, 1)

    with gang_of(3) as teams:
        first, *others = at_ranks(teams, step)
        assert first == -1
        assert errors_of(others) == ["ClusterError: rank 0 has raised ValueError: spilt coffee"] * 2
        is_well(teams)


def test_a_call_that_has_failed_exchanges_nothing_more() -> None:
    def step(team: Team) -> str:
        with team.call("step"):
            with pytest.raises((ValueError, ClusterError), match="spilt coffee"):
                team.decided(SUM, spill, 1)
            with pytest.raises(ClusterError) as refused:
                team.decided(SUM, sum, 1)
            return str(refused.value)

    with gang_of(2) as teams:
        assert at_ranks(teams, step) == ["step has failed before, at all ranks of the cluster"] * 2
        is_well(teams)


def test_errors_of_two_ranks_fail_one_call() -> None:
    def step(team: Team) -> None:
        with team.call("step"):
            if team.rank:
                raise ValueError(f"coffee of {team.rank}")
            team.all(SAMPLES, 0)

    with gang_of(3) as teams:
        ended = at_ranks(teams, step)
        assert errors_of(ended[1:]) == ["ValueError: coffee of 1", "ValueError: coffee of 2"]
        is_well(teams)


# -- ranks at different places


def test_unlike_calls_are_an_error_with_both_names_at_all_ranks() -> None:
    def other(team: Team) -> None:
        with team.call("settle" if team.rank == 1 else "step"):
            team.all(SAMPLES, 0)

    with gang_of(3) as teams:
        for error in at_ranks(teams, other):
            assert isinstance(error, ClusterError)
            assert "rank 0 has called step and rank 1 settle: the ranks of a cluster make the same calls" in str(error)
        is_well(teams)


def test_unlike_questions_are_an_error_with_both_names_at_all_ranks() -> None:
    def other(team: Team) -> None:
        with team.call("step"):
            team.decided(SUM if team.rank == 1 else SAMPLES, lambda values: values, 0)  # type: ignore[misc]

    with gang_of(3) as teams:
        for error in at_ranks(teams, other):
            assert isinstance(error, ClusterError)
            assert "in step, rank 0 is at 'samples' and rank 1 is at 'sum': the ranks of a cluster do" in str(error)
        is_well(teams)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("waits", ["for the end of that call", "for the end of another call", "for a decision"])
def test_a_rank_that_waits_for_rank_0_does_not_wait_if_rank_0_waits_for_it(waits: str) -> None:
    """It brings nothing, from which rank 0 could see that it is elsewhere."""
    call = "settle" if waits == "for the end of another call" else "step"

    def other(team: Team) -> None:
        with team.call("step" if team.rank == 0 else call):
            if team.rank == 0:
                team.all(SAMPLES, 0)
            elif waits == "for a decision":
                team.decided(NEXT, lambda _: Turn("end", []))

    with gang_of(3) as teams:
        ends = {
            "for the end of that call": "in step, rank 0 is at 'samples' and rank 1 has ended it",
            "for the end of another call": "rank 0 has called step and rank 1 settle",
            "for a decision": "in step, rank 0 is at 'samples' and rank 1 is at 'next'",
        }
        ended = at_ranks(teams, other)
        assert all(isinstance(each, ClusterError) for each in ended)
        for error in ended:  # each rank that is elsewhere may be the first to say so
            assert any(ends[waits].replace("rank 1", f"rank {culprit}") in str(error) for culprit in (1, 2))
        is_well(teams)


def test_a_rank_that_is_only_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LATE_SECONDS", 0.01)
    late = threading.Event()

    def step(team: Team) -> list[int]:
        with team.call("step"):
            if team.rank == 1:
                late.wait()
            elif team.rank == 2:
                threading.Timer(0.1, late.set).start()
            return team.all(SAMPLES, team.rank)

    with gang_of(3) as teams:
        for _ in range(2):
            assert at_ranks(teams, step) == [[0, 1, 2]] * 3


def test_what_was_brought_to_a_call_that_failed_does_not_count_in_the_next(teams: Sequence[Team]) -> None:
    def step(team: Team, number: int) -> list[int]:
        with team.call("step"):
            if team.rank == 0 and number == 0:
                spill()
            return team.all(SAMPLES, number)

    assert isinstance(at_ranks(teams, lambda team: step(team, 0))[0], ValueError)
    assert at_ranks(teams, lambda team: step(team, 1)) == [[1] * len(teams)] * len(teams)


def test_an_exchange_belongs_into_a_call() -> None:
    with gang_of(1) as (team,), pytest.raises(RuntimeError, match="within no call"):
        team.all(SAMPLES, 0)


def test_a_callback_of_the_user_does_what_concerns_its_rank() -> None:
    def step(team: Team) -> list[int]:
        with team.call("step"):
            team.all(SAMPLES, 0)
            with team.call("state_dict"):  # of the model at rank 0
                pass
            with pytest.raises(RuntimeError, match="settle within step: all ranks of the cluster"), team.call("settle"):
                team.all(SAMPLES, 0)
            with pytest.raises(RuntimeError, match="a callback can't make it"), team.call("settle"), team.collectives():
                pass
            return team.all(SAMPLES, team.rank)

    with gang_of(2) as teams:
        assert at_ranks(teams, step) == [[0, 1]] * 2
        is_well(teams)


# -- what is brought


def test_a_value_of_another_type_is_an_error_with_the_name_of_its_rank() -> None:
    def step(team: Team) -> None:
        with team.call("step"):
            mine: Any = "much" if team.rank == 1 else 0
            team.all(SAMPLES, mine)

    with gang_of(3) as teams:
        for error in at_ranks(teams, step):
            assert isinstance(error, ClusterError)
            assert "rank 1 has brought to 'samples' what does not belong there: Expected `int`, got `str`" in str(error)
        is_well(teams)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_message_that_is_too_large_is_refused_where_it_is_made(culprit: int) -> None:
    data: Question[bytes, list[bytes]] = Question("data", bytes, list[bytes])

    def step(team: Team) -> None:
        with team.call("step"):
            team.all(data, bytes(1 << 24 if team.rank == culprit else 0))

    with gang_of(2) as teams:
        ended = at_ranks(teams, step)
        assert isinstance(ended[culprit], ValueError)
        assert all("a message of 16777" in str(each) for each in ended)
        is_well(teams)


def test_a_message_of_megabytes_arrives(teams: Sequence[Team]) -> None:
    data: Question[bytes, list[int]] = Question("data", bytes, list[int])
    text = Question("text", NoneType, str)

    def step(team: Team) -> tuple[list[int], int]:
        with team.call("step"):
            lengths = team.decided(data, lambda values: [len(each) for each in values], bytes(3_000_000 + team.rank))
            return lengths, len(team.decided(text, lambda _: "x" * 5_000_000))

    lengths = [3_000_000 + rank for rank in range(len(teams))]
    assert at_ranks(teams, step) == [(lengths, 5_000_000)] * len(teams)


# -- messages


def test_a_step_is_one_message_up_and_one_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 answers is sent together with the end of the call: the others wake once."""
    sent: list[int] = []
    send = Ties.send

    def counting(self: Ties, data: bytes, ranks: Any = None) -> None:
        sent.append(self.rank)
        send(self, data, ranks)

    monkeypatch.setattr(Ties, "send", counting)

    both, then = Question("both", int, int, may_wait=True), Question("then", NoneType, Turn, may_wait=True)

    def step(team: Team) -> str:
        with team.call("step"):
            team.decided(both, sum, team.rank)
            return team.decided(then, lambda _: Turn("go on", [])).what

    with gang_of(4) as teams:
        assert at_ranks(teams, step) == ["go on"] * 4
    assert sorted(sent) == [0, 1, 2, 3]


@pytest.mark.parametrize("by_hand", [False, True])
def test_decisions_are_known_before_collectives_begin(by_hand: bool) -> None:
    heard = threading.Event()

    def step(team: Team) -> bool:
        with team.call("step"):
            team.decided(NEXT, lambda _: Turn("gather", []))
            if team.rank:
                heard.set()
            if by_hand:
                team.flush()
            with nullcontext() if by_hand else team.collectives():
                return heard.wait(30.0)

    with gang_of(2) as teams:
        assert at_ranks(teams, step) == [True] * 2


# -- waits that rank 0 may end


def test_rank_0_cancels_its_future_when_the_wait_is_over(teams: Sequence[Team]) -> None:
    future: Future[None] = Future()

    def step(team: Team) -> list[int]:
        with team.call("step"), team.ends(lambda: future):
            return team.all(SAMPLES, 1)

    assert at_ranks(teams, step) == [[1] * len(teams)] * len(teams)
    assert future.cancelled()


@pytest.mark.parametrize("when", ["before", "while rank 0 waits for its own", "while rank 0 waits for the others"])
def test_rank_0_ends_the_wait_of_all(when: str) -> None:
    over: Future[None] = Future()
    if when == "before":
        over.set_result(None)
    waiting = threading.Barrier(3)

    def step(team: Team) -> list[int]:
        with team.call("step"):
            team.decided(NEXT, lambda _: Turn("begin", []))
            with team.ends(lambda: over) as ended:
                if waiting.wait() == 0 and when != "before":
                    threading.Timer(0.05, over.set_result, [None]).start()
                if team.rank or when == "while rank 0 waits for its own":
                    ended.result(30.0)
                return team.all(SAMPLES, team.rank)

    with gang_of(3) as teams:
        assert at_ranks(teams, step) == [[0, 1, 2]] * 3
        is_well(teams)


def test_a_wait_that_is_over_is_over_for_all_even_if_rank_0_collects_nothing_in_it() -> None:
    over: Future[None] = Future()

    def step(team: Team) -> list[int]:
        with team.call("step"):
            with team.ends(lambda: over) as ended:
                if team.rank == 0:
                    over.set_result(None)
                ended.result(30.0)
            return team.all(SAMPLES, team.rank)

    with gang_of(3) as teams:
        assert at_ranks(teams, step) == [[0, 1, 2]] * 3


def test_a_late_end_does_not_end_the_next_wait() -> None:
    """The others have gone on when the future of rank 0 is done."""
    futures: list[Future[None]] = []

    def step(team: Team) -> bool:
        with team.call("step"):
            with team.ends(lambda: futures[0]):
                team.all(SAMPLES, 0)
                if team.rank == 0:
                    futures[0].set_result(None)
            with team.ends(lambda: futures[1]) as ended:
                was_done = ended.done()
                team.all(SAMPLES, 0)
            return was_done

    with gang_of(2) as teams:
        for _ in range(2):
            futures = [Future(), Future()]
            assert at_ranks(teams, step) == [False] * 2


@pytest.mark.parametrize("place", ["before", "within", "within, and caught"])
def test_an_error_of_rank_0_ends_the_wait_of_all(place: str) -> None:
    def step(team: Team) -> list[int]:
        with team.call("step"):
            if team.rank == 0 and place == "before":
                spill()
            try:
                with team.ends(Future) as ended:
                    if team.rank == 0:
                        spill()
                    ended.result(30.0)
            except ValueError:
                if place == "within":
                    raise
            return team.all(SAMPLES, team.rank)

    with gang_of(2) as teams:
        ended = at_ranks(teams, step)
        if place == "within, and caught":
            assert ended == [[0, 1]] * 2
        else:
            assert errors_of(ended) == [
                "ValueError: spilt coffee",
                "ClusterError: rank 0 has raised ValueError: spilt coffee",
            ]
        is_well(teams)


def test_the_others_learn_of_decisions_before_rank_0_waits_for_its_own_average() -> None:
    heard: Future[None] = Future()

    def step(team: Team) -> None:
        with team.call("step"):
            team.decided(NEXT, lambda _: Turn("begin", []), then=lambda _: heard.set_result(None))
            with team.ends(Future):
                heard.result(30.0)
                team.all(SAMPLES, 0)

    with gang_of(2) as teams:
        assert at_ranks(teams, step) == [None, None]


# -- losses and the end


@pytest.mark.parametrize("waits", ["for values", "for a decision", "for the end", "in a wait", "in collectives"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_loss_is_an_error_of_all_wherever_they_wait(lost: int, waits: str) -> None:
    stopped = [threading.Event() for _ in range(3)]

    def step(team: Team) -> None:
        team.when_lost(stopped[team.rank].set)
        with team.call("step"):
            team.all(SAMPLES, 0)
            if team.rank == lost:
                return kill(team)
            match waits:
                case "in a wait":
                    with team.ends(Future) as ended:
                        if team.rank:
                            ended.result(30.0)
                        team.all(SAMPLES, 0)
                case "in collectives":
                    with team.collectives():
                        stopped[team.rank].wait(30.0)
                        raise RuntimeError("Connection closed by peer")
                case "for a decision" if team.rank:
                    team.decided(NEXT, lambda _: Turn("end", []))
                case "for the end" if team.rank:
                    pass
                case _:
                    team.all(SAMPLES, 0)

    with gang_of(3) as teams:
        ended = at_ranks(teams, step)
        for rank in {0, 1, 2} - {lost}:
            assert isinstance(ended[rank], ClusterError), errors_of(ended)
            assert f"rank {lost} of this cluster is lost (its connection has ended)" in str(ended[rank])
            assert stopped[rank].wait(30.0)
            assert not teams[rank].is_alive
            with pytest.raises(ClusterError, match="is lost"), teams[rank].call("step"):
                pass


@pytest.mark.parametrize("where", [0, 1])
def test_an_error_that_follows_from_a_loss_says_who_is_lost(where: int) -> None:
    """As of a round that ends because the run is left when a rank is lost."""
    stopped, is_in_round = threading.Event(), threading.Event()

    def step(team: Team) -> None:
        if team.rank == where:
            team.when_lost(stopped.set)
        with team.call("step"):
            team.all(SAMPLES, 0)
            team.flush()
            if team.rank == where:
                is_in_round.set()
                stopped.wait(30.0)
                spill()
            if team.rank == 2:
                is_in_round.wait(30.0)
                return kill(team)
            team.all(SAMPLES, 0)

    with gang_of(3) as teams:
        error = at_ranks(teams, step)[where]
        assert isinstance(error, ClusterError)
        assert "rank 2 of this cluster is lost" in str(error)
        assert str(error.__cause__) == "spilt coffee"


@pytest.mark.parametrize(
    ("error", "why"),
    [(KeyboardInterrupt(), "it has raised KeyboardInterrupt"), (SystemExit(0), "it has ended in the middle of a call")],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_interrupted_within_a_call_leaves_unless_it_leads(
    culprit: int, error: BaseException, why: str
) -> None:
    def step(team: Team) -> None:
        with team.call("step"):
            team.all(SAMPLES, 0)
            if team.rank == culprit:
                raise error
            team.all(SAMPLES, 0)

    with gang_of(3) as teams:
        ended = at_ranks(teams, step)
        assert ended[culprit] is error
        for other in {0, 1, 2} - {culprit}:
            assert isinstance(ended[other], ClusterError)
        if culprit == 0:  # all know where they are: the next call is well
            is_well(teams)
            return
        assert not teams[culprit]._ties.left_in_order
        for other in {0, 2}:
            assert f"rank {culprit} of this cluster is lost ({why})" in str(ended[other])


def test_a_rank_that_has_left_is_missed_in_the_next_call_only() -> None:
    with gang_of(3) as teams:
        is_well(teams)
        teams[2].leave()
        assert teams[2]._ties.left_in_order
        ended = at_ranks(teams[:2], summed)
        assert str(ended[0]) == "rank 2 has shut its optimizer down, and rank 0 has not"
        assert isinstance(ended[1], ClusterError)
        assert [team.is_alive for team in teams] == [True, True, False]
        with teams[2].call("load_state_dict"), pytest.raises(ClusterError, match="this rank has shut its optimizer"):
            teams[2].all(SAMPLES, 0)


def test_all_leave_in_order_after_a_last_call(teams: Sequence[Team]) -> None:
    def finish(team: Team) -> int:
        total = summed(team)
        team.leave()
        team.leave()
        return total

    at_ranks(teams, finish)
    assert not any(team.is_alive for team in teams)
    assert all(team._ties.left_in_order and team._ties.is_whole for team in teams if isinstance(team, Gang))
