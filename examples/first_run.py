"""A first run: one peer trains alone, and others join it by the address that it prints.

    python examples/first_run.py                          # the first peer
    python examples/first_run.py /ip4/.../tcp/.../p2p/... # any other, on this machine or another

docs/index.md says what to see.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import sys

import torch

import shoal

torch.manual_seed(0)  # every peer begins with the same parameters
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
torch.seed()  # and draws its own batches

with shoal.DHT(initial_peers=sys.argv[1:], host_maddrs=["/ip4/0.0.0.0/tcp/0"], start=True) as dht:
    print("address:", dht.get_visible_maddrs()[0], flush=True)
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="first-run",
        target_batch_size=16384,  # samples of all peers together in one epoch
        batch_size_per_step=16,  # samples of this peer in one step
        params=model.parameters(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    )
    optimizer.on_event = lambda event: print(event, flush=True)
    try:
        while optimizer.local_epoch < 1000:
            inputs = torch.randn(16, 32)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().mean(dim=1, keepdim=True))
            loss.backward()
            optimizer.report(loss=loss)  # for `shoal top`
            optimizer.step()
            optimizer.zero_grad()
    except KeyboardInterrupt:
        print("leaving the run")
    finally:
        optimizer.shutdown()
