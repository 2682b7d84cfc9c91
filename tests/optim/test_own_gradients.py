"""`AveragerRounds` by themselves: who waits for an average hears at once that it is too late for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import shoal
from shoal.optim.grad_averager import AveragerSum
from shoal.optim.gradients import Gradients
from shoal.optim.rounds import AveragerRounds
from shoal.swarm.protocol.errors import Behind


def waiting(dht: shoal.DHT) -> AveragerRounds:
    """In a round that does not begin, for want of a second peer."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    gradients = AveragerSum(shoal.GradientAverager, [parameter], dht=dht, prefix="own gradients", min_group_size=2)
    optimizer: Any = torch.optim.SGD([parameter], lr=0.1)
    rounds = AveragerRounds(Gradients(optimizer, optimizer, [gradients], [], optimizer), dht.peer_id.key, gradients)
    rounds.enter(lambda: False)
    gradients.accumulate(8)
    assert gradients.close()
    rounds.begin(0, 8.0)
    assert rounds.held
    return rounds


def test_the_end_of_the_epoch_ends_the_wait(dht: shoal.DHT) -> None:
    gradients = waiting(dht)
    ended: Future[None] = Future()
    timer = threading.Timer(0.2, ended.set_result, [None])
    timer.start()
    began = time.monotonic()
    with pytest.raises(Behind, match="the others have ended the epoch"):
        gradients.average(60.0, ended)
    assert time.monotonic() - began < 30.0
    timer.join()
    gradients.leave()


def test_without_an_average_in_time_it_is_this_peers_own(dht: shoal.DHT) -> None:
    gradients = waiting(dht)
    ended: Future[None] = Future()
    assert gradients.average(0.2, ended) == gradients.average(0.2, ended)
    assert not gradients.held
    gradients.leave()
