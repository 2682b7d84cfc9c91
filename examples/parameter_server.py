"""Train a small language model whose embedding tables live on two other processes: model parallel, several trainers.

    python parameter_server.py                          # two trainers
    python parameter_server.py --trainers 1 --check     # one, compared with the same training in a single process

It predicts the next token of Python source: the text is the standard library's, every tenth file of it held out. Half
of the columns of the embedding table live on the process `table0`, half on `table1`. The dense part is on the trainers,
which hold it alike with DistributedDataParallel. Each trainer looks its tokens up on the tables, and
`shoal.DistributedOptimizer` makes the step where the parameters are: on the tables, which both trainers step at once,
and in the trainer itself. At the end the model has to beat the best constant predictor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path

# All processes are on this machine. Before torch looks for a network.
os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import init_process_group, rpc
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shoal

VOCABULARY, CONTEXT, WIDTH, HIDDEN = 1000, 4, 64, 128
BATCH, LR = 256, 3e-3
PATIENCE = 60
"""Seconds that a call of another process, or a collective of the trainers, may take. After that it is an error."""
TABLES = ("table0", "table1")
UNKNOWN = 0

Lookup = Callable[[Tensor], list[Tensor]]
"""int64 [batch, CONTEXT] to the columns of each table, [batch, CONTEXT, WIDTH / 2]."""


def read_tokens() -> tuple[Tensor, Tensor]:
    """The numbers of the tokens of the standard library's top-level modules: to train with, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [re.findall(r"\w+|[^\w\s]|\n", file.read_text(errors="replace")) for file in files]
    train, held_out = ([token for text in part for token in text] for part in (_without(texts, 10), texts[9::10]))
    frequent = Counter(train).most_common(VOCABULARY - 1)
    numbers = {token: number for number, (token, _) in enumerate(frequent, start=UNKNOWN + 1)}
    return tuple(torch.tensor([numbers.get(token, UNKNOWN) for token in part]) for part in (train, held_out))  # type: ignore[return-value]


def _without(texts: list[list[str]], every: int) -> list[list[str]]:
    return [text for place, text in enumerate(texts, start=1) if place % every]


def windows(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The contexts that begin there, and what follows them."""
    found = tokens[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, -1]


@cache
def table(number: int) -> nn.Embedding:
    """The one table with these columns in the process that calls it."""
    torch.manual_seed(number)
    return nn.Embedding(VOCABULARY, WIDTH // len(TABLES))


def look_up(number: int, tokens: Tensor) -> Tensor:
    """Runs on the process that has the table."""
    columns: Tensor = table(number)(tokens)
    return columns


def weight(number: int) -> rpc.RRef[Tensor]:
    """Runs on the process that has the table."""
    return rpc.RRef(table(number).weight)


def look_up_remotely(tokens: Tensor) -> list[Tensor]:
    """Asks both processes at once."""
    futures = [rpc.rpc_async(name, look_up, (number, tokens)) for number, name in enumerate(TABLES)]
    return [future.wait() for future in futures]


def look_up_here(tokens: Tensor) -> list[Tensor]:
    """The same with the tables of this process."""
    return [look_up(number, tokens) for number in range(len(TABLES))]


def make_dense() -> nn.Module:
    """From the embeddings of the context to the logits of the next token."""
    torch.manual_seed(len(TABLES))
    return nn.Sequential(nn.Flatten(), nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, VOCABULARY))


def loss_of(dense: nn.Module, look_up: Lookup, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Nats per token."""
    return cross_entropy(dense(torch.cat(look_up(batch[0]), dim=-1)), batch[1])


@torch.no_grad()
def evaluate(dense: nn.Module, look_up: Lookup, tokens: Tensor) -> float:
    """Nats per token of 20,000 places all over the text."""
    starts = torch.linspace(0, len(tokens) - CONTEXT - 1, 20_000).long()
    return float(
        torch.stack([loss_of(dense, look_up, windows(tokens, part)) for part in torch.split(starts, 2000)]).mean()
    )


def best_constant(tokens: Tensor) -> float:
    """Nats per token of the constant prediction that fits these very tokens best: their own frequencies."""
    shares = torch.bincount(tokens) / len(tokens)
    return float(torch.special.entr(shares).sum())


def draw_batches(tokens: Tensor, trainer: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of one trainer, the same in every run."""
    generator = torch.Generator().manual_seed(trainer)
    starts = torch.randint(len(tokens) - CONTEXT, (steps, BATCH), generator=generator)
    return [windows(tokens, row) for row in starts]


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """To nothing, linearly."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.05, total_iters=steps)


def train(trainer: int, steps: int, tokens: Tensor) -> nn.Module:
    """What every trainer does; gives its dense part."""
    dense = make_dense()
    replicated = DistributedDataParallel(dense)
    weights = [rpc.rpc_sync(name, weight, (number,)) for number, name in enumerate(TABLES)]
    parameters = [*weights, *(rpc.RRef(parameter) for parameter in dense.parameters())]
    optimizer = shoal.DistributedOptimizer(torch.optim.Adam, parameters, lr=LR)
    scheduler = schedule(optimizer, steps)
    start = time.perf_counter()
    for step, batch in enumerate(draw_batches(tokens, trainer, steps), start=1):
        with dist_autograd.context() as context_id:
            loss = loss_of(replicated, look_up_remotely, batch)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        scheduler.step()
        if step % max(1, steps // 8) == 0:
            rate = step / (time.perf_counter() - start)
            print(f"trainer {trainer}  step {step:4}  loss {loss.item():.3f}  {rate:.0f} steps/s", flush=True)
    return dense


def train_here(steps: int, tokens: Tensor) -> nn.Module:
    """The same training as :func:`train` in one process, with torch.optim."""
    dense = make_dense()
    parameters = [*(table(number).weight for number in range(len(TABLES))), *dense.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LR)
    scheduler = schedule(optimizer, steps)
    for batch in draw_batches(tokens, 0, steps):
        optimizer.zero_grad()
        torch.autograd.backward([loss_of(dense, look_up_here, batch)])
        optimizer.step()
        scheduler.step()
    return dense


def judge(dense: nn.Module, steps: int, check: bool, tokens: Tensor, held_out: Tensor) -> bool:
    """Prints how good the model is; whether it is as good as it has to be."""
    ours, constant = evaluate(dense, look_up_remotely, held_out), best_constant(held_out)
    print(f"held out: {ours:.4f} nats per token; the best constant predictor: {constant:.4f}", flush=True)
    if not check:
        return ours < constant
    alone = evaluate(train_here(steps, tokens), look_up_here, held_out)
    print(f"the same training in one process: {alone:.4f}, which differs by {abs(ours - alone):.1e}", flush=True)
    return ours < constant and abs(ours - alone) < 1e-3


def run(rank: int, trainers: int, steps: int, check: bool, folder: Path) -> None:
    """One process: a trainer or a table."""
    torch.set_num_threads(1)
    names = [f"trainer{trainer}" for trainer in range(trainers)] + list(TABLES)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'rpc'}", rpc_timeout=PATIENCE)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)  # type: ignore[no-untyped-call]
    good = True
    if rank < trainers:
        init_process_group(
            "gloo",
            init_method=f"file://{folder / 'dense'}",
            rank=rank,
            world_size=trainers,
            timeout=timedelta(seconds=PATIENCE),
        )
        tokens, held_out = read_tokens()
        dense = train(rank, steps, tokens)
        torch.distributed.barrier()
        if rank == 0:
            good = judge(dense, steps, check, tokens, held_out)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    rpc.shutdown()
    sys.exit(0 if good else 1)


def main() -> None:
    """Starts the processes, and waits for them."""
    parser = argparse.ArgumentParser(description="Train a language model with its embedding tables elsewhere.")
    parser.add_argument("--trainers", type=int, default=2, help="processes that train")
    parser.add_argument("--steps", type=int, default=800, help="steps of each trainer")
    parser.add_argument("--check", action="store_true", help="compare with a single process (needs --trainers 1)")
    arguments = parser.parse_args()
    if arguments.check and arguments.trainers != 1:
        parser.error("--check needs --trainers 1: what several do at once comes in no fixed order")
    # Its server has imported this module once, and torch with it: a process starts in no time.
    forks = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        target = partial(
            run, trainers=arguments.trainers, steps=arguments.steps, check=arguments.check, folder=Path(folder)
        )
        processes = [forks.Process(target=target, args=(rank,)) for rank in range(arguments.trainers + len(TABLES))]
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        while running and not any(process.exitcode for process in processes):
            for sentinel in wait(list(running)):
                running.pop(sentinel).join()  # type: ignore[arg-type]
        for process in processes:
            process.kill()  # when one has failed, the others would wait for it
            process.join()
    if any(process.exitcode for process in processes):
        sys.exit("the model is not as good as it has to be, or a process failed: see above")


if __name__ == "__main__":
    main()
