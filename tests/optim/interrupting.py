"""Raises exceptions of signal handlers in calls of an optimizer, and looks whether its state was committed."""

from __future__ import annotations

import collections
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from blake3 import blake3

import shoal


class Late(TimeoutError):
    """The usual alarm."""


class Lost(shoal.AveragingError):
    """A user's own, of a class that Shoal itself catches in many places."""


class Enough(BaseException):
    """A user's own that is no Exception."""


KINDS: tuple[type[BaseException], ...] = (
    KeyboardInterrupt, SystemExit, TimeoutError, Late, OSError, ConnectionResetError, ValueError, RuntimeError, Lost,
    Enough, KeyError, MemoryError,
)  # fmt: skip


class Bell:
    """Rings SIGALRM in calls, and counts what comes out of them.

    Attributes:
        rung: how often the handler has raised.
        came: how often a call has ended by exactly that exception.
        others: other errors that came out.
        raises: the class of the exceptions; None: a random one of `KINDS`.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.rung = self.came = 0
        self.others: collections.Counter[str] = collections.Counter()
        self.raises: type[BaseException] | None = None
        self._raised: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.rung += 1
        self._raised = (self.raises or self._random.choice(KINDS))("rung")
        raise self._raised

    def ring_in(self, call: Callable[[], Any], within: float) -> bool:
        """Make a call, and ring after a random time of at most `within` seconds. Returns whether the call ended by
        that."""
        self._raised = None
        error: BaseException | None = None
        try:
            try:
                # Most of a call's own work is at its beginning.
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + within * self._random.random() ** 2)
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as raised:  # noqa: BLE001 (whatever the handler raises)
            error = raised
        torch.set_grad_enabled(True)  # `torch.no_grad` of the test's own loop may be torn
        if error is None:
            return False
        if error is self._raised:
            self.came += 1
        else:
            self.others["".join(traceback.format_exception(error))] += 1
        error.__traceback__ = None
        return True


@contextmanager
def ringing(seed: int = 0) -> Iterator[Bell]:
    """A bell that rings SIGALRM."""
    bell = Bell(seed)
    before = signal.signal(signal.SIGALRM, bell)
    try:
        yield bell
        assert signal.getsignal(signal.SIGALRM) is bell, "Shoal has left something in the handler's place"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def name_of(tensors: list[torch.Tensor]) -> str:
    """A hash of tensors."""
    hasher = blake3()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


class States:
    """The states of the peers of a run, by tip: each tip names one state."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.torn: list[str] = []

    def look(self, optimizer: shoal.Optimizer, model: torch.nn.Module, *, with_state: bool = False) -> None:
        """Compare the present state with the others of its tip.

        Args:
            with_state: also the wrapped optimizer's state and the scheduler. (A step in the background may be ahead.)
        """
        tensors = list(model.parameters())
        if with_state:
            tensors += [t for p in model.parameters() for _, t in sorted(optimizer.optimizer.state[p].items())]
            assert optimizer.scheduler is not None
            rates = [group["lr"] for group in optimizer.param_groups]
            tensors.append(torch.tensor([float(optimizer.scheduler.last_epoch), *rates], dtype=torch.float64))
        found, tip = name_of(tensors), optimizer.tip
        if self.seen.setdefault(tip, found) != found:
            self.torn.append(tip)


def model_of() -> torch.nn.Linear:
    """The model of each peer."""
    torch.manual_seed(0)
    return torch.nn.Linear(30, 40)


def back(model: torch.nn.Module) -> None:
    """Make gradients."""
    model.zero_grad()
    model(torch.randn(4, 30)).square().sum().backward()


def make(dht: shoal.DHT, model: torch.nn.Module, **options: Any) -> shoal.Optimizer:
    """Make an optimizer of such a model."""
    given: dict[str, Any] = {
        "dht": dht,
        "run_id": "interrupts",
        "params": model.parameters(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=5e-4, momentum=0.5),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        "batch_size_per_step": 4,
        "target_batch_size": 8,
        "matchmaking_time": 1.0,
        "averaging_timeout": 10.0,
        "shutdown_timeout": 10.0,
    }
    return shoal.Optimizer(**{**given, **options})
