"""What a rank does whose model is wrapped, with an optimizer of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shoal


def refusal(dht: shoal.DHT, run_id: str, params: Any, module: nn.Module | None = None) -> str:
    """What the optimizer raises when it is made, or in its first step."""
    try:
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id=run_id,
            target_batch_size=4,
            params=params,
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
        )
    except ValueError as error:
        return str(error)
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step(batch_size=4)
    except ValueError as error:
        return str(error)
    finally:
        optimizer.shutdown()
    return ""


def refusals() -> dict[str, str]:
    """Of each case, what `step` raises."""
    groups = [distributed.new_group([number]) for number in range(2)]
    found: dict[str, str] = {}
    with shoal.DHT(start=True) as dht:
        plain = nn.Linear(4, 1)
        found["plain"] = refusal(dht, "plain", plain.parameters())
        model = nn.Linear(4, 1)
        wrapped: nn.Module | None = DistributedDataParallel(model)
        found["ddp"] = refusal(dht, "ddp", model.parameters())
        found["beside ddp"] = refusal(dht, "beside", nn.Linear(4, 1).parameters())
        del wrapped
        found["after ddp"] = refusal(dht, "after", model.parameters())
        alone = DistributedDataParallel(nn.Linear(4, 1), process_group=groups[distributed.get_rank()])
        found["ddp of one rank"] = refusal(dht, "one", alone.parameters())
        for original in (False, True):
            sharded = FullyShardedDataParallel(nn.Linear(4, 1), use_orig_params=original, device_id=torch.device("cpu"))
            found[f"fsdp {original}"] = refusal(dht, f"fsdp {original}", sharded.parameters())
        second = nn.Linear(4, 1)
        fully_shard(second, mesh=distributed.device_mesh.init_device_mesh("cpu", (2,)))
        found["fsdp2"] = refusal(dht, "fsdp2", second.parameters())
    return found
