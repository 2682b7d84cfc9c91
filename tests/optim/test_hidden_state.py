"""A newcomer with a class that keeps something outside of its state dict says so, and does not download on and on."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from shoal.optim.hidden_state import FIRST_REST, LONGEST_REST, SOON, HiddenState
from tests.optim.models import flat
from tests.optim.test_kinds_of_options import Peers, epochs, one_peer, peers, step

pytestmark = pytest.mark.processes


class Counting(torch.optim.SGD):
    """Its steps become smaller with a count that is in no state dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, foreach=False)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self.count)
        return super().step(closure)


def test_a_newcomer_says_so_and_rests(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"target_batch_size": 8, "matchmaking_time": 1.0}
    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
        with one_peer(first, Counting, **given) as veteran:
            epochs([veteran], 3)
            with one_peer(second, Counting, **given) as newcomer:
                made: Peers = [veteran, newcomer]
                downloads: list[Any] = []
                newcomer[1].on_event = lambda event: (
                    downloads.append(event) if "Download" in type(event).__name__ else None
                )
                until = time.monotonic() + 20
                with ThreadPoolExecutor(2) as pool:
                    while "outside of its state_dict" not in caplog.text and time.monotonic() < until:
                        list(pool.map(lambda peer: step(peer[0], peer[1], 4), made))
                    before = veteran[1].local_epoch
                    for _ in range(12):  # the other one goes on, and waits for nobody
                        list(pool.map(lambda peer: step(peer[0], peer[1], 4), made))
                assert veteran[1].local_epoch >= before + 3
        told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) == 1, told
        assert "Counting keeps something outside of its state_dict, or draws random numbers" in told[0]
        assert "takes no part for 60 s" in told[0]
        assert len(downloads) == 1


def test_the_rest_grows_and_only_differences_soon_after_a_download_count() -> None:
    hidden, now = HiddenState(), 100.0
    assert hidden.differs(now) == 0  # it has loaded nothing
    assert not hidden.rests(now)
    hidden.has_loaded(whole=False)
    assert hidden.differs(now) == 0
    rests = []
    for _ in range(9):
        hidden.has_loaded(whole=True)
        for _ in range(SOON):
            hidden.agrees()
        rests.append(hidden.differs(now))
        assert hidden.rests(now + rests[-1] - 1)
        now += rests[-1]
        assert not hidden.rests(now)
    assert rests == [min(FIRST_REST * 2**n, LONGEST_REST) for n in range(9)]
    hidden.has_loaded(whole=True)
    for _ in range(SOON + 1):
        hidden.agrees()
    assert hidden.differs(now) == 0
    hidden.has_loaded(whole=True)
    assert hidden.differs(now) == FIRST_REST


def test_who_has_joined_after_this_peer_is_new_for_a_while() -> None:
    veteran, newcomer = HiddenState(), HiddenState()
    veteran.took_part(3, [b"v"])
    for number, epoch in enumerate((4, 5, 8, 9)):
        for peer in (veteran, newcomer):
            peer.took_part(epoch, [b"v", b"n"])
        assert veteran.is_new(b"n") == (number <= SOON)
        assert not newcomer.is_new(b"v")


MODES: dict[str, dict[str, Any]] = {
    "local updates": {"use_local_updates": True, "delay_state_averaging": False},
    "outer": {"outer": shoal.DiLoCo()},
}


class Drawing(torch.optim.SGD):
    """Draws random numbers in its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, foreach=False)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(torch.rand_like(parameter))
        return super().step(closure)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_class_that_draws_random_numbers_trains_where_parameters_are_averaged(
    mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with peers([Drawing, Drawing], **mode) as made:
        before = flat(made[0][0])
        epochs(made, 4)
        assert not torch.equal(flat(made[0][0]), before)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
