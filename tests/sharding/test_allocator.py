"""Memory that a backward pass frees is there for the next one."""

from __future__ import annotations

import os
import resource
import sys

import pytest
import torch

from shoal.sharding.allocator import keep_freed_memory
from tests.forked import ForkedProcess


def faults(keep: str, *environment: str) -> int:
    """Page faults of 40 MB that were allocated and freed before, in a process of its own."""
    process = ForkedProcess("tests.sharding.test_allocator", keep, *environment, talk=True)
    with process.stdin, process.stdout:
        count = int(process.stdout.read())
    assert process.wait(30) == 0
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="counts the faults of glibc's allocator on Linux")
def test_freed_gradients_cost_no_faults_and_the_environment_has_the_last_word() -> None:
    assert faults("keep") < 100
    assert faults("leave") > 1000
    assert faults("keep", "MALLOC_TRIM_THRESHOLD_=131072") > 1000


def main() -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        del os.environ[name]
    for entry in sys.argv[2:]:
        name, _, value = entry.partition("=")
        os.environ[name] = value
    if sys.argv[1] == "keep":
        keep_freed_memory(2**28)

    def allocate() -> None:
        blocks = [torch.zeros(2**20) for _ in range(10)]
        del blocks

    for _ in range(3):
        allocate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    allocate()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


if __name__ == "__main__":
    main()
