"""One averager as a process of its own: obeys JSON lines on stdin, answers with JSON lines. It can be told to kill
itself with SIGKILL at a given point of a step."""

from __future__ import annotations

import json
import sys

import torch
from blake3 import blake3
from torch import nn

import shoal
from shoal.averaging.control import StepControl
from shoal.flat import bytes_of
from shoal.optim.power_sgd_averager import _Step
from tests.telling import die, say

SHAPES = [(300, 200), (50,), (16, 8, 3, 3)]


def main() -> None:
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    dht = shoal.DHT(options.get("initial_peers", []), start=True)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    make = shoal.PowerSGDGradientAverager if "averager_rank" in options["averager"] else shoal.GradientAverager
    averager = make(parameters, dht=dht, prefix="test", start=True, **options["averager"])
    say(addresses=[str(address) for address in dht.get_visible_maddrs()], peer=str(dht.peer_id))
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "die":  # between the rounds of PowerSGD, or when the result is about to be written
                target, name = (_Step, "rights") if command["where"] == "between" else (StepControl, "claim")
                setattr(target, name, die)
                say(ok=True)
            case "step":
                generator = torch.Generator().manual_seed(command["seed"])
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                averager.accumulate_grads_(command.get("batch_size", 1))
                try:
                    gathered = averager.step(timeout=60.0)
                except shoal.AveragingError as error:
                    say(error=str(error))
                    continue
                hasher = blake3()
                with averager.use_averaged_gradients() as averaged:
                    for gradient in averaged:
                        hasher.update(bytes_of(gradient))
                say(digest=hasher.hexdigest(), members=len(gathered))
            case "stop":
                averager.shutdown()
                dht.shutdown()
                say(ok=True)
                return


main()
