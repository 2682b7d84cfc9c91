"""What a framework's peer does to its state for itself calls no hooks of the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.integrations.member import Joiner
from shoal.integrations.ranks import LaunchedRanks
from shoal.integrations.terms import JoinTerms


@pytest.mark.long
@pytest.mark.parametrize("strands", [1, 4])
def test_a_state_that_is_given_an_epoch(dht: shoal.DHT, strands: int) -> None:
    """The optimizer is the user's own."""
    made = torch.optim.Adam(nn.Linear(2, 1).parameters())
    called: list[str] = []
    ranks = LaunchedRanks() if strands == 1 else LaunchedRanks(shoal.Cluster(strands=strands))
    member = Joiner(JoinTerms(dht, f"hooks {strands}", 4, {}), made, None, ranks)
    for each in (made, member.optimizer):
        each.register_state_dict_post_hook(lambda *_: called.append("saved"))
        each.register_load_state_dict_pre_hook(lambda *_: called.append("loading"))
    try:
        member.begin_at(3)
        assert (member.epoch, called) == (3, [])
        member.optimizer.load_state_dict(member.optimizer.state_dict())
        assert called == ["saved", "saved", "loading", "loading"]
    finally:
        member.leave()
