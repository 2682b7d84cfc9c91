"""Each case of an `Optimizer`, with ranks and peers that are slow at any place: all end with the same parameters, and
with those that they have without delays, to the bit. Ranks are threads; nothing here needs a network."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.cluster.team import Team
from shoal.cluster.ties import ClusterError
from tests.cluster.threads import gang_of, threads_take_turns_often  # noqa: F401
from tests.optim.in_memory import Rank, World, in_threads
from tests.soaked import only_in_soak

PEERS, EPOCHS = 2, 4
START = [[1.0] * 3, [0.5] * 4]  # the parameters at rank 0


def gradients(peer: int, step: int, *, of_model: bool = True) -> Callable[[Tensor], Tensor]:
    """Those of one batch. In the modes with delays, when they are computed depends on the time, and so the parameters
    may not count."""
    return lambda parameter: ((parameter if of_model else torch.ones_like(parameter)) + step) / (3.0 + peer)


def train(rank: Rank, *, of_model: bool = True) -> Any:
    """Train for `EPOCHS` epochs of two batches each."""
    rank.begin()
    for step in range(2 * EPOCHS):
        rank.step(gradients(rank.peer, step, of_model=of_model), 4.0 + rank.peer)
    rank.end()
    rank.close()
    return rank.outcome


@contextlib.contextmanager
def world_of(peers: int, seed: int | None, *, together: bool = False) -> Iterator[World]:
    world = World(peers, seed, together=together)
    try:
        yield world
    finally:
        world.close()


def of_single_processes(seed: int | None, *, of_model: bool = True, **given: Any) -> list[Any]:
    with world_of(PEERS, seed) as world:
        ranks = [Rank(world, peer, share=8.0 + 2 * peer, **given) for peer in range(PEERS)]
        return in_threads(*[functools.partial(train, rank, of_model=of_model) for rank in ranks])


def one_process(seed: int | None) -> list[Any]:
    return of_single_processes(seed, max_grad_norm=1.0)


def offloaded_and_delayed(seed: int | None) -> list[Any]:
    return of_single_processes(seed, of_model=False, delay_grad_averaging=True)


def diloco(seed: int | None) -> list[Any]:
    return of_single_processes(seed, outer=shoal.DiLoCo(mix=0.25, fragments=2))


def diloco_in_background(seed: int | None) -> list[Any]:
    """Its average is applied after one inner step; the first epoch has one less."""
    outer = shoal.DiLoCo(inner_steps=2, overlap=1)
    with world_of(PEERS, seed) as world:
        ranks = [Rank(world, peer, share=2.0, outer=outer, target_batch_size=None) for peer in range(PEERS)]
        return in_threads(*[functools.partial(train, rank, of_model=True) for rank in ranks])


def cluster(size: int, seed: int | None) -> list[Any]:
    """Two clusters of so many ranks. Each rank has a strand."""
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(world_of(PEERS, seed))
        gangs = [stack.enter_context(gang_of(size)) for _ in range(PEERS)]
        for peer, gang in enumerate(gangs):
            for team in gang:
                slow_exchanges(team, world.pace(peer, team.rank, 1).delay)
        ranks = [
            Rank(world, peer, team, share=8.0 + 2 * peer, max_grad_norm=1.0)
            for peer, gang in enumerate(gangs)
            for team in gang
        ]
        return in_threads(*[functools.partial(train, rank) for rank in ranks])


def slow_exchanges(team: Team, before: Callable[[], None]) -> None:
    """Do something before each exchange of a rank."""
    decided: Any = team.decided

    def later(*args: Any, **kwargs: Any) -> Any:
        before()
        return decided(*args, **kwargs)

    team.decided = later  # type: ignore[method-assign]


def lent(seed: int | None) -> list[Any]:
    """Each peer trains two models in one thread, in unlike orders. While it waits for the round of one, the other is
    lent. All gradients are equal, since which batch is in which epoch depends on the time."""
    with world_of(PEERS, seed, together=True) as world:
        world.start()

        def train_both(peer: int) -> list[Any]:
            ranks = [
                Rank(world, peer, share=8.0, last=EPOCHS, run_id=name, matchmaking_time=1.0)
                for name in (("one", "other") if peer else ("other", "one"))
            ]
            for rank in ranks:
                rank.lend()
                rank.begin()
            while any(rank.epoch.applied.epoch < EPOCHS for rank in ranks):
                for rank in ranks:
                    rank.step(lambda parameter: torch.full_like(parameter, 2.0), 4.0)
            for rank in ranks:
                rank.end()
                rank.close()
            return [rank.outcome for rank in sorted(ranks, key=lambda rank: rank.settings.run_id)]

        found = in_threads(*[functools.partial(train_both, peer) for peer in range(PEERS)])
        # The weights of the rounds, and with them the tips, depend on the time.
        return [[(tip.epoch, digest, values) for tip, _, digest, values in outcomes] for outcomes in found]


CASES: dict[str, Callable[[int | None], list[Any]]] = {
    "one process": one_process,
    "offloaded and delayed": offloaded_and_delayed,
    "DiLoCo": diloco,
    "DiLoCo in the background": diloco_in_background,
    "cluster of 2": functools.partial(cluster, 2),
    "cluster of 3": functools.partial(cluster, 3),
    "several runs, lent": lent,
}
without_delays = functools.cache(lambda case: CASES[case](None))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_without_delays_all_peers_end_alike(case: str) -> None:
    found = without_delays(case)
    by_peer = [found[len(found) // PEERS * peer : len(found) // PEERS * (peer + 1)] for peer in range(PEERS)]
    if case == "several runs, lent":
        assert [epoch for outcomes in found for epoch, *_ in outcomes] == [EPOCHS] * 4
        assert found[0][0][2] == found[0][1][2] != START
    else:
        assert {(applied.epoch, tip) for applied, tip, *_ in found} == {(EPOCHS, found[0][0])}
        assert all(values != START for *_, values in found)
    if "DiLoCo" in case:  # the model keeps a part of its own; the anchors are alike
        by_peer = [[digest for _, _, digest, _ in outcomes] for outcomes in by_peer]
    assert all(each == by_peer[0] for each in by_peer)


@pytest.mark.long
@pytest.mark.parametrize(("case", "size"), [("one process", 1), ("cluster of 2", 2), ("cluster of 3", 3)])
def test_it_is_the_step_of_the_mean_of_all_samples(case: str, size: int) -> None:
    """As torch makes it in one process."""
    model = [
        torch.nn.Parameter(values)
        for rank in range(size)
        for values in (torch.full((3,), 1.0 + rank), torch.full((2, 2), 0.5))
    ]
    optimizer = torch.optim.SGD(model, lr=0.125, momentum=0.5)
    for epoch in range(EPOCHS):
        batches = [(peer, step, 4.0 + peer) for peer in range(PEERS) for step in (2 * epoch, 2 * epoch + 1)]
        for parameter in model:
            all_of = [weight * gradients(peer, step)(parameter.detach()) for peer, step, weight in batches]
            parameter.grad = torch.stack(all_of).sum(0) / 18.0
        torch.nn.utils.clip_grad_norm_(model, 1.0)
        optimizer.step()
    found = [values for outcome in without_delays(case)[:size] for values in outcome[-1]]
    for mine, theirs in zip(found, model, strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs.detach().flatten())


def check(case: str, seed: int) -> None:
    assert CASES[case](seed) == without_delays(case), (case, seed)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "seeds",
    [range(10), *(pytest.param(range(first, first + 100), marks=only_in_soak) for first in range(10, 1000, 100))],
    ids=str,
)
def test_all_end_as_without_delays(case: str, seeds: range) -> None:
    for seed in seeds:
        check(case, seed)


# -- errors, in a cluster of one peer


@contextlib.contextmanager
def one_cluster(size: int = 2) -> Iterator[list[Rank]]:
    with contextlib.ExitStack() as stack:
        world = World(1, None)
        stack.callback(world.close)
        ranks = [Rank(world, 0, team) for team in stack.enter_context(gang_of(size))]
        yield ranks
        for rank in ranks:
            rank.close()


def calls(rank: Rank, *does: Callable[[], object]) -> list[Any]:
    """Make these calls of the cluster at one rank. Returns what each has raised, or None."""
    found: list[Any] = []
    for do in does:
        try:
            do()
            found.append(None)
        except (ClusterError, ValueError) as error:
            found.append(error)
    return found


@functools.cache
def exchanges_of_training() -> int:
    """The number of exchanges of a rank in the training of `failing`."""
    counted: list[int] = []
    with one_cluster() as ranks:
        slow_exchanges(ranks[1].team, lambda: counted.append(1))
        in_threads(*[functools.partial(failing, rank) for rank in ranks])
    return len(counted)


def failing(rank: Rank) -> list[Any]:
    steps = [functools.partial(rank.step, gradients(0, step), 4.0) for step in range(4)]
    return calls(rank, rank.begin, *steps, rank.end)


@pytest.mark.long
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_of_one_rank_at_each_exchange_is_an_error_of_all(culprit: int) -> None:
    total = exchanges_of_training()
    assert total >= 20
    for number in range(total):
        left = [number]

        def fail(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise ValueError("spilt coffee")

        with one_cluster() as ranks:
            slow_exchanges(ranks[culprit].team, fail)
            found = in_threads(*[functools.partial(failing, rank) for rank in ranks])
        mine, others = found[culprit], found[1 - culprit]
        first = next(at for at, each in enumerate(mine) if each is not None)
        assert "spilt coffee" in str(mine[first]), number
        # An error at another rank than 0 is told with what that rank next brings.
        heard = next(at for at, each in enumerate(others) if each is not None)
        assert heard == first or (culprit and heard == first + 1), (number, found)
        assert isinstance(others[heard], ClusterError), (number, found)
        assert f"rank {culprit} has raised ValueError: spilt coffee" in str(others[heard]), (number, found)


PLACES: dict[str, Callable[[Rank], tuple[Any, str]]] = {
    "an exchange": lambda rank: (rank.team, "decided"),
    "a batch is added": lambda rank: (rank.rounds.work, "add"),
    "the batches are frozen": lambda rank: (rank.rounds.work, "freeze"),
    "rounds begin": lambda rank: (rank.rounds, "begin"),
    "rounds average": lambda rank: (rank.rounds, "average"),
    "the optimizer steps": lambda rank: (rank.state, "step"),
    "the model gets the step": lambda rank: (rank.rounds.work, "apply"),
}


def spill_at(rank: Rank, place: str, nth: int) -> None:
    """One of the calls there raises an error, the `nth`, before it does anything."""
    owner, name = PLACES[place](rank)
    usual, left = getattr(owner, name), [nth]

    def counting(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise ValueError("spilt coffee")
        return usual(*args, **kwargs)

    setattr(owner, name, counting)


@pytest.mark.long
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_after_an_error_at_any_place_ranks_train_on_or_are_told_to_load(place: str, culprit: int) -> None:
    for nth in range(24 if place == "an exchange" else 2):
        with one_cluster() as ranks:
            in_threads(*[rank.begin for rank in ranks])
            spill_at(ranks[culprit], place, nth)
            steps = [[functools.partial(rank.step, gradients(0, step), 4.0) for step in range(8)] for rank in ranks]
            found = in_threads(
                *[functools.partial(calls, rank, *does) for rank, does in zip(ranks, steps, strict=True)]
            )
            said = [[str(error) for error in each if error is not None] for each in found]
            for each in said:
                assert 1 <= sum("spilt coffee" in error for error in each) <= 2, (nth, found)
                assert all("spilt coffee" in error or "load a state" in error for error in each), (nth, found)
            if not any("load a state" in error for error in said[0]):
                assert ranks[0].outcome[:3] == ranks[1].outcome[:3], (nth, found)
                assert ranks[0].epoch.applied.epoch >= 2, (nth, found)


@pytest.mark.parametrize("deaf", [0, 1])
def test_if_one_rank_has_no_average_when_the_epoch_has_ended_all_are_behind(deaf: int) -> None:
    """They go on with what the others have, or, as here, where nobody has anything, try again."""
    with one_cluster() as ranks:
        first = ranks[0]
        start = [rank.values for rank in ranks]
        ranks[deaf].averagers[0].hears_nothing = True

        def until_behind(rank: Rank) -> None:
            rank.begin()
            rank.step(gradients(0, 0), 4.0)
            if rank is first:
                past = first.run.past

                def ended(tip: Any) -> Any:
                    future = past(tip)
                    future.set_result(None)
                    return future

                first.run.past = ended  # type: ignore[method-assign]
            rank.step(gradients(0, 1), 4.0)

        in_threads(*[functools.partial(until_behind, rank) for rank in ranks])
        assert [rank.values for rank in ranks] == start
        assert [rank.epoch.applied.epoch for rank in ranks] == [0, 0]
        assert first.run.contributions == [], "it joins no round of the run"
        assert ("ask", []) in first.run.done, "it has asked where the others are"
        assert [rank.rounds.work.samples for rank in ranks] == [8.0, 8.0], "nothing is lost"
