"""Numbers of numpy among the options reach no fused kernel that Shoal has picked: these take Python's only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shoal


@pytest.mark.parametrize("value", [np.bool_(True), True], ids=repr)
def test_a_number_of_numpy_between_steps(value: bool) -> None:
    torch.manual_seed(0)
    ours, plain = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    plain.load_state_dict(ours.state_dict())
    flat = shoal.ContiguousParams(ours.parameters())
    pairs = [(ours, torch.optim.SGD(flat.contiguous(), lr=np.float32(0.5), momentum=0.5))]
    pairs.append((plain, torch.optim.SGD(plain.parameters(), lr=np.float32(0.5), momentum=0.5)))
    for model, optimizer in pairs:
        for epoch in range(3):
            optimizer.param_groups[0]["nesterov"] = value if epoch == 1 else False
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
