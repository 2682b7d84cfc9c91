"""The run's loss is the mean of what the members have told, or none."""

from __future__ import annotations

import math
import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.protocol.loss import LARGEST, Loss, LossKind, mean_of

kinds = st.sampled_from(LossKind)
losses = kinds.flatmap(
    lambda kind: st.floats(-LARGEST[kind], LARGEST[kind], allow_nan=False).map(lambda value: Loss(value, kind))
)
weights = st.floats(1e-300, 1e15, allow_nan=False)


@given(losses, st.lists(weights, min_size=1, max_size=20))
def test_the_mean_of_equal_losses_is_that_loss_to_the_bit(loss: Loss, given: list[float]) -> None:
    mean = mean_of([(loss, weight) for weight in given])
    assert mean is not None
    assert struct.pack("d", mean.value + 0.0) == struct.pack("d", loss.value + 0.0)
    assert mean.kind is loss.kind


@given(st.lists(st.tuples(losses, weights), min_size=1, max_size=20))
def test_a_mean_is_between_its_losses_and_survives_the_wire(given: list[tuple[Loss, float]]) -> None:
    mean = mean_of(given)
    assert mean is not None
    assert min(loss.value for loss, _ in given) <= mean.value <= max(loss.value for loss, _ in given)
    kinds = {loss.kind for loss, _ in given}
    is_mixed = LossKind.NUMBER in kinds and len(kinds) > 1
    assert mean.kind is (LossKind.FLOAT64 if is_mixed else max(kinds))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(mean), type=Loss) == mean


def test_a_mean_is_weighted_by_samples() -> None:
    one, other = Loss(1.0, LossKind.FLOAT16), Loss(5.0, LossKind.FLOAT64)
    assert mean_of([(one, 3.0), (other, 1.0)]) == Loss(2.0, LossKind.FLOAT64)
    assert mean_of([(one, 3.0), (other, 0.0)]) == one, "without samples it does not count"
    assert mean_of([(one, 3.0), (None, 0.0)]) == one
    assert mean_of([(one, 3.0), (None, 1e-9)]) is None, "where one gave none there is none"
    assert mean_of([(one, 0.0)]) is None
    assert mean_of([]) is None
    assert all(math.isfinite(largest) for largest in LARGEST.values())
