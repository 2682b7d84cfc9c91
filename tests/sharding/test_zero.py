"""`ZeroRedundancyOptimizer` on 1 to 4 real ranks; the checks are in the modules named below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sharding.zero_ranks import Outcome, checks_of, outcomes, start

MODULES = [f"tests.sharding.zero_{name}" for name in ("parity", "states", "reduction", "training")]


pytestmark = pytest.mark.timeout(420)  # the first test runs them all, maybe on a machine with much else to do


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All checks on a number of ranks, run once."""
    known: dict[int, list[Outcome | str]] = {}

    def on_ranks(ranks: int) -> list[Outcome | str]:
        if ranks not in known:
            folder: Path = tmp_path_factory.mktemp(f"ranks-{ranks}")
            known[ranks] = outcomes(start(ranks, folder, MODULES), folder)
        return known[ranks]

    return on_ranks


@pytest.mark.parametrize("check", [check for module in MODULES for check in checks_of(module)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_ranks(run: Any, ranks: int, check: str) -> None:
    for rank, outcome in enumerate(run(ranks)):
        assert isinstance(outcome, dict), f"rank {rank} wrote nothing:\n{outcome}"
        assert outcome[check] is None, f"rank {rank}:\n{outcome[check]}"
