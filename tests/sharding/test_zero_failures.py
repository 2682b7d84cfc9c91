"""A rank that dies or raises leaves the others with an error that names it, within the process group's timeout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharding.zero_ranks import checks_of, outcomes, start

MODULE = "tests.sharding.zero_trouble"

pytestmark = pytest.mark.timeout(420)  # maybe on a machine with much else to do


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_survivors_name_the_rank(tmp_path: Path, check: str) -> None:
    for rank, outcome in enumerate(outcomes(start(3, tmp_path, [f"{MODULE}:{check}"]), tmp_path)):
        if isinstance(outcome, str):
            assert rank == 1, f"rank {rank} wrote nothing:\n{outcome}"  # it was killed
        else:
            assert outcome[check] is None, f"rank {rank}:\n{outcome[check]}"
