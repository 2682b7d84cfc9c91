"""What the ranks of a cluster with strands must have alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.optim.alike import terms_of, unlike
from tests.optim.conftest import Alone
from tests.optim.test_strand_state import Net, made


@pytest.mark.long
@pytest.mark.parametrize("outer", [None, shoal.DiLoCo(inner_steps=4)])
def test_ranks_have_the_same_kind_of_scheduler(alone: Alone, outer: shoal.DiLoCo | None) -> None:
    given: dict[str, Any] = {} if outer is None else {"target_batch_size": None, "outer": outer}
    constant = torch.optim.lr_scheduler.ConstantLR
    one, alike, other = (
        terms_of(made(alone, Net(), run_id=str(number), **given, **more)._state)
        for number, more in enumerate(({}, {}, {"scheduler": constant}))
    )
    assert not unlike(alike, one)
    assert unlike(other, one).startswith("scheduler is ConstantLR here, and ExponentialLR at rank 0")
