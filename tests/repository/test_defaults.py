"""What a user sets as torch's default device and dtype is for the user's own tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import ForkedProcess
from tests.repository.defaults_worker import SYSTEMS


@pytest.mark.parametrize("system", SYSTEMS)
def test_torchs_defaults_change_nothing(system: str, tmp_path: Path) -> None:
    logs = tmp_path / "plain", tmp_path / "set"
    workers = [ForkedProcess("tests.repository.defaults_worker", system, log.name, log=log) for log in logs]
    for worker, log in zip(workers, logs, strict=True):
        assert worker.wait(200) == 0, log.read_text()
    plain, with_defaults = (log.read_text() for log in logs)
    assert "torch.float" in plain
    assert with_defaults == plain
