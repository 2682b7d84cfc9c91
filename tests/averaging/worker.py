"""One peer as a process of its own, for the tests of averaging: obeys JSON lines on stdin, answers with JSON lines.

It can be told to kill itself with SIGKILL at a given point of a round, so that a test hits the phase that it means.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.compression import compression_by_spec
from shoal.swarm.protocol.actions import Send
from shoal.swarm.protocol.leading import Leading
from shoal.swarm.protocol.messages import Begin, Commit, Part, Result
from shoal.swarm.swarm import Swarm
from tests.telling import die, say


def die_when(where: str, number: int) -> None:
    """Arrange for this process to be killed: "part" or "result" when it is about to send the `number`-th one, "begin"
    or "commit" when as coordinator it has told that to `number` members."""
    kinds = {"part": Part, "result": Result, "begin": Begin, "commit": Commit}
    sent, perform = 0, Swarm._do

    def counting(self: Swarm, action: Any) -> None:
        nonlocal sent
        if isinstance(action, Send) and isinstance(action.message, kinds[where]):
            if where in ("begin", "commit"):
                if not isinstance(self.peer.lead, Leading) and where == "begin":
                    return perform(self, action)
                perform(self, dataclasses.replace(action, to=action.to[:number]))
                time.sleep(0.1)
                die()
            sent += 1
            if sent == number:
                time.sleep(0.05)  # what was sent before is on its way: the kernel has it
                die()
        return perform(self, action)

    Swarm._do = counting  # type: ignore[method-assign]


def memory(which: str) -> int:
    """Bytes that this process holds ("VmRSS"), or has held at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def main() -> None:
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    dht = shoal.DHT(options.get("initial_peers", []), start=True, **options.get("dht", {}))
    tensor = torch.zeros(options["elements"])
    given = options["averager"]
    for name in {"compression", "state_compression"} & set(given):
        given[name] = compression_by_spec(given[name])
    averager = shoal.DecentralizedAverager([tensor], dht, start=True, **given)
    swarm = averager._engine.swarm
    assert swarm is not None
    commits: list[list[str]] = []  # of each: the tip that it was made from, and the digest
    advance = swarm.peer.participant.advance

    def advancing(commit: Commit) -> None:
        commits.append([f"{commit.tip.epoch} {commit.tip.lineage.hex()}", commit.root.hex()])
        advance(commit)

    swarm.peer.participant.advance = advancing  # type: ignore[method-assign]
    say(addresses=[str(address) for address in dht.get_visible_maddrs()], peer=str(dht.peer_id))
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "die":
                die_when(command["where"], command["number"])
                say(ok=True)
            case "coordinator":
                swarm = averager._engine.swarm
                assert swarm is not None
                say(coordinator=str(swarm.peer.participant.coordinator().peer))
            case "members":  # until it is connected to so many, itself included
                swarm = averager._engine.swarm
                assert swarm is not None
                deadline = time.monotonic() + command["seconds"]
                started = time.monotonic()
                while len(found := swarm.peer.view.connected()) != command["members"]:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.02)
                say(members=sorted(str(member.peer) for member in found), seconds=time.monotonic() - started)
            case "forget":
                swarm = averager._engine.swarm
                assert swarm is not None

                async def forget(swarm: Any = swarm, keys: Any = command["peers"]) -> None:
                    for key in keys:
                        swarm.peer.view.members.pop(shoal.PeerID.parse(key).key, None)

                dht.reactor.run(forget())
                say(ok=True)
            case "round":
                with averager.get_tensors():
                    tensor.fill_(command["value"])
                    if "seed" in command:
                        tensor.copy_(torch.randn(len(tensor), generator=torch.Generator().manual_seed(command["seed"])))
                started = time.perf_counter()
                try:
                    gathered = averager.step(timeout=command.get("timeout", 60.0), weight=command.get("weight"))
                except shoal.AveragingError as error:
                    say(error=str(error), seconds=time.perf_counter() - started)
                    continue
                report = averager.last_round
                assert report is not None
                if "save" in command:
                    residual = averager._vector.residuals[0]
                    owed = torch.zeros_like(tensor) if residual is None else residual.values
                    torch.save((tensor, owed), command["save"])
                say(
                    seconds=time.perf_counter() - started,
                    members=sorted(map(str, gathered)),
                    digest=report.digest,
                    first=tensor[0].item(),
                    last=tensor[-1].item(),
                    join_to_begin=report.join_to_begin_seconds,
                    coordinator=str(report.coordinator),
                    commits=commits,
                )
            case "until":
                sizes: list[int] = []
                deadline = time.monotonic() + command["seconds"]
                while command["members"] not in sizes and time.monotonic() < deadline:
                    try:
                        sizes.append(len(averager.step(timeout=command["seconds"])))
                    except shoal.AveragingError:
                        sizes.append(0)
                say(sizes=sizes, commits=commits)
            case "load":
                before = memory("VmRSS")
                Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
                loaded = averager.load_state_from_peers(timeout=60.0)
                assert loaded is not None
                with averager.get_tensors():
                    tensor.copy_(loaded[1][0])
                del loaded
                say(peak=memory("VmHWM") - before, left=memory("VmRSS") - before)
            case "stop":
                averager.shutdown()
                dht.shutdown()
                say(ok=True)
                return


main()
