"""A rank that dies or raises leaves the others with an error that names it, within the process group's timeout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sharding.zero_ranks import DIED, Ranks, checks_of

MODULE = "tests.sharding.zero_trouble"
CHECKS = checks_of(MODULE)

pytestmark = pytest.mark.timeout(280)  # on an idle machine seconds; on a busy one a start may take a minute


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    """Three ranks for each check, all at the same time: what they do is wait for the timeout."""
    started = {check: Ranks(3, tmp_path_factory.mktemp(check), [f"{MODULE}:{check}"]) for check in CHECKS}
    yield started
    for processes in started.values():
        processes.stop()


@pytest.mark.parametrize("check", CHECKS)
def test_survivors_name_the_rank(started: dict[str, Ranks], check: str) -> None:
    for rank, failure in enumerate(started[check].failures(check)):
        killed = rank == 1 and "killed" in check
        assert failure is None or (killed and failure.startswith(DIED)), f"rank {rank}:\n{failure}"
