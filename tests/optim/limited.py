"""A peer whose address space is limited while it loads a state: says what came of it, a line for each limit.

python -m tests.optim.limited
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.optim.kept import Kept
from shoal.swarm.protocol.errors import AveragingError

MB = 1 << 20
WIDTH = 2048  # 16 MiB of parameters, and 32 MiB of Adam's statistics


def virtual() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmSize:")[1].split()[0]) << 10


def made(dht: shoal.DHT, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, WIDTH)
    return model, shoal.Optimizer(
        dht=dht,
        run_id=f"run {seed}",
        target_batch_size=4,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
    )


def main() -> None:
    with shoal.DHT(start=True) as dht:
        (donor, giver), (model, taker) = made(dht, 0), made(dht, 1)
        donor(torch.ones(4, WIDTH)).square().mean().backward()
        giver.step(batch_size=4)
        copy: Kept = giver._state.exact_copy()
        state = copy.as_downloaded(0)
        taker._run.donors = lambda: [dht.peer_id]
        taker._run.download = lambda *_, **__: state
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for limit in (0, 12 * MB, 24 * MB, 200 * MB):
            resource.setrlimit(resource.RLIMIT_AS, (virtual() + limit, resource.RLIM_INFINITY))
            try:
                done = str(taker.load_state_from_peers())
            except AveragingError as error:
                done = f"{type(error).__name__}: {error}"
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            same = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
            print(limit // MB, same, taker.local_epoch, len(taker._state.optimizer.state), done, flush=True)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), donor.parameters(), strict=True))
        taker.shutdown()
        giver.shutdown()


if __name__ == "__main__":
    main()
