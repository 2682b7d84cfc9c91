"""A rank that dies or raises leaves the others with an error that names it, within the process group's timeout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharding.zero_ranks import DIED, Ranks, checks_of

MODULE = "tests.sharding.zero_trouble"

pytestmark = pytest.mark.timeout(280)  # on an idle machine seconds; on a busy one a start may take a minute


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_survivors_name_the_rank(tmp_path: Path, check: str) -> None:
    processes = Ranks(3, tmp_path, [f"{MODULE}:{check}"])
    try:
        for rank, failure in enumerate(processes.failures(check)):
            killed = rank == 1 and "killed" in check
            assert failure is None or (killed and failure.startswith(DIED)), f"rank {rank}:\n{failure}"
    finally:
        processes.stop()
