"""What every kind of `Pieces` promises: the way between what is stepped and the model, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cluster.strands import Strands
from shoal.flat import FlatBuffer
from shoal.optim.host_copy import HostCopy
from shoal.optim.pieces import OnHost, Own, Pieces, StrandPieces
from shoal.optim.placement import Placement


class Net(nn.Module):
    """Two layers, of which the second is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 1).requires_grad_(False)


@dataclass
class Made:
    """The pieces of a model.

    Attributes:
        of_step: the pieces that are stepped; of those on the host, the copies.
        memory: the flat memory of what users may move.
        placed: the tensors there.
        host: the copies, if there are any.
        of: with copies of strands: the strands.
    """

    net: Net
    pieces: Pieces
    of_step: Sequence[Tensor]
    memory: FlatBuffer
    placed: Sequence[Tensor]
    cut: Strands | None = None
    host: HostCopy | None = None
    of: Pieces | None = None

    @property
    def model(self) -> Tensor:
        return together(self.net.parameters())

    @property
    def stepped(self) -> Tensor:
        """The values that are stepped, in the order of the model."""
        if self.cut is None:
            return together(self.of_step)
        count = len(self.of_step) // 2  # the pieces of the first strand, then those of the second
        return together([each for number in range(count) for each in self.of_step[number::count]])

    def take(self, *, anew: bool = True) -> None:
        """As `State.take_over`."""
        self.pieces.gather(anew=anew)
        self.pieces.follow()

    @torch.no_grad()
    def step(self) -> Tensor:
        """A step: all that is stepped grows by one. Returns the new values."""
        for each in self.of_step:
            each.add_(1.0)
        return self.stepped

    def in_memory(self) -> bool:
        """Whether what users may move is in its flat memory."""
        return all(p.data_ptr() == view.data_ptr() for p, view in zip(self.placed, self.memory.views(), strict=True))


def together(tensors: Sequence[Tensor] | Iterator[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def own() -> Made:
    net = Net()
    model = list(net.parameters())
    memory = FlatBuffer.adopt(model)
    pieces = Own(model, model[2:], Placement(model, memory, [], []))
    return Made(net, pieces, model, memory, model)


def host_of(given: list[nn.Parameter], *, in_background: bool) -> tuple[HostCopy, FlatBuffer, list[Tensor]]:
    host = HostCopy(given, in_background=in_background, frozen=True)
    optimizer = torch.optim.SGD(host.params, lr=0.1)
    host.adopt(optimizer)
    copies = optimizer.param_groups[0]["params"]
    return host, FlatBuffer.adopt(copies), copies


def on_host(*, in_background: bool = False) -> Made:
    net = Net()
    model = list(net.parameters())
    host, memory, copies = host_of(model, in_background=in_background)
    placement = Placement(host.model, host.memory, [], [])
    pieces = OnHost(Own(host.model, model[2:], placement), host, memory)
    return Made(net, pieces, copies, host.memory, model, host=host)


def strands() -> Made:
    net = Net()
    cut = Strands(shoal.Cluster(strands=2), net.parameters())
    memory = FlatBuffer.adopt(cut.pieces)
    pieces = StrandPieces(cut, cut.pieces, Placement(cut.pieces, memory, [], []))
    return Made(net, pieces, cut.pieces, memory, cut.pieces, cut)


def strands_on_host() -> Made:
    """As the anchors of DiLoCo."""
    net = Net()
    cut = Strands(shoal.Cluster(strands=2), net.parameters())
    host, memory, copies = host_of(cut.pieces, in_background=False)
    of = StrandPieces(cut, cut.model, Placement(host.model, host.memory, [], []))
    return Made(net, OnHost(of, host, memory), copies, host.memory, cut.pieces, cut, host, of)


KINDS: dict[str, Callable[[], Made]] = {
    "own": own,
    "on the host": on_host,
    "on the host, in the background": lambda: on_host(in_background=True),
    "strands": strands,
    "strands on the host": strands_on_host,
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(kind: str) -> Made:
    return KINDS[kind]()


def spread(made: Made) -> None:
    """From copies of strands, the way has two parts, see `Drift`; and strands wait until the end of the call."""
    made.pieces.spread()
    of = made.pieces if made.of is None else made.of
    of.spread()
    end_call(made)


def end_call(made: Made) -> None:
    """As the end of a call of all ranks."""
    if made.cut is not None and made.cut.is_ahead:
        made.cut.spread(())


@torch.no_grad()
def write(made: Made, value: float) -> Tensor:
    for parameter in made.net.parameters():
        parameter.fill_(value)
    return made.model


# -- from the model


def test_at_first_both_are_equal(made: Made) -> None:
    assert torch.equal(made.stepped, made.model)


def test_what_users_have_written_is_stepped(made: Made) -> None:
    written = write(made, 7.0)
    made.take()
    assert torch.equal(made.stepped, written)
    made.net.first.weight.data = torch.full((2, 3), 5.0)  # other memory, which no count tells of
    moved = made.model
    made.take()
    assert torch.equal(made.stepped, moved)
    assert torch.equal(made.model, moved)


def test_what_is_known_to_be_current_is_not_gathered_twice() -> None:
    made = strands()
    made.take()
    write(made, 7.0)
    made.take(anew=False)
    assert not torch.equal(made.stepped, made.model)
    made.pieces.model_was_changed()  # inner steps have
    made.take(anew=False)
    assert torch.equal(made.stepped, made.model)


def test_memory_that_was_moved_comes_back(made: Made) -> None:
    assert made.in_memory()
    for each in made.placed:
        each.data = each.detach() + 1.0
    values = together(made.placed)
    assert not made.in_memory()
    made.pieces.gather()
    assert made.in_memory()
    assert torch.equal(together(made.placed), values) != (made.cut is not None), "pieces get what the model has"


def test_only_frozen_copies_follow_on_demand(made: Made) -> None:
    before = made.stepped
    write(made, 7.0)
    made.pieces.gather(anew=True)
    made.pieces.follow(whole=False)
    trained, frozen = made.stepped[:8], made.stepped[8:]
    assert torch.equal(frozen, made.model[8:])
    assert torch.equal(trained, before[:8] if made.host is not None else made.model[:8])


# -- to the model


def test_the_model_gets_what_was_stepped(made: Made) -> None:
    made.take()
    for _ in range(2):
        stepped = made.step()
        spread(made)
        assert torch.equal(made.model, stepped)
        assert made.in_memory()


def test_what_was_stepped_is_newer_until_it_was_spread() -> None:
    """A call that gathers, such as that of a checkpoint, does not undo the step."""
    made = strands()
    made.take()
    stepped = made.step()
    made.pieces.spread()
    made.take()
    assert torch.equal(made.stepped, stepped)
    end_call(made)
    written = write(made, 7.0)
    end_call(made)  # nothing is newer than the model
    assert torch.equal(made.model, written)
    made.take()
    assert torch.equal(made.stepped, written)


def test_who_writes_during_a_step_in_the_background_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    made = on_host(in_background=True)
    for _ in range(2):
        made.take()
        stepped = made.step()
        write(made, 7.0)
        made.pieces.spread()
        assert torch.equal(made.model, stepped)
    assert caplog.text.count("what was written into the model while a step was under way") == 1


def test_who_means_it_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    made = on_host(in_background=True)
    made.take()
    with made.pieces.expecting_writes():
        made.step()
        write(made, 7.0)
        made.pieces.spread()
    assert not caplog.messages
    made.take()
    made.step()
    write(made, 7.0)
    made.pieces.spread()
    assert len(caplog.messages) == 1


def test_who_does_not_write_is_not_told(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        made.take()
        made.step()
        spread(made)
    assert not caplog.messages


# -- gradients, names, checks


def test_who_gets_gradients_and_who_must_not(kind: str, made: Made) -> None:
    trained, frozen = made.pieces.in_backward
    assert all(each.requires_grad for each in trained)
    assert not any(each.requires_grad for each in frozen)
    model = list(made.net.parameters())
    if kind == "strands":
        assert (len(trained), len(frozen)) == (4, 4), "the pieces, whose gradients are gathered"
    else:
        assert list(map(id, trained)) == list(map(id, model[:2]))
        assert list(map(id, frozen)) == list(map(id, model[2:]))


def test_names(made: Made) -> None:
    assert made.pieces.name_of(0).startswith("parameter 0")
    assert made.pieces.name_of(made.placed[1]).startswith("parameter 1")


def test_a_parameter_that_a_module_has_replaced_is_told_of(kind: str, made: Made) -> None:
    made.pieces.check()
    made.pieces.check_groups()
    if made.cut is not None:
        made.placed[0].data = made.placed[0].detach().double()
    else:
        made.net.first.weight = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"parameter 0|first|weight"):
        made.pieces.check()


def test_options_are_set_aside_while_copies_are_stepped(made: Made) -> None:
    """The model's own parameters are stepped by the thread that reads and writes the options."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with made.pieces.set_aside(optimizer):
        assert (made.host is None) or made.host.aside is not None
        shown = optimizer.param_groups if made.host is None or made.host.aside is None else made.host.aside
        shown[0]["lr"] = 0.2
        assert optimizer.param_groups[0]["lr"] == (0.2 if made.host is None else 0.1)
    assert optimizer.param_groups[0]["lr"] == 0.2
