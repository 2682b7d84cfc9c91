"""Numbers of numpy among the options reach no fused kernel that Shoal has picked: these take Python's only."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("betas", [(0.9, 0.5), [0.9, 0.5]], ids=["tuple", "list"])
def test_a_list_of_a_configuration_is_as_good_as_a_tuple(betas: Any) -> None:
    """Peers that have read one from a file must make the bits of those that have written the other."""
    model = torch.nn.Linear(3, 2)
    flat = shoal.ContiguousParams(model.parameters())
    optimizer = torch.optim.AdamW(flat.contiguous())
    optimizer.param_groups[0]["betas"] = betas
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is True


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=1),
        lambda params: torch.optim.SGD(params, lr=0.1, maximize=0),
        lambda params: torch.optim.AdamW(params, amsgrad=np.int64(0)),
    ],
)
def test_whole_numbers_as_switches_reach_no_fused_kernel(make: Any) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = make(shoal.ContiguousParams(model.parameters()).contiguous())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_kernel_that_a_group_names_stays(chosen: bool) -> None:
    model = torch.nn.Linear(3, 2)
    flat = shoal.ContiguousParams(model.parameters())
    optimizer = torch.optim.SGD(
        [{"params": flat.contiguous(), "fused": chosen}], lr=np.float32(0.5) if not chosen else 0.5
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is chosen
