"""What a rank does that is a group of its own."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import shoal

MADE: dict[str, Any] = {"run_id": "r", "target_batch_size": 4, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}


def refusal(make: Any) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""


def seen_of_arguments() -> dict[str, str]:
    """What is refused, and what a step did."""
    found: dict[str, str] = {}
    found["strands"] = refusal(lambda: shoal.Cluster(strands=0))
    found["group"] = refusal(lambda: shoal.Cluster("nccl"))  # type: ignore[arg-type]
    with shoal.DHT(start=True) as dht:
        given: dict[str, dict[str, Any]] = {
            "cluster": {"cluster": "all"},
            "reuse": {"reuse_grad_buffers": True},
            "params": {"params": None},
            "delayed": {"delay_grad_averaging": True},
            "norms": {"optimizer": lambda p: torch.optim.Adafactor(p)},
            "together": {"optimizer": lambda p: shoal.Together(torch.optim.SGD(p, lr=0.1))},
        }
        for name, differing in given.items():
            arguments = {"cluster": shoal.Cluster(), "params": nn.Linear(2, 1).parameters(), **MADE, **differing}
            found[name] = refusal(lambda arguments=arguments: shoal.Optimizer(dht=dht, **arguments))
        model = nn.Linear(2, 1)
        optimizer = shoal.Optimizer(dht=dht, params=model.parameters(), cluster=shoal.Cluster(), **MADE)
        before = model.weight.detach().clone()
        model(torch.ones(4, 2)).sum().backward()
        found["scaler"] = refusal(lambda: optimizer.step(batch_size=4, grad_scaler=shoal.GradScaler("cpu")))
        found["half"] = refusal(lambda: optimizer.step(batch_size=0.5))
        optimizer.step(batch_size=4)
        found["epoch"] = str(optimizer.local_epoch)
        found["moved"] = str(not torch.equal(model.weight, before))
        optimizer.shutdown()
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = "2"  # as torchrun says it
    found["before"] = refusal(lambda: shoal.Cluster(strands=1))
    return found
