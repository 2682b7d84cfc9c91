"""Rounds over slow lines: peers in network namespaces that an emulator joins, at several rates.

    python -m benchmarks.links --bed ../shared/linkbed --rates 5 20 50 100

Each peer trains a model of so many megabytes for a while, with the defaults of `shoal.Optimizer`. The report says how
many epochs were made together, how long a round took, and how far that is from what its bytes need on the line: each
member sends 2 (n-1)/n of the vector. Allowed are 1.3 times that (1.6 where packets are lost) and 8 round trips. Needs
root, gcc and /dev/net/tun (the emulator says which is missing); `--cubic` also setpriv, and a machine whose
net.ipv4.tcp_allowed_congestion_control has no bbr.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

from benchmarks.processes import ROOT
from benchmarks.report import median

RESULTS = ROOT / "benchmarks" / "results"
_CUBIC = """sysctl -qw net.ipv4.tcp_congestion_control=cubic
exec setpriv --bounding-set=-net_admin --inh-caps=-net_admin "$@"
"""
ROUND_TRIPS = 8  # of messages that a round may take beside its bytes


class Peer:
    """A worker in a namespace, and what it said. It runs in `tree`, a checkout or what `tree_with` has made."""

    def __init__(
        self,
        bed: Any,
        index: int,
        given: dict[str, Any],
        *,
        cubic: bool = False,
        worker: str = "link_trainer",
        python: str = sys.executable,
        tree: Path = ROOT,
        log: IO[str] | None = None,
    ) -> None:
        command = ["sh", "-c", _CUBIC, "sh"] if cubic else []
        command += [python, "-m", f"benchmarks.workers.{worker}", json.dumps(given)]
        environment = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
        self.began = time.monotonic()
        self.process = bed.popen(
            index,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=tree,
            env=environment,
            start_new_session=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(json.loads(text))
            self.ready.set()
        self.ready.set()

    @property
    def addresses(self) -> list[str]:
        self.ready.wait(60)
        return list(self.lines[0]["addresses"])

    def wait_until_made(self) -> None:
        until = time.monotonic() + 120
        while not self.of("made"):
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("a peer did not start")
            time.sleep(0.05)

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def end(self, timeout: float) -> None:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()


def load_bed(folder: Path) -> Any:
    """The class LinkBed of `folder`/linkbed.py."""
    spec = importlib.util.spec_from_file_location("linkbed", folder / "linkbed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LinkBed


def run(bed_class: Any, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """One run of all peers at one rate; what became of it."""
    options = {"target_batch_size": args.target, **json.loads(args.options)}
    with bed_class(args.peers) as bed:
        peers: list[Peer] = []
        try:
            first: list[str] = []
            for index in range(args.peers):
                given = {
                    "address": bed.address(index),
                    "initial_peers": first,
                    "megabytes": args.megabytes,
                    "seconds": args.seconds,
                    "step": args.step,
                    "options": options,
                }
                peers.append(Peer(bed, index, given, cubic=args.cubic))
                first = first or peers[0].addresses
            for peer in peers:
                peer.wait_until_made()
            bed.set(delay=args.delay, rate=rate, loss=args.loss)
            for peer in peers:
                peer.begin()
            for peer in peers:
                peer.end(args.seconds + 240)
            stats = bed.stats()
        finally:
            for peer in peers:
                if peer.process.poll() is None:
                    peer.process.kill()
    return report(peers, rate, args) | {"stats": stats}


def report(peers: list[Peer], rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    epochs = [line for peer in peers for line in peer.of("EpochReport")]
    sizes = Counter(line["peers"] for line in epochs)
    digests: dict[int, set[str]] = {}
    for line in epochs:
        digests.setdefault(line["epoch"], set()).add(line["digest"])
    # The first round is paid by everybody's start.
    together = [line for line in epochs if line["peers"] == args.peers and line["epoch"] > 1]
    sent = 2 * (args.peers - 1) / args.peers * args.megabytes * 1e6
    floor = sent * 8 / (rate * 1e6)
    allowed = (1.6 if args.loss else 1.3) * floor + ROUND_TRIPS * 2 * args.delay / 1e3
    return {
        "rate": rate,
        "peers": args.peers,
        "megabytes": args.megabytes,
        "delay": args.delay,
        "epochs": [len(peer.of("EpochReport")) for peer in peers],
        "group_sizes": dict(sizes),
        "round": median(line["allreduce"] for line in together),
        "floor": floor,
        "allowed": allowed,
        "downloads": [len(peer.of("DownloadReport")) for peer in peers],
        "logs": [[line["text"] for line in peer.of("log")] for peer in peers],
        "states_differ": sorted(epoch for epoch, found in digests.items() if len(found) > 1),
        "exit": [peer.process.returncode for peer in peers],
    }


def show(result: dict[str, Any]) -> str:
    took = result["round"]
    ratio = f"{took / result['floor']:.2f}" if took else "-"
    return (
        f"| {result['rate']:g} | {result['epochs']} | {result['group_sizes']} | {took or float('nan'):.2f} | "
        f"{result['floor']:.2f} | {ratio} | {result['allowed']:.2f} | {result['downloads']} | "
        f"{sum(map(len, result['logs']))} | {result['states_differ']} |"
    )


COLUMNS = ["Mbit/s", "epochs", "members", "round s", "bytes' time s", "ratio", "allowed s", "downloads", "warnings"]
HEADER = "\n".join(f"| {' | '.join(row)} |" for row in ([*COLUMNS, "unlike states"], ["---"] * (len(COLUMNS) + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", type=Path, required=True, help="the folder of linkbed.py")
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 20, 50, 100], help="Mbit/s of each uplink")
    parser.add_argument("--delay", type=float, default=15.0, help="ms one way")
    parser.add_argument("--loss", type=float, default=0.0, help="%% of the packets")
    parser.add_argument("--cubic", action="store_true", help="the peers may not use BBR")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=19.0, help="of float32 parameters")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training at each rate")
    parser.add_argument("--step", type=float, default=0.5, help="seconds that a step takes")
    parser.add_argument("--target", type=int, default=128, help="samples of an epoch; a step has 16")
    parser.add_argument("--options", default="{}", help="more arguments of the optimizer, as JSON")
    parser.add_argument("--name", default="links", help="of the files in benchmarks/results")
    args = parser.parse_args()
    bed_class = load_bed(args.bed)
    results = []
    print(HEADER)
    for rate in args.rates:
        began = time.monotonic()
        results.append(run(bed_class, rate, args))
        print(show(results[-1]), flush=True)
        for index, lines in enumerate(results[-1]["logs"]):
            for text in lines[:5]:
                print(f"    peer {index}: {text}", file=sys.stderr)
        print(f"    {time.monotonic() - began:.0f} s, {results[-1]['stats']}", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    line = f"{args.delay:g} ms one way, {args.loss:g} % lost, {'cubic' if args.cubic else 'BBR'}"
    lines = [f"{args.peers} peers, {args.megabytes:g} MB of float32, {line}.", "", HEADER]
    (RESULTS / f"{args.name}.md").write_text("\n".join([*lines, *map(show, results)]) + "\n")


if __name__ == "__main__":
    main()
