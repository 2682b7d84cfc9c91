"""After all ranks have left in order, they exchange by the collectives of torch, as they did before by their ties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import ForkedProcess


@pytest.mark.processes
def test_ranks_that_have_left_exchange_as_before(tmp_path: Path) -> None:
    logs = [tmp_path / f"log {rank}" for rank in range(2)]
    ranks = [
        ForkedProcess("tests.cluster.team_rank", str(rank), "2", str(tmp_path), log=log)
        for rank, log in enumerate(logs)
    ]
    try:
        assert [rank.wait(60.0) for rank in ranks] == [0, 0], "\n".join(log.read_text() for log in logs)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank in range(2):
        said = json.loads((tmp_path / f"found {rank}").read_text())
        assert said["done"] == ["all"] * (2 * rank)
        before, after, last = said["found"][:5], said["found"][5:10], said["found"][10:]
        spilt = "ValueError: spilt coffee"
        of_both = [[0, 10], 3, "all", f"ClusterError: R0 has raised {spilt}" if rank else spilt]
        assert before[:4] == after[:4] == of_both
        for each in (before[4], after[4]):
            assert "in state_dict, R0 is at 'values' and R1 is at 'other'" in each
        assert last == ["ClusterError: this rank has shut its optimizer down"]
