"""Reused gradients with delayed steps: each gradient is in one average, and counts once."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

import shoal

EPOCHS = 15


@pytest.mark.parametrize("reuse", [False, True])
def test_the_average_of_equal_gradients_is_that_gradient(dht: shoal.DHT, reuse: bool) -> None:
    """All gradients are 1 and the rate is 1, so an epoch moves the parameter by -1, however the peers' steps fall."""
    found: dict[int, torch.Tensor] = {}
    together = threading.Barrier(2)

    def train(index: int, place: shoal.DHT) -> None:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = shoal.Optimizer(
            dht=place,
            run_id=f"reuse {reuse}",
            target_batch_size=32,
            batch_size_per_step=4,
            params=[parameter],
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            reuse_grad_buffers=reuse,
            delay_grad_averaging=True,
            matchmaking_time=3.0,
        )
        together.wait()
        draws = random.Random(index)
        while optimizer.local_epoch < EPOCHS:
            time.sleep(draws.random() * 0.01 * (1 + 2 * index))
            parameter.sum().backward()
            time.sleep(draws.random() * 0.02)
            optimizer.step()
            if not reuse:
                optimizer.zero_grad()
        optimizer.state_dict()  # what is under way is applied
        found[index] = parameter.detach() + optimizer.local_epoch
        together.wait()
        optimizer.shutdown()

    with shoal.DHT(dht.get_visible_maddrs(), start=True) as other:
        threads = [threading.Thread(target=train, args=pair) for pair in enumerate((dht, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for value in found.values():
        torch.testing.assert_close(value, torch.zeros(3), atol=1e-5, rtol=0.0)
    assert len(found) == 2
