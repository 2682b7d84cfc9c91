"""A toy of each kind trains two peers, without a change in the library: so a new mode is an object, and no branch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import Tensor, nn

import shoal
from shoal.averaging.exchange import Vector
from shoal.compression import NoCompression, TensorRole, plan_codecs
from shoal.flat import Layout
from shoal.optim import choice
from shoal.optim import optimizer as of_users
from shoal.optim.accumulator import in_grad
from shoal.optim.pieces import Own
from shoal.optim.result import StepResult
from shoal.optim.rounds import InTheRun, Rounds
from shoal.optim.work import Batch, Stepper, Work
from tests.optim.in_memory import in_threads

EPOCHS, RATE = 3, 0.25
HANGS_AFTER = 60.0  # seconds


class Signs(Work):
    """Brings the signs of the summed gradients: each element of the average is a vote on its direction."""

    def __init__(self, optimizer: Any, state: Any) -> None:
        super().__init__(optimizer, state.pieces)
        self.wrapped, self._own, self._targets = state.wrapped, state.trained, state.stepped
        layout = Layout.of(self._own).on("cpu")
        self._vector = Vector(layout, plan_codecs(NoCompression(), layout, TensorRole.GRADIENT))
        self._sums = [torch.zeros_like(parameter) for parameter in self._own]
        self._samples = 0.0

    @property
    def samples(self) -> float:
        return self._samples

    def _use(self, batch: Batch) -> None:
        self._samples += batch.samples
        for total, parameter in zip(self._sums, self._own, strict=True):
            total.add_(parameter.grad)

    def reset(self) -> None:
        self._samples = 0.0
        for total in self._sums:
            total.zero_()

    def freeze(self) -> bool:
        for brought, total in zip(self._vector.inputs.views(), self._sums, strict=True):
            brought.copy_(total.sign())
        return True

    def vectors(self, epoch: int) -> Sequence[Vector]:
        return [self._vector]

    @property
    def all_vectors(self) -> Sequence[Sequence[Vector]]:
        return [[self._vector]]

    def step(self, state: Stepper, result: StepResult) -> None:
        state.step(in_grad(self._targets, [each.clone() for each in self._vector.outputs.views()]), result)


class Shelf:
    """Where the peers of this process find what the others bring."""

    def __init__(self, peers: int) -> None:
        self._peers, self._changed = peers, threading.Condition()
        self._brought: dict[int, dict[bytes, tuple[float, list[Tensor]]]] = {}

    def put(self, epoch: int, key: bytes, samples: float, flat: Sequence[Tensor]) -> None:
        with self._changed:
            self._brought.setdefault(epoch, {})[key] = samples, [each.clone() for each in flat]
            self._changed.notify_all()

    def mean(self, epoch: int) -> list[Tensor]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._brought[epoch]) == self._peers, HANGS_AFTER)
            of_all = [self._brought[epoch][key] for key in sorted(self._brought[epoch])]
        total = sum(samples for samples, _ in of_all)
        weighted = [[samples / total * each for each in flat] for samples, flat in of_all]
        return [torch.stack(parts).sum(0) for parts in zip(*weighted, strict=True)]


class OnAShelf(Rounds):
    """Averages before the round of the run, without any network."""

    def __init__(self, work: Work, key: bytes, shelf: Shelf) -> None:
        super().__init__(work)
        self._key, self._shelf, self._epoch = key, shelf, -1
        self.life: list[str] = []

    def enter(self, called: Callable[[], bool]) -> None:
        self.life.append("enter")

    def leave(self) -> None:
        self._epoch = -1
        self.life.append("leave")

    @property
    def held(self) -> bool:
        return self._epoch >= 0

    def begin(self, epoch: int, samples: float) -> None:
        self._epoch, self.brought = epoch, samples
        self._shelf.put(epoch, self._key, samples, self._flat("inputs"))

    def _flat(self, what: str) -> list[Tensor]:
        vectors = self.work.vectors(self._epoch)
        return [flat for vector in vectors for flat in getattr(vector, what).flat]

    def average(self, timeout: float, ended: Future[None]) -> bytes:
        outputs = self._flat("outputs")
        for output, mean in zip(outputs, self._shelf.mean(self._epoch), strict=True):
            output.copy_(mean)
        return blake3(b"".join(output.numpy().tobytes() for output in outputs)).digest()

    def name(self, by_rank: Sequence[bytes]) -> bytes:
        return by_rank[0]

    def used(self) -> None:
        self._epoch = -1


class Coarse(Own):
    """The model computes with parameters that are rounded to eighths. Its gradients are those of what is stepped
    (straight-through)."""

    def __init__(self, model: Sequence[Tensor], frozen: Sequence[Tensor], placement: Any) -> None:
        super().__init__(model, frozen, placement)
        self.seen = [nn.Parameter(each.detach().clone()) for each in model]
        for own, seen in zip(model, self.seen, strict=True):
            seen.register_post_accumulate_grad_hook(functools.partial(self._pass_on, own))
        self.spread()
        made_coarse.append(self)

    @staticmethod
    def _pass_on(own: Tensor, seen: Tensor) -> None:
        own.grad, seen.grad = seen.grad, None

    @torch.no_grad()
    def spread(self) -> None:
        for own, seen in zip(self.model, self.seen, strict=True):
            seen.copy_((own * 8.0).round() / 8.0)


made_coarse: list[Coarse] = []


@pytest.fixture
def dhts() -> Iterator[list[shoal.DHT]]:
    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
        yield [first, second]


def model_of() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, -2.0, 0.25])), nn.Parameter(torch.full((2,), 0.5))]


def optimizers(dhts: list[shoal.DHT], models: list[list[nn.Parameter]], **given: Any) -> list[shoal.Optimizer]:
    return [
        shoal.Optimizer(
            dht=dht, run_id="toys", target_batch_size=16, batch_size_per_step=4, params=model, matchmaking_time=10.0,
            optimizer=lambda params: torch.optim.SGD(params, lr=RATE), **given,
        )
        for dht, model in zip(dhts, models, strict=True)
    ]  # fmt: skip


def train(made: list[shoal.Optimizer], gradient: Callable[[int, int], None]) -> None:
    """Each peer makes two steps in an epoch, in a thread of its own.

    Args:
        gradient: sets the gradients of a batch, given the numbers of the peer and the step.
    """

    def run(peer: int) -> None:
        for epoch in range(EPOCHS):
            for step in (2 * epoch, 2 * epoch + 1):
                gradient(peer, step)
                made[peer].step()
            while made[peer].local_epoch == epoch:
                made[peer].step(batch_size=0)

    try:
        in_threads(*[functools.partial(run, peer) for peer in range(len(made))])
        assert made[0].tip == made[1].tip
    finally:
        for each in made:
            each.shutdown()


def setter(models: list[list[nn.Parameter]], signs: Sequence[float] = (1.0, 1.0)) -> Callable[[int, int], None]:
    """Gradients of `step + 1` times the sign of the peer."""

    def gradient(peer: int, step: int) -> None:
        for parameter in models[peer]:
            parameter.grad = torch.full_like(parameter, signs[peer] * (step + 1.0))

    return gradient


def same(models: list[list[nn.Parameter]]) -> list[list[float]]:
    """The values of all peers, which are equal to the bit."""
    values = [[parameter.tolist() for parameter in model] for model in models]
    assert values[0] == values[1]
    return values[0]


def moved(by: float) -> list[list[float]]:
    return [(parameter.detach() - by).tolist() for parameter in model_of()]


@pytest.mark.long
@pytest.mark.parametrize(("signs", "by"), [((1.0, 1.0), EPOCHS * RATE), ((1.0, -1.0), 0.0)], ids=["alike", "against"])
def test_a_toy_work(dhts: list[shoal.DHT], monkeypatch: pytest.MonkeyPatch, signs: Sequence[float], by: float) -> None:
    def make_rounds(optimizer: Any, settings: Any, state: Any, made: Any, shards: Any, dht: Any) -> Rounds:
        return InTheRun(Signs(optimizer, state))

    monkeypatch.setattr(of_users, "make_rounds", make_rounds)
    models = [model_of(), model_of()]
    train(optimizers(dhts, models), setter(models, signs))
    assert same(models) == moved(by)


@pytest.mark.long
def test_a_toy_rounds(dhts: list[shoal.DHT], monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, made = Shelf(2), list[OnAShelf]()
    usual = choice.make_rounds

    def make_rounds(optimizer: Any, settings: Any, state: Any, torchs: Any, shards: Any, dht: Any) -> Rounds:
        work = usual(optimizer, settings, state, torchs, shards, dht).work
        made.append(OnAShelf(work, dht.peer_id.key, shelf))
        return made[-1]

    monkeypatch.setattr(of_users, "make_rounds", make_rounds)
    models = [model_of(), model_of()]
    train(optimizers(dhts, models), setter(models))
    assert same(models) == moved(RATE * (1.5 + 3.5 + 5.5))
    assert all(each.life[0] == "enter" and each.life[-1] == "leave" and not each.held for each in made)


@pytest.mark.long
def test_a_toy_pieces(dhts: list[shoal.DHT], monkeypatch: pytest.MonkeyPatch) -> None:
    made_coarse.clear()
    monkeypatch.setattr(choice, "Own", Coarse)
    models = [model_of(), model_of()]
    peers = optimizers(dhts, models)
    coarse = list(made_coarse)

    def gradient(peer: int, step: int) -> None:
        with torch.enable_grad():
            torch.stack([(each * (step + 1.0) * 0.125).sum() for each in coarse[peer].seen]).sum().backward()

    train(peers, gradient)
    finest = moved(RATE * 0.125 * (1.5 + 3.5 + 5.5))
    assert same(models) == finest
    seen = [[each.tolist() for each in pieces.seen] for pieces in coarse]
    assert seen[0] == seen[1] == [((torch.tensor(each) * 8).round() / 8).tolist() for each in finest] != finest
