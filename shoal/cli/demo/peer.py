"""One peer of the demo, in a process of its own, which ``script`` starts."""

from __future__ import annotations

import dataclasses
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore

import torch

import shoal
from shoal.cli.demo import model as recipe
from shoal.cli.demo.script import RUN, DemoSettings, GradientCodec, load_text


def run_peer(parent: Connection, turns: Semaphore, index: int, addresses: list[str], settings: DemoSettings) -> None:
    """Train until the last epoch, then serve the others. Peer 0 also measures the held-out loss.

    The peer tells the parent what happens: what, when (by ``time.monotonic()``, which is the same for all processes of
    a machine), details, and what is shown of it. The parent lets it go on when all are ready, and at the end.
    """
    lock = threading.Lock()

    def tell(what: str, details: object, text: str = "") -> None:
        with lock:  # Shoal may call `on_event` in another thread
            parent.send((what, time.monotonic(), details, text))

    # The peers of a demo share the cores: one thread each, and the same for all, so that their steps round alike.
    torch.set_num_threads(1)
    dht = shoal.DHT(initial_peers=addresses, start=True)
    tell("listens", list(map(str, dht.get_visible_maddrs())))
    text, rest = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in load_text(settings.data))
    held_out = recipe.spread_windows(rest)
    # All begin with the same parameters, and each draws its own windows.
    torch.manual_seed(settings.seed)
    model = recipe.GPT()
    generator = torch.Generator().manual_seed(settings.seed * 1_000 + index)
    is_float16 = settings.compression is GradientCodec.FLOAT16
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id=RUN,
        target_batch_size=recipe.TARGET_BATCH_SIZE,
        batch_size_per_step=recipe.BATCH_SIZE_PER_STEP,
        params=list(model.parameters()),
        # A short memory of squares suits a run of few, small steps.
        optimizer=lambda params: torch.optim.AdamW(params, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.05),
        scheduler=recipe.scheduler_factory(settings.epochs),
        matchmaking_time=10.0,
        averaging_timeout=30.0,
        grad_compression=shoal.compression.Float16Compression() if is_float16 else shoal.compression.NoCompression(),
    )
    optimizer.on_event = trace = shoal.Trace(
        settings.out / f"peer-{index}.jsonl",
        then=lambda event: tell(type(event).__name__, dataclasses.asdict(event), str(event)),
    )
    tell("ready", recipe.bigram_loss(text, *held_out))
    turns.acquire()
    while True:
        epoch = optimizer.local_epoch
        if index == 0 and (epoch % max(1, settings.epochs // 10) == 0 or epoch >= settings.epochs):
            known = model.loss(*held_out).item()
            tell("evaluated", (epoch, known), f"held-out loss {known:.3f} at epoch {epoch}")
        if epoch >= settings.epochs:
            break
        while optimizer.local_epoch == epoch:
            loss = model.loss(*recipe.random_windows(text, recipe.BATCH_SIZE_PER_STEP, generator))
            torch.autograd.backward(loss)
            found = loss.item()
            optimizer.report(loss=found)
            trace.report(loss=found)
            optimizer.step()
            optimizer.zero_grad()
    sample = model.generate(held_out[0][0], 500, generator).tolist() if index == 0 else []
    tell("finished", bytes(sample).decode(errors="replace"))
    turns.acquire()
    optimizer.shutdown()
    trace.end()
    dht.shutdown()
