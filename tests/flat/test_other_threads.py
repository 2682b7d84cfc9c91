"""The search for the modules that hold the parameters leaves alone what other threads are making."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shoal import ContiguousParams
from shoal.flat import holders_of

SECONDS = 1.5


@pytest.mark.long
def test_a_tuple_that_another_thread_is_making_from_a_generator_is_finished() -> None:
    """CPython raises SystemError where a tuple has more than one reference when it is finished."""
    stop = threading.Event()
    made, failed = 0, 0

    def items() -> Iterator[torch.Tensor]:
        for _ in range(11):  # more than the ten that CPython makes room for at first
            yield torch.randn(2000).sum()  # lets other threads run

    def make_tuples() -> None:
        nonlocal made, failed
        while not stop.is_set():
            try:
                tuple(items())
            except SystemError:
                failed += 1
            made += 1

    thread = threading.Thread(target=make_tuples)
    thread.start()
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            model = nn.Linear(4, 1)
            ContiguousParams(model.parameters())
    finally:
        stop.set()
        thread.join()
    assert made > 0
    assert failed == 0


def test_modules_of_every_class_are_found() -> None:
    class Tied(nn.Linear):
        """Made where no import names it."""

    layer, tied = nn.Linear(4, 1), Tied(4, 1)
    tied.weight = layer.weight
    holders = holders_of([layer.weight, layer.bias])
    assert [holder.module for holder in holders if holder.index == 1] == [layer]
    assert {holder.module for holder in holders if holder.index == 0} == {layer, tied}


class Pretender:
    """Says that it is a module."""

    __class__ = property(lambda self: nn.Linear)  # type: ignore[assignment]


def test_objects_are_not_asked_for_their_class() -> None:
    layer, pretender = nn.Linear(4, 1), Pretender()
    gone = weakref.proxy(Pretender())  # answers every question with ReferenceError
    assert isinstance(pretender, nn.Linear)
    assert {holder.module for holder in holders_of([layer.weight])} == {layer}
    with pytest.raises(ReferenceError):
        gone.__class__  # noqa: B018
