"""Random options of every optimizer class, as Hypothesis strategies."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

rate = st.sampled_from([1e-3, 0.01, 0.1])
decay = st.sampled_from([0, 0.01, 0.3])
fraction = st.sampled_from([0.0, 0.5, 0.9, 0.99])
epsilon = st.sampled_from([1e-8, 1e-3])
betas = st.tuples(fraction, st.sampled_from([0.9, 0.99, 0.999]))
flag = st.booleans()


def _options(**named: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={**named, "maximize": flag, "lr": rate})


def _sgd() -> SearchStrategy[dict[str, Any]]:
    nesterov = _options(momentum=st.just(0.9), weight_decay=decay).map(
        lambda options: {**options, "momentum": 0.9, "nesterov": True}
    )
    return nesterov | _options(momentum=fraction, dampening=fraction, weight_decay=decay)


adam = {"betas": betas, "eps": epsilon, "weight_decay": decay}

OPTIONS: dict[type[torch.optim.Optimizer], SearchStrategy[dict[str, Any]]] = {
    torch.optim.SGD: _sgd(),
    torch.optim.Adam: _options(**adam, amsgrad=flag, decoupled_weight_decay=flag),
    torch.optim.AdamW: _options(**adam, amsgrad=flag),
    torch.optim.Adamax: _options(**adam),
    torch.optim.NAdam: _options(**adam, momentum_decay=st.sampled_from([0, 4e-3, 0.1]), decoupled_weight_decay=flag),
    torch.optim.RAdam: _options(**adam, decoupled_weight_decay=flag),
    torch.optim.Adagrad: _options(
        lr_decay=decay, weight_decay=decay, initial_accumulator_value=decay, eps=st.sampled_from([1e-10, 1e-3])
    ),
    torch.optim.Adadelta: _options(rho=fraction, eps=st.sampled_from([1e-6, 1e-3]), weight_decay=decay),
    torch.optim.RMSprop: _options(alpha=fraction, eps=epsilon, weight_decay=decay, momentum=fraction, centered=flag),
    torch.optim.Rprop: _options(
        etas=st.sampled_from([(0.5, 1.2), (0.9, 2.0)]), step_sizes=st.sampled_from([(1e-6, 50), (1e-3, 0.1)])
    ),
    torch.optim.ASGD: _options(
        lambd=st.sampled_from([1e-4, 0.1]), alpha=fraction, t0=st.sampled_from([1e6, 3, 40]), weight_decay=decay
    ),
}

WITH_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

shapes = st.lists(
    st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.sampled_from([(33,), (128,), (5, 7, 3)]),
    min_size=1,
    max_size=4,
)
"""Shapes of several tensors, zero-size and 0-dim ones and tails of vector registers among them."""
