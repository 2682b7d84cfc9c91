"""Both of Adam's statistics averaged through every compression: the peers stay alike, and train as without one."""

from __future__ import annotations

import msgspec
import pytest
import torch

from shoal.compression import (
    BlockwiseQuantization,
    Compression,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from shoal.flat import Layout
from shoal.optim.state import SharedTensors, TrainingState
from shoal.swarm.protocol.tip import Tip
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model
from tests.optim.processes import Pool, Trained, by_epoch, events, fixed, training

LOSSY: list[Compression] = [
    Float16Compression(), ScaledFloat16Compression(), Uniform8BitQuantization(), Quantile8BitQuantization(),
    BlockwiseQuantization(), SizeAdaptiveCompression(100, Float16Compression(), Uniform8BitQuantization()),
]  # fmt: skip
ALL_BUT_ONE_LONG = [
    pytest.param(each, marks=[] if isinstance(each, Uniform8BitQuantization) else [pytest.mark.long]) for each in LOSSY
]
SHARES = [(0, 24), (24, 64)]
EPOCHS = 6
TIP = Tip.genesis("test")


def train(pool: Pool, compression: Compression) -> list[Trained]:
    run = {"optimizer": "adamw", "use_local_updates": True, "delay_state_averaging": False, "width": 60}
    names = [["exp_avg", "exp_avg_sq"]] * len(SHARES)
    with training(pool, 2, state_codec=compression.spec, average_opt_statistics=names, **run) as peers:
        trained = fixed(peers.all, SHARES, EPOCHS, [2] * len(peers.all))
        histories = [events(peer) for peer in peers.all]
    assert all([event["kind"] for event in history] == ["epoch"] * EPOCHS for history in histories), histories
    assert len(by_epoch(histories)) == EPOCHS
    return trained


@pytest.fixture(scope="module")
def exactly(pool: Pool) -> torch.Tensor:
    """The parameters without compression."""
    return torch.tensor(train(pool, NoCompression())[0]["parameters"])


@pytest.mark.parametrize("compression", ALL_BUT_ONE_LONG, ids=lambda compression: type(compression).__name__)
def test_adam_with_lossy_statistics(pool: Pool, exactly: torch.Tensor, compression: Compression) -> None:
    answers = train(pool, compression)
    assert len({(answer["parameters_digest"], answer["statistics"]) for answer in answers}) == 1
    through = torch.tensor(answers[0]["parameters"])
    start = flat(make_model(width=60))
    assert 0 < (through - exactly).norm() < 0.2 * (exactly - start).norm(), "not used, or it lost too much"
    assert through.abs().max() < 1.1 * exactly.abs().max()


@pytest.mark.parametrize("compression", LOSSY, ids=lambda compression: type(compression).__name__)
def test_second_moments_in_a_state_that_is_downloaded(compression: Compression) -> None:
    model = make_model(width=60)
    norms = [torch.tensor([0.5, 3.0, 1e4]), torch.rand(20)]  # extra tensors
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for epoch in range(3):
        backward(model, *fixed_batch(epoch))
        optimizer.step()
    snapshot = TrainingState(optimizer, None, norms).snapshot(TIP, compression, ["exp_avg", "exp_avg_sq"])
    layout = Layout.from_wire(msgspec.msgpack.decode(snapshot.layout))
    named = msgspec.msgpack.decode(snapshot.scalars)["statistics"]
    [memory] = snapshot.buffers
    codec = snapshot.codecs.codec_of(0, 0, len(memory))
    decoded = codec.decode(codec.encode(memory), memory.dtype, len(memory))
    count = len(list(model.parameters()))
    parts = [(memory[entry.span.slice], decoded[entry.span.slice]) for entry in layout.entries]
    for (_, name), (exact, sent) in zip(named, parts[count : count + len(named)], strict=True):
        if name == "exp_avg_sq":
            assert (sent / exact).log2().abs().max() < 1
        if name == "step":
            assert torch.equal(sent, exact)
    error = torch.cat([(sent - exact).abs() for exact, sent in parts[:count]]).max()
    assert error < 0.02, "an extra tensor has cost the parameters their precision"


def test_what_decays_during_a_round_does_not_become_negative() -> None:
    """The other peer's second moment was next to nothing, so more has decayed here than the average is."""
    tensors: list[torch.Tensor | None] = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 2.0])]
    roles = [TensorRole.PARAMETER, TensorRole.OPTIMIZER, TensorRole.OPTIMIZER]
    shared = SharedTensors(lambda: tensors, Layout.of([torch.zeros(2)] * 3), NoCompression(), roles)
    shared.take()
    for tensor, average in zip(tensors, shared.outputs.views(), strict=True):
        assert tensor is not None
        average.copy_(0.1 * tensor)
        tensor[1] = 0.5
    shared.put(keep_changes=True)
    parameter, second_moment, momentum = tensors
    assert parameter is not None
    assert second_moment is not None
    assert momentum is not None
    torch.testing.assert_close(parameter, torch.tensor([0.1, -1.3]))
    torch.testing.assert_close(second_moment, torch.tensor([0.1, 0.2]))
    torch.testing.assert_close(momentum, torch.tensor([-0.1, -1.3]))
