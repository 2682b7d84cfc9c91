"""Two equal models: one trained with an optimizer of its parameters, one with the same optimizer of flat memory.

Their numbers are equal to the bit while both are stepped by the same kernel that is not fused: forward and backward
passes are the same kernels on tensors of the same shapes that all begin at multiples of 64 bytes, and such steps round
an element alike in a long tensor and in a short one (`test_rounding`). With fused kernels they are equal to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.flat import ContiguousParams


def small_model() -> Any:
    """Sizes that are no multiple of a vector register, so that there is padding between them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Twins:
    """`plain` and `flat`, stepped alike."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        make: Callable[[], nn.Module] = small_model,
        **options: Any,
    ) -> None:
        self.plain: Any = make()
        self.flat: Any = make()
        self.parameters = ContiguousParams(self.flat.named_parameters())
        self.plain_optimizer = optimizer(self.plain.parameters(), **options)
        self.flat_optimizer = optimizer(self.parameters.contiguous(), **options)

    @property
    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.plain, self.plain_optimizer), (self.flat, self.flat_optimizer)

    def backward(self, seed: int, use: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)) -> None:
        torch.manual_seed(seed)
        x = torch.randn(4, 5)
        for model, _ in self.both:
            use(model, x).square().sum().backward()

    def step(self) -> None:
        for _, optimizer in self.both:
            optimizer.step()

    def zero_grad(self, **options: Any) -> None:
        for _, optimizer in self.both:
            optimizer.zero_grad(**options)

    def train(self, steps: int, first: int = 0) -> None:
        for seed in range(first, first + steps):
            self.backward(seed)
            self.step()
            self.zero_grad()

    def distance(self) -> float:
        """The largest difference between their parameters."""
        return max(
            float((ours.detach() - theirs.detach()).abs().max())
            for ours, theirs in zip(self.flat.parameters(), self.plain.parameters(), strict=True)
        )

    def assert_equal(self) -> None:
        """Parameters and gradients of the two models are equal to the bit (why: at the top of this file)."""
        for ours, theirs in zip(self.flat.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        self.parameters.assert_buffer_is_valid()
