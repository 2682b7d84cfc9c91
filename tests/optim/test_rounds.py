"""What every kind of `Rounds` promises, with averagers that stand in for those of a swarm."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

import shoal
from shoal.averaging.exchange import Vector
from shoal.compression import NoCompression, TensorRole, plan_codecs
from shoal.flat import Layout
from shoal.optim.grad_averager import AveragerSum
from shoal.optim.rounds import AveragerRounds, InTheRun, Rounds, Strand, StrandRounds, own_name
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected

KEY = bytes(range(32))
LONG = 60.0  # seconds; nothing here takes so long


class Averager:
    """Stands in for a rank's averager. The test says how each of its rounds ends: with its digest, or an error."""

    def __init__(self, key: bytes = KEY) -> None:
        self.peer_id, self.engine = SimpleNamespace(key=key), self
        self.dht = SimpleNamespace(node=SimpleNamespace(), peer_id=self.peer_id)
        self.dht.node.bytes_sent = self.dht.node.bytes_received = 0
        self.runs, self.joined, self.waited, self.got_on_at = False, 0, 0, 0.0
        self.controls: list[Future[Any]] = []
        self.weights: list[float] = []
        self.last_round: Any = None

    def is_alive(self) -> bool:
        return self.runs

    def run_in_background(self, await_ready: bool = True) -> None:
        self.runs, self.joined = True, self.joined + 1

    def wait_until_ready(self) -> None:
        self.waited += 1

    def shutdown(self) -> None:
        self.runs = False
        for control in self.controls:
            control.cancel()

    def enter(self) -> None:
        if not self.runs:
            self.run_in_background()

    leave = shutdown

    def begin(self, weight: float) -> Future[Any]:
        self.weights.append(weight)
        self.controls.append(Future())
        return self.controls[-1]

    def end(self, name: bytes = b"", error: Exception | None = None) -> None:
        """End the round."""
        self.dht.node.bytes_sent += 10
        self.dht.node.bytes_received += 20
        if error is not None:
            self.controls[-1].set_exception(error)
            return
        self.last_round = SimpleNamespace(digest=name.hex())
        self.controls[-1].set_result({})

    def agreed_options(self) -> dict[str, str]:
        return {"compression": "none", "batches": "all"}

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and "kept" not in state:
            raise ValueError("of another averager")
        self.loaded = state


@dataclass
class Work:
    """Stands in for what is averaged: one vector in each of two turns."""

    turns: list[list[Vector]]
    schema: bytes = b"schema"

    def vectors(self, epoch: int) -> Sequence[Vector]:
        return self.turns[epoch % len(self.turns)]

    @property
    def all_vectors(self) -> Sequence[Sequence[Vector]]:
        return self.turns

    def schemas(self) -> list[bytes]:
        return [self.schema]


def vector() -> Vector:
    layout = Layout.of([torch.zeros(4)])
    made = Vector(layout, plan_codecs(NoCompression(), layout, TensorRole.GRADIENT))
    made.inputs.flat[0].fill_(3.0)
    made.outputs.flat[0].zero_()
    return made


@dataclass
class Made:
    rounds: Rounds
    averagers: list[Averager] = field(default_factory=list)  # of the first turn, in the order of the rank's strands
    vectors: list[Vector] = field(default_factory=list)
    idle: list[Averager] = field(default_factory=list)  # of the other turn

    def names(self) -> bytes:
        """End all rounds, and return the names of the averages."""
        for number, averager in enumerate(self.averagers):
            averager.end(digest(number))
        return b"".join(map(digest, range(len(self.averagers))))


def digest(number: int) -> bytes:
    return blake3(bytes([number])).digest()


def in_the_run() -> Made:
    vectors = [vector(), vector()]
    work: Any = Work([[each] for each in vectors])
    return Made(InTheRun(work), [], vectors)


def of_averager() -> Made:
    averager = Averager()
    total: Any = SimpleNamespace(
        averager=averager, begin=lambda: averager.begin(0.0) if averager.is_alive() else None, brought=[]
    )
    work: Any = Work([])
    return Made(AveragerRounds(work, KEY, total), [averager])


def of_strands(count: int = 1, turns: int = 1) -> Made:
    vectors = [[vector() for _ in range(count)] for _ in range(turns)]
    averagers = [[Averager(bytes([turn, number]) * 16) for number in range(count)] for turn in range(turns)]
    work: Any = Work(vectors)
    strands: Any = [list(map(Strand, *each)) for each in zip(vectors, averagers, strict=True)]
    rounds = StrandRounds(work, strands, [0] * count, b"fragments" if turns > 1 else b"")
    return Made(rounds, averagers[0], vectors[0], [each for turn in averagers[1:] for each in turn])


KINDS: dict[str, Callable[[], Made]] = {
    "in the run": in_the_run,
    "of an averager": of_averager,
    "of a strand": of_strands,
    "of two strands in two turns": lambda: of_strands(2, 2),
}
BEFORE = list(KINDS)[1:]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(kind: str) -> Made:
    return KINDS[kind]()


def begun(made: Made, samples: float = 8.0) -> Made:
    made.rounds.enter(lambda: False)
    made.rounds.begin(0, samples)
    return made


def still() -> Future[None]:
    """The others have not ended the epoch."""
    return Future()


def over() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


# -- an epoch


def test_an_epoch_from_beginning_to_end(kind: str, made: Made) -> None:
    rounds = made.rounds
    assert (rounds.precede, rounds.held) == (kind != "in the run", False)
    begun(made)
    assert rounds.held == rounds.precede
    names = made.names()
    assert rounds.average(LONG, still()) == names
    assert rounds.average(LONG, still()) == names, "another try uses the same averages"
    assert rounds.held == rounds.precede
    assert rounds.brought == (8.0 if rounds.precede else 0.0)
    rounds.used()
    assert not rounds.held


def test_the_runs_round_averages_only_what_no_round_before_has(kind: str, made: Made) -> None:
    begun(made)
    if kind == "in the run":
        assert [list(turn) for turn in made.rounds.turns] == [[each] for each in made.vectors]
        assert [list(made.rounds.vectors(epoch)) for epoch in range(3)] == [[made.vectors[n]] for n in (0, 1, 0)]
        assert made.rounds.schemas() == [b"schema"]
        made.rounds.begin(1, 8.0)
        made.rounds.use_local()
        assert [float(each.outputs.flat[0][0]) for each in made.vectors] == [0.0, 3.0], "those of that epoch"
        return
    assert (list(made.rounds.turns), list(made.rounds.vectors(0))) == ([], [])
    assert made.rounds.schemas() == ([b"fragments"] if "turns" in kind else [])
    made.rounds.use_local()
    assert all(float(each.outputs.flat[0][0]) == 0.0 for each in made.vectors), "the result before stays in use"


def test_the_runs_round_is_settled_with_its_own_vectors() -> None:
    made, settled = in_the_run(), list[tuple[int, Any]]()
    for number, each in enumerate(made.vectors):
        each.settle = lambda outcome, number=number: settled.append((number, outcome))  # type: ignore[method-assign,misc]
    outcome: Any = SimpleNamespace(begin=SimpleNamespace(tip=SimpleNamespace(epoch=3)))
    made.rounds.settle(outcome)
    assert settled == [(1, outcome)]
    of_strands().rounds.settle(outcome)


def test_rounds_before_the_runs_begin_before_others_have_ended_the_epoch(made: Made) -> None:
    """Afterwards they would be those of the next epoch."""
    rounds = made.rounds
    assert rounds.may_begin(is_past=False)
    assert rounds.may_begin(is_past=True) == (not rounds.precede)


def test_names_are_in_the_order_of_strands() -> None:
    rounds: Any = StrandRounds(of_strands().rounds.work, [[]], [1, 0, 1])
    names = [digest(number) for number in range(3)]
    expected = blake3(b"".join(names)).digest()
    assert rounds.name([names[1], names[0] + names[2]]) == expected
    assert rounds.name([names[2], names[0] + names[1]]) != expected


def test_the_name_of_all_averages(kind: str, made: Made) -> None:
    mine, other = digest(1), digest(2)
    if kind == "in the run":
        assert made.rounds.name([b""]) == b"", "the run's round makes them"
    elif kind == "of an averager":
        assert made.rounds.name([mine]) == mine
    else:
        count = len(made.averagers)
        assert len(made.rounds.name([mine * count])) == 32
        assert made.rounds.name([mine * count]) == made.rounds.name([mine * count]) != made.rounds.name([other * count])


# -- what goes wrong


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
@pytest.mark.parametrize("at", [0, -1])
def test_of_a_round_that_fails_the_average_is_the_own_mean(
    made: Made, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    begun(made)
    names = [digest(number) for number in range(len(made.averagers))]
    for number, averager in enumerate(made.averagers):
        fails = averager is made.averagers[at]
        averager.end(digest(number), AveragingError("nobody is here") if fails else None)
    names[at] = own_name(made.averagers[at].peer_id.key)
    assert made.rounds.average(LONG, still()) == b"".join(names)
    assert caplog.text.count("the gradients were not averaged (nobody is here)") == 1
    local = [float(each.outputs.flat[0][0]) for each in made.vectors]
    assert local == [3.0 if each is made.vectors[at] else 0.0 for each in made.vectors]
    assert made.rounds.average(LONG, still()) == b"".join(names), "another try has the same"


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
def test_a_round_without_progress_fails_in_time(made: Made) -> None:
    begun(made)
    names = made.rounds.average(0.02, still())
    assert names == b"".join(own_name(averager.peer_id.key) for averager in made.averagers)
    assert all(averager.controls[0].cancelled() for averager in made.averagers)


def test_the_same_with_a_real_averager(dht: shoal.DHT) -> None:
    """In a round that does not begin, for want of a second peer."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    total = AveragerSum(shoal.GradientAverager, [parameter], dht=dht, prefix="own gradients", min_group_size=2)
    rounds = AveragerRounds(in_the_run().rounds.work, dht.peer_id.key, total)
    rounds.enter(lambda: False)
    total.accumulate(8)
    assert total.freeze()
    rounds.begin(0, 8.0)
    timer = threading.Timer(0.05, (ended := still()).set_result, [None])
    timer.start()
    with pytest.raises(Behind, match="the others have ended the epoch"):
        rounds.average(LONG, ended)
    timer.join()
    rounds.begin(0, 8.0)
    assert rounds.average(0.05, still()) == rounds.average(0.05, still()) == own_name(dht.peer_id.key)
    assert not rounds.held, "the next try begins another round"
    rounds.leave()


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
def test_who_is_not_in_its_averagers_run_has_its_own_mean(made: Made) -> None:
    """The others' round had begun when it came."""
    made.rounds.begin(0, 8.0)
    assert made.rounds.average(LONG, still()) == b"".join(own_name(each.peer_id.key) for each in made.averagers)
    assert all(not averager.controls for averager in made.averagers)


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
@pytest.mark.parametrize("later", [False, True])
def test_if_the_others_have_ended_the_epoch_this_peer_is_behind(made: Made, later: bool) -> None:
    begun(made)
    ended = still() if later else over()
    timer = threading.Timer(0.02, ended.set_result, [None])
    if later:
        timer.start()
    with pytest.raises(Behind, match="the others have ended the epoch"):
        made.rounds.average(LONG, ended)
    assert made.averagers[0].controls[0].cancelled()
    if later:
        timer.join()


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
def test_an_average_that_is_there_counts_although_the_epoch_has_ended(made: Made) -> None:
    begun(made)
    names = made.names()
    assert made.rounds.average(LONG, over()) == names
    assert made.rounds.average(LONG, cancelled()) == names


def cancelled() -> Future[None]:
    future: Future[None] = Future()
    future.cancel()
    return future


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
@pytest.mark.parametrize("error", [Rejected("other terms"), Behind("the swarm is at epoch 5")])
def test_other_terms_and_other_epochs_are_raised(made: Made, error: Exception) -> None:
    begun(made)
    made.averagers[0].end(error=error)
    with pytest.raises(type(error), match=str(error)):
        made.rounds.average(LONG, still())


# -- life


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
def test_who_leaves_holds_nobody_up(made: Made) -> None:
    begun(made)
    made.rounds.leave()
    assert not made.rounds.held
    assert not any(averager.runs for averager in [*made.averagers, *made.idle])
    assert all(averager.controls[0].cancelled() for averager in made.averagers)
    begun(made)
    assert all(averager.runs for averager in [*made.averagers, *made.idle])
    assert made.rounds.average(LONG, still_after(made)) == b"".join(map(digest, range(len(made.averagers))))


def still_after(made: Made) -> Future[None]:
    made.names()
    return still()


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
def test_to_stop_ends_the_wait_of_another_thread(made: Made) -> None:
    begun(made)
    found: list[bytes] = []
    waits = threading.Thread(target=lambda: found.append(made.rounds.average(LONG, still())))
    waits.start()
    made.rounds.stop()
    waits.join(LONG)
    assert found == [b"".join(own_name(each.peer_id.key) for each in made.averagers)]


@pytest.mark.parametrize("kind", BEFORE, indirect=True)
def test_to_enter_twice_joins_once(made: Made) -> None:
    for _ in range(2):
        made.rounds.enter(lambda: False)
    assert all(averager.joined == 1 for averager in [*made.averagers, *made.idle])


def test_a_peer_stays_out_of_its_averagers_round_once_the_end_of_the_epoch_has_begun() -> None:
    """They wait for all members. Strands wait for nobody, and who comes late gets the result."""
    answers = [True]
    made = of_averager()
    made.rounds.enter(lambda: answers.pop())
    assert (made.averagers[0].runs, made.averagers[0].joined) == (False, 0)
    answers += [True, False]  # it begins while this peer joins
    made.rounds.enter(lambda: answers.pop())
    assert (made.averagers[0].runs, made.averagers[0].joined) == (False, 1)
    strands = of_strands(2)
    strands.rounds.enter(lambda: True)
    assert all(averager.runs and averager.waited for averager in strands.averagers)


def test_a_strand_brings_its_samples_in_its_turn() -> None:
    made = of_strands(2, 2)
    begun(made, 5.0)
    made.names()
    made.rounds.average(LONG, still())
    made.rounds.used()
    made.rounds.begin(1, 7.0)
    assert [averager.weights for averager in made.averagers] == [[5.0], [5.0]]
    assert [averager.weights for averager in made.idle] == [[7.0], [7.0]]


def test_the_cost_of_the_rounds_before() -> None:
    made = begun(of_strands(2))
    made.names()
    made.rounds.average(LONG, still())
    assert (made.rounds.cost.sent, made.rounds.cost.received) == (10, 20), "those of the node, which all strands use"
    assert 0.0 <= made.rounds.cost.seconds < LONG


# -- what peers compare, and what is saved


def test_what_peers_compare(kind: str, made: Made) -> None:
    terms = made.rounds.terms()
    assert terms == KINDS[kind]().rounds.terms()
    assert list(terms) == {"in the run": [], "of an averager": ["grad_averager_factory"]}.get(kind, ["strands"])
    if kind == "of an averager":
        assert terms["grad_averager_factory"] == "Averager (batches all, compression none)", "in the order of names"
    elif kind.startswith("of "):
        assert terms["strands"] == str(len(made.averagers))


def test_what_is_carried_from_epoch_to_epoch(kind: str, made: Made) -> None:
    carried = made.rounds.carried()
    made.rounds.load_carried({})
    made.rounds.load_carried(carried)
    with pytest.raises(ValueError, match=r"this optimizer has none|of another averager"):
        made.rounds.load_carried({"unknown": 1})
    if kind == "of an averager":
        averager: Any = made.rounds.averager
        assert averager is made.averagers[0]
        assert averager.loaded == carried == {"kept": 1}
    else:
        assert (carried, made.rounds.averager) == ({}, None)
