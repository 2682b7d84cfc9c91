"""What `benchmarks.beside` compares, made by peers in this process: rounds, matchmaking, a kill, accumulating steps."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.workers.link import answer, fill
from benchmarks.workers.trainer import draw, make_model
from shoal.p2p import tcp

MATCHMAKING_ELEMENTS, KILL_ELEMENTS = 1000, 6_000_000
MATCHMAKINGS, ROUNDS_1M, STEPS, BATCH = 10, 4, 10, 32  # of one turn; the last in samples
REST_SECONDS = 10.0
KILLED_AFTER = 0.05  # seconds of a round of some 0.2
MODEL = "6.3M"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
NEVER = 1 << 40  # samples: the steps only accumulate


def averager_of(vector: torch.Tensor, dht: shoal.DHT, name: str, peers: int) -> shoal.DecentralizedAverager:
    """One peer's averager in a run of so many."""
    return shoal.DecentralizedAverager([vector], dht=dht, prefix=name, target_group_size=peers, start=True)


class Group:
    """Peers of this process that average one vector.

    Args:
        dhts: of these peers.
        name: of the run.
        elements: of the vector.
        others: how many peers of other processes take part.
    """

    def __init__(self, dhts: list[shoal.DHT], name: str, elements: int, others: int = 0) -> None:
        self.vectors = [torch.zeros(elements) for _ in dhts]
        self._averagers = [
            averager_of(vector, dht, name, len(dhts) + others) for vector, dht in zip(self.vectors, dhts, strict=True)
        ]
        for rank, vector in enumerate(self.vectors):
            fill(vector, rank)

    def round(self, victim: Victim | None = None) -> None:
        """Average once; a victim takes part, and is killed on the way. Raises RuntimeError if they did not average
        together."""
        if victim is not None:
            victim.step()
        futures = [averager.step(wait=False) for averager in self._averagers]
        if victim is not None:
            time.sleep(KILLED_AFTER)
            victim.kill()
        for group in [future.result() for future in futures]:
            if group is None or len(group) < len(futures):
                raise RuntimeError(f"a round of {len(group)} members")

    def close(self) -> None:
        """Leave the run."""
        for averager in self._averagers:
            averager.shutdown()


class Victim:
    """A peer in a process of its own, for a `with` block."""

    def __init__(self, address: str, name: str, elements: int, peers: int) -> None:
        self._arguments = [address, name, str(elements), str(peers)]

    def __enter__(self) -> Victim:
        command = [sys.executable, "-m", "benchmarks.workers.beside", *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def step(self) -> None:
        """It joins a round."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


def be_victim(address: str, name: str, elements: int, peers: int) -> None:
    """The process of a `Victim`."""
    with shoal.DHT([address], start=True, host_maddrs=[LOOPBACK]) as dht:
        averager = averager_of(torch.ones(elements), dht, name, peers)
        print("ready", flush=True)
        for _ in sys.stdin:
            averager.step(wait=False)


class Beside:
    """All that is measured, with the Shoal of this worker's tree."""

    def __init__(self) -> None:
        first = shoal.DHT(start=True, host_maddrs=[LOOPBACK])
        self._address = str(first.get_visible_maddrs()[0])
        self._dhts = [first, *(shoal.DHT([self._address], start=True, host_maddrs=[LOOPBACK]) for _ in range(3))]
        self._groups = {
            "pair": Group(self._dhts[:2], "pair", MATCHMAKING_ELEMENTS),
            "1M": Group(self._dhts, "1M", 1_000_000),
            "25M": Group(self._dhts, "25M", 25_000_000),
            "kill": Group(self._dhts[:3], "kill", KILL_ELEMENTS, others=1),
        }
        self._model = make_model(MODEL)
        self._generator = torch.Generator().manual_seed(0)
        self._optimizer = shoal.Optimizer(
            dht=first,
            run_id="accumulates",
            target_batch_size=NEVER,
            batch_size_per_step=BATCH,
            params=self._model.parameters(),
            optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        )

    def round_1m(self) -> dict[str, float]:
        """Rounds of a vector of 1 million."""
        return self._measure(self._groups["1M"].round, times=ROUNDS_1M)

    def round_25m(self) -> dict[str, float]:
        """One round of a vector of 25 million."""
        return self._measure(self._groups["25M"].round)

    def matchmaking(self) -> dict[str, float]:
        """Rounds of a small vector."""
        return self._measure(self._groups["pair"].round, times=MATCHMAKINGS)

    def kill(self) -> dict[str, float]:
        """A round of which one of four members is killed. Its CPU is not counted, nor the time of its start."""
        with Victim(self._address, "kill", KILL_ELEMENTS, 4) as victim:
            return self._measure(lambda: self._groups["kill"].round(victim))

    def accumulate(self) -> dict[str, float]:
        """Steps that only accumulate, without the CPU seconds of forward and backward passes, which are torch's."""
        passes = 0.0

        def step() -> None:
            nonlocal passes
            inputs, targets = draw(BATCH, self._generator)
            before = time.process_time()
            nn.functional.cross_entropy(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            passes += time.process_time() - before
            self._optimizer.step()
            self._optimizer.zero_grad()

        took = self._measure(step, times=STEPS)
        return took | {"cpu": took["cpu"] - passes}

    def rest(self) -> dict[str, float]:
        """Nothing is asked of the peers."""
        return self._measure(lambda: time.sleep(REST_SECONDS))

    def _measure(self, turn: Callable[[], None], times: int = 1) -> dict[str, float]:
        """CPU seconds of this process, and seconds; bytes that its peers have sent over links, without the lanes."""
        cpu, started, sent = time.process_time(), time.monotonic(), self._sent()
        for _ in range(times):
            turn()
        return {"cpu": time.process_time() - cpu, "seconds": time.monotonic() - started, "bytes": self._sent() - sent}

    def _sent(self) -> float:
        transports: list[Any] = [dht.dht_node.node.transport for dht in self._dhts]  # no public name leads to the links
        return float(sum(tcp.counts(link.socket)[0] for each in transports for link in list(each._links)))

    def measure(self, command: str) -> dict[str, Any]:
        """One turn of what that command names."""
        took: dict[str, float] = getattr(self, command)()
        return took

    def close(self) -> None:
        """Leave all runs."""
        self._optimizer.shutdown()
        for group in self._groups.values():
            group.close()
        for dht in self._dhts:
            dht.shutdown()


def main() -> None:
    """Answers commands until stdin ends; with arguments, is a victim."""
    torch.set_num_threads(1)
    if sys.argv[1:]:
        address, name, elements, peers = sys.argv[1:]
        be_victim(address, name, int(elements), int(peers))
        return
    beside = Beside()
    print("ready", file=sys.stderr)
    answer(beside.measure, beside.close)


if __name__ == "__main__":
    main()
