"""The whole example on this machine: two peers and a monitor.

python -m examples.albert [arguments of the trainer]
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

ANNOUNCEMENT = "others join with --initial-peers "


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of this example; half of the cores are its own."""
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    command = [sys.executable, "-m", f"examples.albert.{module}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": threads})


def show(name: str, process: subprocess.Popen[str]) -> None:
    """Print what a process prints, under its name."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name:8} {line}", end="", flush=True)


def main() -> None:
    """Starts the processes, and waits for the trainers."""
    options = ["--min-peers", "2", *sys.argv[1:]]
    first = start("trainer", *options)
    assert first.stdout is not None
    started, shown = [first], list[threading.Thread]()
    try:
        addresses: list[str] = []
        while not addresses:
            line = first.stdout.readline()
            if not line:
                sys.exit("the first peer ended before it could be joined: see above")
            print(f"{'peer 1':8} {line}", end="", flush=True)
            addresses = line.removeprefix(ANNOUNCEMENT).split() if line.startswith(ANNOUNCEMENT) else []
        # The monitor first: it is to see the run from its beginning.
        monitor = start("monitor", "--initial-peers", *addresses, "--refresh", "0.5")
        started.append(monitor)
        second = start("trainer", *options, "--initial-peers", *addresses)
        started.append(second)
        for name, process in (("peer 1", first), ("peer 2", second), ("monitor", monitor)):
            shown.append(threading.Thread(target=show, args=(name, process), daemon=True))
            shown[-1].start()
        # When one has failed, the other would wait for it.
        while None in (codes := [first.poll(), second.poll()]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in started:
            process.terminate()
            process.wait()
        for thread in shown:
            thread.join()
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
