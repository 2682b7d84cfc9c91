"""The buffers of an epoch's gradients."""

from __future__ import annotations

import torch

from shoal.compression import NoCompression
from shoal.optim.accumulator import EpochGradients


def test_what_a_step_does_to_grad_leaves_the_average_as_it_was_committed():
    """Clipping hooks and some kernels write to `.grad`; whoever missed the round still asks for the average."""
    parameter = torch.nn.Parameter(torch.zeros(5))
    gradients = EpochGradients([parameter], NoCompression())
    parameter.grad = torch.arange(5.0)
    gradients.accumulate(2)
    assert gradients.freeze()
    gradients.use_local()
    committed = [flat.clone() for flat in gradients.outputs.flat]
    with gradients.as_grad([parameter]):
        assert torch.equal(parameter.grad, torch.arange(5.0))
        parameter.grad.mul_(0.1)
    assert all(torch.equal(a, b) for a, b in zip(gradients.outputs.flat, committed, strict=True))
