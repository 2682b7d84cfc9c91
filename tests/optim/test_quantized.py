"""Tensors of classes of their own, as 8-bit optimizers keep them in their state: they travel as the tensors of which
they consist, to peers whose optimizer has the same class, and are saved and loaded."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import shoal
from shoal.compression import NoCompression
from shoal.optim.state import TrainingState
from shoal.optim.tree import CannotTravel, copy_of, decode, difference, encode, kinds_of
from tests.optim.conftest import Alone
from tests.optim.models import backward, fixed_batch, flat, make_model
from tests.optim.quantized import Eight, Quantizing
from tests.optim.test_state import TIP, downloaded


def eight(seed: int = 0) -> Eight:
    return Eight.of(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))


def test_it_comes_out_as_it_went_in() -> None:
    given: dict[str, Any] = {"momentum": eight(), "others": [eight(1), torch.zeros(2)]}
    tensors: list[Tensor] = []
    encoded = encode(given, tensors)
    found = decode(encoded, tensors, kinds=[Eight])
    assert type(found["momentum"]) is Eight
    assert found["momentum"].per_scale == 12
    assert torch.equal(found["momentum"].codes, given["momentum"].codes)
    assert difference(found, given) is None
    assert encode(found, []) == encoded


def test_two_that_differ_in_a_part_differ() -> None:
    one, other = {"a": eight(0)}, {"a": eight(0)}
    assert difference(one, other) is None
    other["a"].scale.mul_(2)
    assert difference(one, other) is not None


def test_its_class_comes_from_the_readers_optimizer_and_from_nowhere_else() -> None:
    tensors: list[Tensor] = []
    encoded = encode(eight(), tensors)
    with pytest.raises(
        ValueError, match=r"class 'tests\.optim\.quantized\.Eight', which this peer's optimizer does not"
    ):
        decode(encoded, tensors)
    model = make_model()
    assert Eight in kinds_of(Quantizing(model.parameters()))
    assert Eight not in kinds_of(torch.optim.SGD(model.parameters()))


def forged(change: Callable[[list[Any]], None]) -> bytes:
    node = msgspec.msgpack.decode(encode(eight(), []))
    change(node)
    return msgspec.msgpack.encode(node)


def put(place: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda node: node.__setitem__(place, value)


@pytest.mark.parametrize(
    "change",
    [
        put(1, "builtins.object"),
        put(1, ["no name"]),
        put(2, 3),
        put(2, [2, "codes", [10, 0, "int8", []]]),
        put(2, [2, "codes", [10, 0, "int8", []], "scale", 1.0]),
        put(2, [2, "codes", [10, 1, "float32", []], "scale", [10, 1, "float32", []]]),
        put(2, [2, "codes", [10, 0, "int8", []], "more", [10, 1, "float32", []], "scale", [10, 1, "float32", []]]),
        put(3, [0]),
        put(3, [0, "float32"]),
        put(3, 17),
        put(4, [4, 3]),
        put(4, [-1, 3]),
        put(4, "3"),
        put(5, [1, 1]),
        put(6, "float64"),
        put(6, None),
        lambda node: node.pop(),
        lambda node: node.append(0),
    ],
)
def test_what_makes_no_sense_is_refused(change: Callable[[list[Any]], None]) -> None:
    tensors: list[Tensor] = []
    encode(eight(), tensors)
    with pytest.raises(ValueError) as told:  # noqa: PT011 (each says something else)
        decode(forged(change), tensors, kinds=[Eight])
    assert type(told.value) is ValueError


def test_a_class_that_fails_is_refused() -> None:
    given: list[Tensor] = [torch.zeros(3, 4, dtype=torch.int8), torch.zeros(0)]  # it divides by the number of scales
    with pytest.raises(ValueError, match="can't be made of what it should consist of"):
        decode(encode(eight(), []), given, kinds=[Eight])


class Opaque(Tensor):
    """A class that tells nothing of its parts."""


def test_a_class_without_parts_is_refused_by_name() -> None:
    with pytest.raises(CannotTravel, match=r"test_quantized\.Opaque"):
        encode({"a": torch.zeros(2).as_subclass(Opaque)}, [])


def test_a_copy_is_deep() -> None:
    given = {"state": {0: {"momentum": eight()}}}
    copied = copy_of(given)
    given["state"][0]["momentum"].codes.zero_()
    assert copied["state"][0]["momentum"].codes.any()


def test_a_newcomer_goes_on_alike() -> None:
    made = []
    for seed in (0, 5):
        model = make_model(seed)
        made.append((model, TrainingState(Quantizing(model.parameters()), None, [])))
    (donor, state), (newcomer, other) = made
    for epoch in range(2):
        backward(donor, *fixed_batch(epoch))
        state.optimizer.step()
        state.adopt_statistics()
    other.load(downloaded(state.snapshot(TIP, NoCompression())))
    for epoch in range(2, 4):
        for model, one in ((donor, state), (newcomer, other)):
            backward(model, *fixed_batch(epoch))
            one.optimizer.step()
        assert torch.equal(flat(donor), flat(newcomer))  # a copy, and the same kernels


@pytest.mark.parametrize("options", [{}, {"outer": shoal.DiLoCo(inner_steps=2), "target_batch_size": None}], ids=str)
def test_it_is_saved_and_loaded(options: dict[str, Any], alone: Alone) -> None:
    def train(optimizer: shoal.Optimizer, model: torch.nn.Module, epochs: range) -> None:
        for epoch in epochs:
            backward(model, *fixed_batch(epoch))
            optimizer.step()

    given = {"target_batch_size": 8, "batch_size_per_step": 8, "optimizer": Quantizing} | options
    model = make_model()
    optimizer = alone(model, **given)
    train(optimizer, model, range(4))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(optimizer, model, range(4, 6))
    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    again = make_model(3)
    resumed = alone(again, **given)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(resumed, again, range(4, 6))
    assert torch.equal(flat(again), flat(model))  # the same kernels on the same numbers
