"""Train a small network in a loop with Accelerate, alone or with others.

    shoal node                                         # prints an address by which peers find each other
    python accelerate_loop.py /ip4/.../p2p/...         # each peer, on this machine or another

The three lines that name `shoal` are all that an ordinary script does not have; the last of them stands in place of
`accelerator.prepare(model, optimizer, batches, schedule)`. The schedule follows the epochs of the run, of which each
has 256 samples of all peers; the passes over the data are this peer's own.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


def main() -> None:
    """Trains until the run has reached 32 epochs."""
    torch.manual_seed(0)  # the same first parameters in every peer
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    inputs = torch.randn(4096, 8)
    batches = DataLoader(TensorDataset(inputs, inputs[:, :3].prod(1, keepdim=True)), batch_size=16, shuffle=True)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    dht = shoal.DHT(sys.argv[1:], start=True)
    model, optimizer, batches, schedule = shoal.integrations.accelerate.swarm(
        accelerator,
        model,
        optimizer,
        batches,
        schedule,
        dht=dht,
        run_id="loop",
        target_batch_size=256,
        max_grad_norm=1.0,
    )
    while (epoch := optimizer.optimizer.local_epoch) < 32:
        for batch, outputs in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), outputs)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if optimizer.optimizer.local_epoch > epoch:
                epoch = optimizer.optimizer.local_epoch
                print(f"epoch {epoch}: loss {loss.item():.3f}, rate {schedule.get_last_lr()[0]:.5f}", flush=True)
            if epoch >= 32:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
