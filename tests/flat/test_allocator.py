"""Memory that a backward pass frees is there for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from shoal.flat import keep_freed_memory
keep_freed_memory(2**28)
def blocks():
    return [torch.zeros(2**20) for _ in range(30)]
for _ in range(3):
    blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    """Page faults of 120 MB that were allocated and freed before, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=clean | environment, capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the faults of glibc's allocator on Linux")
def test_freed_gradients_cost_no_faults_and_the_environment_has_the_last_word() -> None:
    assert faults() < 100
    # Left to itself, glibc may keep them or not, by what was freed before and what lies above them in the heap.
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") > 1000
