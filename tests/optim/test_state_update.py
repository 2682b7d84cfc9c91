"""A step that is under way: what of it is done, what came of it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from shoal.averaging.control import StepControl
from shoal.dht.records import get_dht_time
from shoal.optim.state_averager import StateUpdate
from shoal.swarm.protocol.errors import AveragingError


def make_round() -> StepControl:
    now = get_dht_time()
    return StepControl(now, now + 60.0, True)


def test_both_parts_are_waited_for() -> None:
    update = StateUpdate(work=Future(), round=make_round())
    assert (update.is_stepping, update.is_averaging, update.done) == (True, True, False)
    assert update.work is not None
    assert update.round is not None
    update.work.set_result(None)
    assert (update.is_stepping, update.is_averaging, update.done) == (False, True, False)
    update.round.set_result({})
    assert update.done
    update.wait()
    assert update.result() == {}


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_round_that_came_to_nothing_is_no_error(how: str, caplog: pytest.LogCaptureFixture) -> None:
    update = StateUpdate(round=make_round())
    assert update.round is not None
    if how == "cancelled":
        update.round.cancel()
    else:
        update.round.set_exception(AveragingError("the network is away"))
    update.wait()
    assert update.result() is None
    assert "the state was not averaged" in caplog.text


@pytest.mark.parametrize("part", ["work", "round"])
def test_other_errors_surface(part: str) -> None:
    update = StateUpdate(work=Future(), round=make_round())
    assert update.work is not None
    assert update.round is not None
    (update.work if part == "work" else update.round).set_exception(ZeroDivisionError())
    (update.round if part == "work" else update.work).set_result(None)  # type: ignore[attr-defined]
    update.wait()
    with pytest.raises(ZeroDivisionError):
        update.result()
