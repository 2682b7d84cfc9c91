"""The demo's model: its size, its shapes, and that it cannot see the future."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.cli.demo.model import GPT


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def test_about_a_million_parameters(model: GPT) -> None:
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e6


def test_first_loss_is_that_of_a_uniform_guess(model: GPT) -> None:
    numbers = torch.randint(256, (4, 64))
    assert model(numbers).shape == (4, 64, 256)
    assert model.loss(numbers, numbers).item() == pytest.approx(math.log(256))


def test_a_later_byte_does_not_change_an_earlier_prediction(model: GPT) -> None:
    torch.nn.init.normal_(model.head.weight)
    numbers = torch.randint(256, (1, 64))
    changed = numbers.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    before, after = model(numbers), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])  # the same kernels on the same shapes, row by row
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_positions_matter(model: GPT) -> None:
    torch.nn.init.normal_(model.head.weight)
    swapped = model(torch.tensor([[1, 2, 3]]))[0, -1]
    assert not torch.allclose(swapped, model(torch.tensor([[2, 1, 3]]))[0, -1])


def test_generation_continues_the_prompt_beyond_the_context_and_is_repeatable(model: GPT) -> None:
    prompt = torch.arange(60)
    first = model.generate(prompt, 10, torch.Generator().manual_seed(3))
    assert first.shape == (70,)
    assert torch.equal(first[:60], prompt)
    assert torch.equal(first, model.generate(prompt, 10, torch.Generator().manual_seed(3)))


def test_gradient_reaches_every_parameter_after_one_step(model: GPT) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = torch.randint(256, (4, 64))
    for _ in range(2):  # The head begins at zero, so only the second gradient goes past it.
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(numbers, numbers.roll(1)))
        optimizer.step()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
