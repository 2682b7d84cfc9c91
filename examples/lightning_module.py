"""Train a small network with Lightning, alone or with others.

    shoal node                                          # prints an address by which peers find each other
    python lightning_module.py /ip4/.../p2p/...         # each peer, on this machine or another

The three lines that name `shoal` are all that an ordinary script does not have. `max_steps`, schedulers with
`interval="step"` and `gradient_clip_val` are those of one process with the batch of the whole run: a step of the
Trainer is an epoch of the run.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


class Regression(lightning.LightningModule):
    """Learns the product of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The mean squared error of a batch of inputs and outputs."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, with a cosine over the 60 steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def main() -> None:
    """Trains 60 epochs of the run, whoever takes part."""
    torch.manual_seed(0)  # the same first parameters in every peer
    module = Regression()
    inputs = torch.randn(4096, 8)
    batches = DataLoader(TensorDataset(inputs, inputs[:, :3].prod(1, keepdim=True)), batch_size=16, shuffle=True)
    dht = shoal.DHT(sys.argv[1:], start=True)
    trainer = lightning.Trainer(
        strategy=shoal.integrations.lightning.SwarmStrategy(dht=dht, run_id="product", target_batch_size=256),
        max_steps=60,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(module, batches)
    print({name: value.item() for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
