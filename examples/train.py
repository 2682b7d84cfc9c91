"""Train a small GPT on the source of Python's standard library, alone or with others.

    python train.py                                     # the first peer; it prints how others join
    python train.py --initial-peers /ip4/.../p2p/...    # any other, on this machine or another

What is Shoal's here: `shoal.DHT`, by which peers find each other, and `shoal.Optimizer` around AdamW. The rest is an
ordinary training script. All peers of a run must use the same --run-id, --target-batch-size and --send; --batch-size is
each one's own: what its memory holds.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal

CONTEXT, WIDTH, LAYERS, HEADS = 64, 192, 2, 6
CHARACTERS = 256  # bytes, so that all peers have the same vocabulary whatever text they read

SENT: dict[str, dict[str, Any]] = {  # by what peers send each other
    "gradients": {},  # float32
    "8-bit": {"grad_compression": shoal.compression.BlockwiseQuantization()},
    "drift": {  # of many inner steps, in 4 bits
        "outer": shoal.DiLoCo(),
        "grad_compression": shoal.compression.Blockwise4Bit(),
        "error_feedback": 1.0,
    },
}


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """int64 [batch, CONTEXT] to logits [batch, CONTEXT, CHARACTERS]."""
        hidden = self.characters(numbers) + self.positions
        logits: Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits


def read_text(data: Path | None) -> Tensor:
    """The bytes of a file, or of the standard library's top-level modules."""
    files = [data] if data else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw_batch(text: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets from random places."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1))
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Ten epochs to the full learning rate; Shoal steps it by the epoch of the whole run."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)


def show(event: object) -> None:
    """What happens to the run; what goes wrong is in the log."""
    if isinstance(event, shoal.EpochReport | shoal.DownloadReport):
        print(event, flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT, alone or with others.")
    parser.add_argument("--initial-peers", nargs="+", action="extend", default=[], help="addresses of others")
    parser.add_argument("--run-id", default="train", help="name of the training run")
    parser.add_argument("--batch-size", type=int, default=16, help="samples that this peer computes at once")
    parser.add_argument("--target-batch-size", type=int, default=128, help="samples of all peers in an epoch")
    parser.add_argument("--send", choices=SENT, default="gradients", help="gradients in float32 or 8 bits, or DiLoCo")
    parser.add_argument("--min-peers", type=int, default=1, help="fewer go on alone no further; they wait for others")
    parser.add_argument("--epochs", type=int, default=200, help="stop when the run has reached this epoch")
    parser.add_argument("--host-maddrs", nargs="+", default=["/ip4/0.0.0.0/tcp/0"], help="where to listen")
    parser.add_argument("--identity", type=Path, help="file that keeps this peer's key: the peer id stays the same")
    parser.add_argument("--membership", type=Path, help="for a closed run (name@key): the file from the run's owner")
    parser.add_argument("--data", type=Path, help="a text to learn instead of Python's standard library")
    return parser.parse_args()


def main() -> None:
    """Trains until the run has reached --epochs."""
    arguments = parse_arguments()
    text = read_text(arguments.data)
    torch.manual_seed(0)  # The same first parameters in every peer ...
    model = GPT()
    torch.seed()  # ... and different batches.

    with shoal.DHT(
        arguments.initial_peers, start=True, host_maddrs=arguments.host_maddrs, identity_path=arguments.identity
    ) as dht:
        print("others join with --initial-peers", *dht.get_visible_maddrs(), flush=True)
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id=arguments.run_id,
            membership=arguments.membership,
            target_batch_size=arguments.target_batch_size,
            batch_size_per_step=arguments.batch_size,
            params=model.parameters(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.95)),
            scheduler=warm_up,
            min_peers=arguments.min_peers,
            **SENT[arguments.send],
        )
        optimizer.on_event = show
        shown = -1
        while (epoch := optimizer.local_epoch) < arguments.epochs:
            inputs, targets = draw_batch(text, arguments.batch_size)
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if epoch > shown:
                shown = epoch
                print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
        optimizer.finish()


if __name__ == "__main__":
    main()
