"""`ZeroRedundancyOptimizer` on 1 to 4 real ranks; the checks are in the modules named below."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sharding.zero_ranks import Ranks, checks_of

MODULES = [f"tests.sharding.zero_{name}" for name in ("parity", "states", "reduction", "training", "hooks")]

pytestmark = pytest.mark.timeout(280)  # on an idle machine seconds; on a busy one a start may take a minute


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """The processes of a number of ranks, started once; they run all checks."""
    started: dict[int, Ranks] = {}

    def on_ranks(ranks: int) -> Ranks:
        if ranks not in started:
            started[ranks] = Ranks(ranks, tmp_path_factory.mktemp(f"ranks-{ranks}"), MODULES)
        return started[ranks]

    yield on_ranks
    for processes in started.values():
        processes.stop()


@pytest.mark.parametrize("check", [check for module in MODULES for check in checks_of(module)])
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 2, 4))])
def test_on_ranks(on_ranks: Callable[[int], Ranks], ranks: int, check: str) -> None:
    for rank, failure in enumerate(on_ranks(ranks).failures(check)):
        assert failure is None, f"rank {rank}:\n{failure}"
