"""One peer of the demo, in a process of its own, which ``script`` starts."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

import shoal
from shoal.cli.demo import recipe
from shoal.cli.demo.corpus import Corpus
from shoal.cli.demo.model import CharacterGPT
from shoal.cli.demo.settings import DemoSettings, GradientCodec
from shoal.cli.demo.text import load_text


def run_peer(parent: Connection, index: int, run_id: str, addresses: list[str], settings: DemoSettings) -> None:
    """Train until the last epoch, then serve the others. Peer 0 also measures the held-out loss.

    The peer tells the parent what happens: what, when (by ``time.monotonic()``, which is the same for all processes of
    a machine), and details. The parent lets it go on when all are ready, and at the end. When the parent ends, in any
    way, this process exits. So no peer outlives its demo.
    """
    lock = threading.Lock()

    def tell(what: str, details: Any) -> None:
        with lock:  # Shoal may call `on_event` in another thread
            parent.send((what, time.monotonic(), details))

    # The peers of a demo share the cores: one thread each, and the same for all, so that their steps round alike.
    torch.set_num_threads(1)
    dht = shoal.DHT(initial_peers=addresses, start=True)
    tell("listens", [str(dht.peer_id), *map(str, dht.get_visible_maddrs())])
    corpus = Corpus(load_text(settings.data))
    # All begin with the same parameters, and each draws its own windows.
    torch.manual_seed(settings.seed)
    model = CharacterGPT(len(corpus.characters))
    generator = torch.Generator().manual_seed(settings.seed * 1_000 + index)
    held_out = corpus.held_out_windows(recipe.HELD_OUT_WINDOWS, model.context)
    is_float16 = settings.compression is GradientCodec.FLOAT16
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=recipe.TARGET_BATCH_SIZE,
        batch_size_per_step=recipe.BATCH_SIZE_PER_STEP,
        params=list(model.parameters()),
        optimizer=recipe.make_optimizer,
        scheduler=recipe.scheduler_factory(settings.epochs),
        matchmaking_time=10.0,
        averaging_timeout=30.0,
        grad_compression=shoal.compression.Float16Compression() if is_float16 else shoal.compression.NoCompression(),
    )
    optimizer.on_event = lambda event: tell(type(event).__name__, dataclasses.asdict(event))
    tell("ready", corpus.bigram_loss(*held_out) if index == 0 else None)
    parent.recv()
    is_over = threading.Event()

    def wait() -> None:
        try:
            parent.recv()
            is_over.set()
        except EOFError:
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    next_evaluation = 0
    while True:
        epoch, every = optimizer.local_epoch, max(1, settings.epochs // 10)
        if index == 0 and epoch >= min(next_evaluation, settings.epochs):
            with torch.no_grad():
                tell("evaluated", (epoch, model.loss(*held_out).item()))
            next_evaluation = epoch - epoch % every + every
        if epoch >= settings.epochs:
            break
        began, losses = time.monotonic(), list[float]()
        while optimizer.local_epoch == epoch:
            loss = model.loss(*corpus.random_windows(recipe.BATCH_SIZE_PER_STEP, model.context, generator))
            torch.autograd.backward(loss)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise RuntimeError(f"the training loss is {losses[-1]} in epoch {epoch}; choose another --seed")
            optimizer.report(loss=losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        if optimizer.local_epoch == epoch + 1:  # otherwise it has downloaded a state, and dropped its own gradients
            speed = len(losses) * recipe.BATCH_SIZE_PER_STEP / (time.monotonic() - began)
            tell("trained", (epoch, sum(losses) / len(losses), speed))
    sample = model.generate(held_out[0][0], recipe.SAMPLE_CHARACTERS, generator) if index == 0 else torch.empty(0)
    tell("finished", corpus.decode(sample))
    is_over.wait()
    optimizer.shutdown()
    dht.shutdown()
