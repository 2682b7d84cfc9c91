"""After all ranks have left in order, they exchange by the collectives of torch, as they did before by their ties."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.team_calls import calls
from tests.groups import in_group


@pytest.mark.processes
def test_ranks_that_have_left_exchange_as_before(tmp_path: Path) -> None:
    for rank, said in enumerate(in_group(2, tmp_path, calls)):
        assert said["done"] == ["all"] * (2 * rank)
        before, after, last = said["found"][:5], said["found"][5:10], said["found"][10:]
        spilt = "ValueError: spilt coffee"
        of_both = [[0, 10], 3, "all", f"ClusterError: R0 has raised {spilt}" if rank else spilt]
        assert before[:4] == after[:4] == of_both
        for each in (before[4], after[4]):
            assert "in state_dict, R0 is at 'values' and R1 is at 'other'" in each
        assert last == ["ClusterError: this rank has shut its optimizer down"]
