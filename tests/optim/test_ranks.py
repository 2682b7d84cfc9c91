"""A model that a wrapper for several ranks holds: each rank would be a peer that waits for the others twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed

from tests.groups import in_group
from tests.optim.wrapped import refusals


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_its_parameters_are_refused_by_name_in_the_first_step(tmp_path: Path) -> None:
    for found in in_group(2, tmp_path, refusals):
        for case in ("plain", "beside ddp", "after ddp", "ddp of one rank"):
            assert found.pop(case) == ""
        assert "parameter 0 ('weight' of a Linear) is held by a DistributedDataParallel of 2 ranks" in found.pop("ddp")
        assert "tensor 0 is a DTensor: flat memory holds plain tensors only" in found.pop("fsdp2")
        assert all("is held by a FullyShardedDataParallel of 2 ranks" in found.pop(f"fsdp {o}") for o in (True, False))
        assert not found
