"""Whatever order of writes, steps and saves Hypothesis draws, training goes as with plain torch.

`make soak` draws 2,000 orders, and prints how many of each mode, way of writing and class there were.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import shoal
from tests.optim.models import fused
from tests.optim.written import LOADS, WRITES

DRAWS = 250 if "SHOAL_KILLS" in os.environ else 12  # of each mode
WAYS = WRITES | LOADS
RELATIVE: dict[str, Callable[[torch.Tensor], Any]] = {
    "p.data.clamp_": lambda parameter: parameter.data.clamp_(-0.3, 0.3),
    "p.data.mul_": lambda parameter: parameter.data.mul_(0.5),
    "p.data[0] =": lambda parameter: parameter.data[0].fill_(0.25),
}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "offload": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True},
    "delayed average": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True},
    "DiLoCo": {"inner_steps": 2},
    "DiLoCo, offload": {"inner_steps": 2, "offload_optimizer": True},
    "DiLoCo, fragments": {"inner_steps": 2, "fragments": 2},
}
CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
COUNTED: Counter[tuple[str, str, str]] = Counter()

number = st.integers(0, 99)
operation = st.one_of(
    st.tuples(st.just("step"), st.one_of(st.none(), st.sampled_from([*WAYS, *RELATIVE])), number),
    st.tuples(st.just("write"), st.sampled_from([*WAYS, *RELATIVE]), number),
    st.tuples(st.just("save"), st.none(), number),
    st.tuples(st.just("load"), st.none(), number),
)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))


def drawn(model: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]


def write(model: nn.Module, way: str, seed: int) -> None:
    if way in WAYS:
        WAYS[way](model, drawn(model, seed))
    else:
        for parameter in model.parameters():
            RELATIVE[way](parameter)


@dataclass
class Plain:
    """The same training with plain torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inner_steps: int = 0
    fragments: int = 1
    anchor: nn.Module = field(init=False)
    outer: torch.optim.Optimizer = field(init=False)
    steps: int = 0
    epochs: int = 0

    def __post_init__(self) -> None:
        self.anchor = copy.deepcopy(self.model)
        self.outer = shoal.outer.Nesterov()(list(self.anchor.parameters()))

    @property
    def is_at_start(self) -> bool:
        return not self.steps and not self.epochs

    @torch.no_grad()
    def set_anchor(self) -> None:
        for anchor, parameter in zip(self.anchor.parameters(), self.model.parameters(), strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def step(self) -> None:
        if self.is_at_start:
            self.set_anchor()
        self.optimizer.step()
        self.steps += 1
        if self.inner_steps and self.steps == self.inner_steps // self.fragments:
            pairs = list(zip(self.anchor.parameters(), self.model.parameters(), strict=True))
            layers = [pairs[:2], pairs[2:4], pairs[4:]]
            dealt = [pair for layer in layers[self.epochs % self.fragments :: self.fragments] for pair in layer]
            self.outer.zero_grad()
            for anchor, parameter in dealt:
                anchor.grad = anchor - parameter
            self.outer.step()
            for anchor, parameter in dealt:
                parameter.copy_(anchor)
            self.steps, self.epochs = 0, self.epochs + 1

    def forget(self) -> None:
        """The model is the anchor from now on."""
        self.set_anchor()
        self.outer.state.clear()
        self.steps = 0

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.model, self.anchor, self.optimizer, self.outer

    def state(self) -> Any:
        return copy.deepcopy(([part.state_dict() for part in self._parts], self.steps, self.epochs))

    def load(self, state: Any) -> None:
        parts, self.steps, self.epochs = copy.deepcopy(state)
        for load, saved in zip((part.load_state_dict for part in self._parts), parts, strict=True):
            load(saved)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_training_goes_as_with_plain_torch(dht: shoal.DHT, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = itertools.count()

    @settings(
        max_examples=DRAWS,
        derandomize=DRAWS < 100,
        phases=[Phase.generate],  # to shrink would take minutes, and orders are short
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.sampled_from(list(CLASSES)), st.lists(operation, min_size=3, max_size=8))
    def train(kind: str, operations: list[tuple[str, str | None, int]]) -> None:
        model, options = make_model(), dict(MODES[mode])
        chosen = {name: options.pop(name) for name in ("inner_steps", "fragments") if name in options}
        is_outer, is_delayed = bool(chosen), any("delay" in name for name in options)
        plain = Plain(twin := copy.deepcopy(model), fused_if_known(CLASSES[kind](twin.parameters())), **chosen)
        options |= {"outer": shoal.DiLoCo(**chosen)} if is_outer else {"target_batch_size": 4}
        run = {"dht": dht, "run_id": f"{mode} {next(runs)}", "params": model.parameters()}
        optimizer = shoal.Optimizer(**run, optimizer=CLASSES[kind], batch_size_per_step=4, **options)
        saved: list[tuple[Any, Any, Any]] = []
        writes = itertools.count()

        def both(way: str, seed: int) -> None:
            COUNTED[mode, kind, way] += 1
            seed += 1000 * next(writes)  # other values than before: a model that has its old ones again is not refused
            write(model, way, seed)
            write(twin, "p.copy_" if way in WAYS else way, seed)  # with assign=True torch forgets what it trains
            if is_outer and way in LOADS and not plain.is_at_start:
                with pytest.raises(RuntimeError, match="a checkpoint was loaded into the model"):
                    optimizer.step()
                optimizer.load_state_dict(optimizer.optimizer.state_dict())
                plain.forget()

        for what, way, seed in operations:
            if what == "step":
                for parameter, other, grad in zip(
                    model.parameters(), twin.parameters(), drawn(model, 100 + seed), strict=True
                ):
                    parameter.grad, other.grad = grad.clone(), grad.clone()
                optimizer.step()
                plain.step()
                if way is not None and not is_delayed:
                    both(way, seed)
                elif way is not None:  # a step is under way, and overwrites it
                    write(model, way, seed)
                if not (is_outer and way in LOADS):
                    optimizer.state_dict()
            elif what == "write":
                assert way is not None
                both(way, seed)
            elif what == "save":
                saved.append((*copy.deepcopy((model.state_dict(), optimizer.state_dict())), plain.state()))
            elif saved:
                of_model, of_optimizer, of_plain = saved[seed % len(saved)]
                model.load_state_dict(of_model)
                optimizer.load_state_dict(of_optimizer)
                plain.load(of_plain)
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)
        optimizer.shutdown()

    train()
    if DRAWS > 100:
        print(table(mode))


def fused_if_known(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer if isinstance(optimizer, torch.optim.RMSprop) else fused(optimizer)


def table(mode: str) -> str:
    """How often each way of writing was drawn, by class."""
    rows = [f"{mode:32}" + "".join(f"{kind:>15}" for kind in CLASSES)]
    rows += [f"{way:32}" + "".join(f"{COUNTED[mode, kind, way]:>15}" for kind in CLASSES) for way in [*WAYS, *RELATIVE]]
    return "\n".join(["", *rows])
