"""msgspec makes what it needs of a type when it first meets it, and other threads may see that half made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forked import ROOT


@pytest.mark.long
@pytest.mark.parametrize("what", ["manifest", "service", "schema"])
def test_threads_that_decode_a_type_for_the_first_time(what: str) -> None:
    """Without the care that is taken, some of the processes end by a signal. (Forked ones hardly ever do.)"""
    command = [sys.executable, "-m", "tests.averaging.first_decode", what]
    codes = [subprocess.run(command, cwd=ROOT, check=False, timeout=60.0).returncode for _ in range(8)]
    assert codes == [0] * 8
