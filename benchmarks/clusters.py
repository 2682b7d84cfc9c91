"""What a peer that is a cluster of ranks costs each of its ranks: bytes, memory, a step, and time on a slow line.

    python -m benchmarks.clusters --bed ../shared/linkbed

*bytes*: two clusters of equally many ranks train a model of 4.0 million parameters, then a third one comes and
downloads the state; beside two and three peers of one rank each. *steps*: what a cluster adds to a `step` that ends
no epoch, in two ranks with `DistributedDataParallel`, where each rank would else be a peer of its own. *links*: the
seconds of an epoch's exchange where each rank has a slow line of its own and the ranks of a cluster a fast network
between them: needs root, gcc and /dev/net/tun, and the FOLDER of `linkbed.py`, which joins network namespaces;
without `--bed` it is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.links import load_bed
from benchmarks.processes import Worker, end_on_signals
from benchmarks.report import Figure, describe, environment, figure_table, number, publish, table
from benchmarks.workers.cluster_rank import SAMPLES, WIDTHS

RESULTS = Path(__file__).resolve().parent / "results"
PATIENCE = 100.0  # seconds for an answer
ALL_REDUCE = "all-reduce"
PARAMETERS = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
SHAPE = " x ".join(map(str, WIDTHS))

NOTE = f"""\
All on one machine, each rank a process with one thread, its group gloo. The model of *bytes* and *links* has
{PARAMETERS / 1e6:.2f} million float32 parameters in six tensors with {SHAPE} inputs and outputs, stepped by AdamW;
each rank brings {SAMPLES} samples to an epoch and makes one step in it. A *single peer* is one process with
`shoal.Cluster(strands=...)`, as peers of a run with clusters are; *no cluster* is one without."""

ON_BYTES = """\
*Sent* is what the rank has sent to other peers in an epoch (the largest of all ranks, mean over the epochs), *down*
what a rank of a newcomer has received for the state: `dht.node.bytes_sent` and `bytes_received`, which count
vectors and states. *Averaging buffers* are the inputs and outputs of all vectors that live in the process, *pieces*
the parts of the parameters that the rank steps, with their gradients, beside the model's own, and *state* what
AdamW keeps of them."""

ON_STEPS = """\
Two ranks on gloo with a model of 2,632 parameters. Sides take turns in blocks; each step begins after a barrier.
*Beside* is the median over the blocks of the differences of the medians, in the rank where it is larger. *Single
peer* is that the same processes each are a peer of their own, with the same model; *all-reduce* is one of a single
number, which a cluster needs at least to know who is there."""

ON_LINKS = """\
Two clusters, each rank in a network namespace with a line of its own to the other cluster, and a fast bridge to its
mates. *Seconds*: from a moment at which all ranks have their gradients to the end of the last rank's step, which
has the new parameters; sides take turns epoch by epoch. *Packets* counts the bytes of all layers that a rank sent on
its line. The table shows the rank with the most. *Bytes' time*: how long the line needs for the bytes of the vector."""


class Peer:
    """The ranks of one peer of a run."""

    def __init__(self, within: ExitStack, folder: Path, lines: Sequence[Line], **told: Any) -> None:
        folder.mkdir(parents=True)
        self.ranks = []
        for rank, line in enumerate(lines):
            given = {**told, "rank": rank, "size": len(lines), "folder": str(folder)} | line.told
            arguments = [json.dumps(given)]
            log = folder / f"{rank}.log"
            worker = Worker(
                sys.executable,
                "benchmarks.workers.cluster_rank",
                arguments,
                log,
                within=line.within,
                variables=line.variables,
            )
            within.callback(worker.stop, 15.0)
            self.ranks.append(worker)
        for worker in self.ranks:  # first of all
            within.callback(worker.hang_up)

    def ask(self, command: str, **given: Any) -> list[Any]:
        """What each rank answers."""
        return ask([self], command, **given)


class Line:
    """How a rank is on the network; on loopback.

    Attributes:
        within, variables: see `Worker`.
        told: to the rank.
    """

    within: Sequence[str] = ()
    variables: dict[str, str] | None = None

    def __init__(self) -> None:
        self.told = {"address": "127.0.0.1", "line": "lo"}


class OwnLine(Line):
    """A line of its own, and a bridge to the others of its cluster, as on several hosts.

    Args:
        bed: joins the lines.
        first: the bed's number of the cluster's rank 0.
        rank: of the cluster.
    """

    def __init__(self, bed: Any, first: int, rank: int) -> None:
        index = first + rank
        name, home = bed.names[index], bed.names[first]
        if rank == 0:
            _ip(home, "link add mates type bridge")
        else:
            _ip(home, f"link add m{rank} type veth peer name mates netns {name}")
            _ip(home, f"link set m{rank} master mates up")
        _ip(name, f"addr add 10.99.{first}.{rank + 1}/24 dev mates")
        _ip(name, "link set mates up")
        host = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]  # else it is one host with others
        self.within = ["ip", "netns", "exec", name, *host]
        self.variables = {"GLOO_SOCKET_IFNAME": "mates", "MASTER_ADDR": f"10.99.{first}.1"}
        self.told = {"address": bed.address(index), "line": "tun0"}


def _ip(namespace: str, words: str) -> None:
    subprocess.run(["ip", "-n", namespace, *words.split()], check=True)


def ask(peers: Sequence[Peer], command: str, **given: Any) -> list[Any]:
    """What each rank of these peers answers; they do it at once."""
    ranks = [rank for peer in peers for rank in peer.ranks]
    for rank in ranks:
        rank.send(command, **given)
    return [rank.receive(PATIENCE) for rank in ranks]


def open_all(peers: Sequence[Peer]) -> None:
    """Have all ranks in one DHT."""
    first, *others = [rank for peer in peers for rank in peer.ranks]
    addresses = first.ask("open", PATIENCE, initial_peers=[])
    for rank in others:
        rank.send("open", initial_peers=addresses)
    for rank in others:
        rank.receive(PATIENCE)


class Run:
    """Peers of one run, all of the same size.

    Args:
        within: ends them.
        folder: for what they write.
        size: the ranks of each.
        kind, strands: see `benchmarks.workers.cluster_rank`.
        line: of a rank, given its peer's number and its own.
        newcomers: how many more than two are made, but not begun.
    """

    def __init__(
        self,
        within: ExitStack,
        folder: Path,
        size: int,
        kind: str,
        strands: int,
        line: Callable[[int, int], Line] = lambda _peer, _rank: Line(),
        newcomers: int = 0,
    ) -> None:
        self.all = []
        for index in range(2 + newcomers):
            lines = [line(index, rank) for rank in range(size)]
            told = {"kind": kind, "strands": strands, "first": index * size, "ranks": 2 * size, "peers": 2}
            self.all.append(Peer(within, folder / f"{kind} {size} {index}", lines, **told))
        self.peers = self.all[:2]
        open_all(self.all)
        ask(self.peers, "make")

    def epoch(self) -> float:
        """Make one; its seconds."""
        ask(self.peers, "batch")
        told = ask(self.peers, "epoch", at=time.monotonic() + 0.3)
        if len({one["epoch"] for one in told}) > 1:
            raise RuntimeError(f"ranks are in different epochs: {told}")
        return max(float(one["seconds"]) for one in told)

    def check(self) -> None:
        """Raises RuntimeError if ranks have different parameters."""
        if len(set(ask(self.peers, "digest"))) > 1:
            raise RuntimeError("ranks have different parameters")

    def traffic(self, name: str) -> list[int]:
        """Of each rank so far."""
        return [one[name] for one in ask(self.peers, "traffic")]


@contextmanager
def workers() -> Any:
    """Within, they are; their folder is."""
    with tempfile.TemporaryDirectory(prefix="shoal-clusters-") as folder, ExitStack() as within:
        yield within, Path(folder)


def measure_bytes(options: argparse.Namespace) -> tuple[list[str], list[Figure], dict[str, Any]]:
    """Bytes and memory of a rank."""
    found: dict[str, dict[str, float]] = {}
    sides = [("no cluster", "peer", 1), *((_name(size), "cluster", size) for size in options.ranks)]
    for name, kind, size in sides:
        with workers() as (within, folder):
            run = Run(within, folder, size, kind, options.strands, newcomers=1)
            run.epoch()
            before = run.traffic("sent")
            for _ in range(options.epochs):
                run.epoch()
            run.check()
            sent = [(now - was) / options.epochs for now, was in zip(run.traffic("sent"), before, strict=True)]
            memory = ask(run.peers, "memory")
            newcomer = run.all[2]
            newcomer.ask("make")
            told = newcomer.ask("download")
            if not all(one["epoch"] == options.epochs + 1 for one in told):
                raise RuntimeError(f"the newcomer has not downloaded: {told}")
            if set(newcomer.ask("digest")) != set(run.peers[0].ask("digest")):
                raise RuntimeError("the newcomer has other parameters")
            received = [one["received"] for one in newcomer.ask("traffic")]
            found[name] = {"sent": max(sent), "received": max(received)}
            found[name] |= {key: max(one[key] for one in memory) for key in memory[0]}
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    keys = {"sent": "sent", "vectors": "averaging buffers", "pieces": "pieces", "state": "state", "received": "down"}
    alone = found[_name(1)]
    rows, figures = [], []
    for name, one in found.items():
        cells = [f"{number(one[key] / 1e6)} ({number(one[key] / alone[key], 4)})" for key in keys]
        rows.append([name, *cells])
    for size in options.ranks[1:]:
        for key, called in keys.items():
            ratio = found[_name(size)][key] / alone[key]
            figures.append(Figure(f"{called} of {_name(size)} x {size}, of a single peer", ratio * size, "<= 1.05"))
    for key in ("sent", "vectors", "received"):
        figures.append(
            Figure(f"{keys[key]} of a single peer, of no cluster", alone[key] / found["no cluster"][key], "")
        )
    head = ["each rank of", *(f"{called}, MB (of single's)" for called in keys.values())]
    text = ["## Bytes and memory of a rank", ON_BYTES, f"{options.strands} strands.", table(head, rows)]
    return text, figures, found


def _name(size: int) -> str:
    return "a single peer" if size == 1 else f"{size} ranks"


def measure_steps(options: argparse.Namespace) -> tuple[list[str], list[Figure], dict[str, Any]]:
    """A step that ends no epoch."""
    sides = {"single peer": 0, "strands=1": 1, "strands=8": 8}
    raw: dict[str, list[list[float]]] = {side: [] for side in (*sides, ALL_REDUCE)}  # a median of each rank
    with workers() as (within, folder):
        peer = Peer(within, folder / "steps", [Line(), Line()], kind="cluster", strands=8, first=0, ranks=2, peers=1)
        open_all([peer])
        peer.ask("prepare", sides=sides)
        for side in raw:
            peer.ask("steps", side=side, count=options.steps)  # thrown away
        for _ in range(options.blocks):
            for side, medians in raw.items():
                medians.append([median(took) for took in peer.ask("steps", side=side, count=options.steps)])
    rows, figures = [], []
    for side, medians in raw.items():
        beside = 0.0
        if side not in ("single peer", ALL_REDUCE):
            pairs = list(zip(medians, raw["single peer"], strict=True))
            beside = max(median(mine[rank] - alone[rank] for mine, alone in pairs) for rank in range(2))
            figures.append(Figure(f"ms that {side} adds to a step", beside * 1e3, "<= 0.5"))
        took = [number(median(one[rank] for one in medians) * 1e3, 3) for rank in range(2)]
        rows.append([side, *took, number(beside * 1e3, 3) if beside else ""])
    print(rows, file=sys.stderr, flush=True)
    head = ["side", "rank 0, ms", "rank 1, ms", "beside, ms"]
    count = f"{options.blocks} blocks of {options.steps} steps of each side."
    return ["## A step that ends no epoch", ON_STEPS, count, table(head, rows)], figures, raw


def measure_links(options: argparse.Namespace) -> tuple[list[str], list[Figure], dict[str, Any]]:
    """An epoch's exchange on slow lines."""
    sides = [("no cluster", "peer", 1), *((_name(size), "cluster", size) for size in options.ranks)]
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name, _, _ in sides}
    with load_bed(options.bed)(2 * sum(size for _, _, size in sides)) as bed, workers() as (within, folder):
        runs, free = {}, 0
        for name, kind, size in sides:

            def own(peer: int, rank: int, start: int = free, size: int = size) -> Line:
                return OwnLine(bed, start + peer * size, rank)

            runs[name] = Run(within, folder, size, kind, options.strands, own)
            free += 2 * size
        bed.set(delay=options.delay, rate=options.rate)
        for run in runs.values():
            run.epoch()
        before = {name: run.traffic("packets") for name, run in runs.items()}
        for _ in range(options.epochs):
            for name, run in runs.items():
                found[name]["seconds"].append(run.epoch())
                print(f"{name}: {found[name]['seconds'][-1]:.3f} s", file=sys.stderr, flush=True)
        for name, run in runs.items():
            run.check()
            packets = [now - was for now, was in zip(run.traffic("packets"), before[name], strict=True)]
            found[name]["packets"] = max(packets) / options.epochs
    rows, figures = [], []
    alone = found["no cluster"]  # one round on the line: strands on one line may take longer
    for name, kind, size in sides:
        one = found[name]
        ratio = median(mine / theirs for mine, theirs in zip(one["seconds"], alone["seconds"], strict=True))
        floor = PARAMETERS * 4 * 8 / size / (options.rate * 1e6)
        spread = f"{number(min(one['seconds']))} to {number(max(one['seconds']))}"
        times = [number(median(one["seconds"])), spread, number(floor), number(ratio, 3)]
        of_alone = number(one["packets"] / alone["packets"], 4)
        rows.append([name, *times, f"{number(one['packets'] / 1e6)} ({of_alone})"])
        if kind == "cluster":
            figures.append(
                Figure(
                    f"seconds of an exchange, {name} x {size}, of no cluster",
                    ratio * size,
                    "<= 1.3" if size > 1 else "",
                )
            )
    head = ["two of", "seconds", "from, to", "bytes' time", "of no cluster's", "packets, MB (of no cluster's)"]
    line = f"{options.rate:g} Mbit/s up and {options.delay:g} ms one way for each rank, {options.strands} strands, "
    text = ["## An epoch's exchange on slow lines", ON_LINKS, f"{line}{options.epochs} epochs.", table(head, rows)]
    return text, figures, found


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"bytes": measure_bytes, "steps": measure_steps, "links": measure_links}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="of a cluster; 1 is the measure")
    parser.add_argument("--strands", type=int, default=8, help="of bytes and links (default: 8)")
    parser.add_argument("--epochs", type=int, default=7, help="of bytes and links (default: 7)")
    parser.add_argument("--steps", type=int, default=100, help="of a block (default: 100)")
    parser.add_argument("--blocks", type=int, default=20, help="of each side of steps (default: 20)")
    parser.add_argument("--bed", type=Path, help="the folder of linkbed.py")
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of each rank's way out (default: 100)")
    parser.add_argument("--delay", type=float, default=5.0, help="ms one way (default: 5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for clusters.md and clusters.json")
    options = parser.parse_args()
    if options.ranks[0] != 1 or any(options.strands % size for size in options.ranks):
        parser.error("--ranks begins with 1, and all divide --strands")
    end_on_signals()
    facts = environment()
    text = ["# Clusters as peers", describe(facts), NOTE]
    figures: list[Figure] = []
    data: dict[str, Any] = {"environment": facts}
    for part, measure in parts.items():
        if part not in options.only or (part == "links" and options.bed is None):
            continue
        lines, found, data[part] = measure(options)
        text += lines
        figures += found
    figures = [figure for figure in figures if not math.isnan(figure.value)]
    data["figures"] = [asdict(figure) | {"met": figure.met} for figure in figures]
    command = shlex.join(["python", "-m", "benchmarks.clusters", *sys.argv[1:]])
    text += [figure_table(figures), f"`{command}` makes this again."]
    publish(options.out, "clusters", "\n\n".join(text), data)


if __name__ == "__main__":
    main()
