"""`averager_opts` of an Optimizer: options of the reference's averagers that have a use here, and that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model

Alone = Callable[..., shoal.Optimizer]


@contextmanager
def two_peers(dht: shoal.DHT, *options: dict[str, Any], **arguments: Any) -> Iterator[list[shoal.Optimizer]]:
    """Of one run, each with its own `averager_opts`."""
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as other:
        made = [
            shoal.Optimizer(
                dht=place,
                run_id="options",
                target_batch_size=64,
                params=make_model().parameters(),
                optimizer=OPTIMIZERS["sgd"],
                averager_opts=given,
                **arguments,
            )
            for place, given in zip((dht, other), options, strict=True)
        ]
        try:
            yield made
        finally:
            for optimizer in made:
                optimizer.shutdown()


def test_a_peer_that_does_not_share_its_state_gives_it_to_nobody(dht: shoal.DHT) -> None:
    with two_peers(dht, {"allow_state_sharing": False}, {}) as (keeps, shares):
        with pytest.raises(shoal.AveragingError, match="this peer does not share its state"):
            shares.load_state_from_peers(timeout=20.0)
        assert keeps.load_state_from_peers(timeout=20.0), "it gets the others'"


@pytest.mark.long
def test_times_reach_an_averager_of_ones_own(dht: shoal.DHT) -> None:
    """Those that were given; it has its own defaults."""
    found: list[dict[str, Any]] = []

    def factory(*args: Any, **kwargs: Any) -> shoal.GradientAverager:
        found.append(kwargs)
        return shoal.GradientAverager(*args, **kwargs)

    given = {"request_timeout": 2.0, "sender_timeout": 3.0, "reducer_timeout": 4.0}
    with two_peers(dht, given, {"request_timeout": 2.0}, grad_averager_factory=factory):
        assert {name: found[0].get(name) for name in given} == given
        assert {name: found[1].get(name) for name in given} == dict.fromkeys(given) | {"request_timeout": 2.0}


def test_what_the_reference_needs_and_has_no_use_here_is_taken(alone: Alone) -> None:
    """As its ALBERT example passes them."""
    model = make_model()
    optimizer = alone(
        model,
        optimizer=OPTIMIZERS["sgd"],
        target_batch_size=32,
        averager_opts={
            "bandwidth": None,
            "target_group_size": 256,
            "part_size_bytes": 1 << 19,
            "min_vector_size": 0,
            "declare_state_period": 30.0,
            "daemon": True,
        },
    )
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=32)
    assert optimizer.local_epoch == 1


@pytest.mark.parametrize("name", ["initial_group_bits", "averaging_alpha", "tensor_infos", "compression", "prefix"])
def test_what_would_change_what_a_run_is_is_refused_by_name(alone: Alone, name: str) -> None:
    with pytest.raises(ValueError, match=f"averager_opts has '{name}'.*target_group_size"):
        alone(make_model(), optimizer=OPTIMIZERS["sgd"], target_batch_size=32, averager_opts={name: None})
