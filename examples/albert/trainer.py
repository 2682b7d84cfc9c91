"""Pretrain ALBERT together with others: this is one peer.

    python -m examples.albert.trainer                                    # the first; it prints how others join
    python -m examples.albert.trainer --initial-peers /ip4/.../p2p/...   # any other, on this machine or another

It runs in minutes on two cores as it is, on the standard library's text. At full size, on GPUs, only the arguments are
others: README.md has them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch

import shoal
from examples.albert.metrics import Metrics, publish, rules
from examples.albert.model import SIZES, lamb, make_model, parameter_groups, warm_up
from examples.albert.text import mask, read_files, train_tokenizer, windows
from shoal.compression import Float16Compression, SizeAdaptiveCompression, Uniform8BitQuantization

# 8 bits for each large gradient, 16 for the small ones, which are few bytes and want precision.
MIXED = SizeAdaptiveCompression(threshold=2**16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pretrain ALBERT, alone or with others.")
    parser.add_argument("--initial-peers", nargs="+", action="extend", default=[], help="addresses of others")
    parser.add_argument("--host-maddrs", nargs="+", default=["/ip4/127.0.0.1/tcp/0"], help="where to listen")
    parser.add_argument("--run-id", default="albert", help="name of the training run")
    parser.add_argument("--data", type=Path, help="a folder of texts to learn, instead of the standard library")
    parser.add_argument("--size", choices=[*SIZES], default="tiny", help="of the model")
    parser.add_argument("--vocabulary", type=int, default=2000, help="tokens that the tokenizer learns")
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--batch-size", type=int, default=16, help="windows that this peer computes at once")
    parser.add_argument("--target-batch-size", type=int, default=256, help="windows of all peers in an epoch")
    parser.add_argument("--min-peers", type=int, default=1, help="no epoch ends with fewer")
    parser.add_argument("--epochs", type=int, default=150, help="stop when the run has reached this epoch")
    parser.add_argument("--warm-up", type=int, default=20, help="epochs until the learning rate is reached")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--matchmaking-time", type=float, default=15.0, help="see shoal.Optimizer; also the next")
    parser.add_argument("--averaging-timeout", type=float, default=60.0)
    parser.add_argument("--checkpoint", type=Path, help="kept up to date while training; gone on from if it is there")
    parser.add_argument("--identity", type=Path, help="keeps this peer's id and address over restarts; not for others")
    parser.add_argument("--export", type=Path, help="write the model there in the end, as safetensors")
    return parser.parse_args()


def agree_on_vocabulary(dht: shoal.DHT, run_id: str, tokenizer_json: str) -> None:
    """The first peer says which tokenizer the run has; whoever has another must not train with it."""
    digest = hashlib.sha256(tokenizer_json.encode()).hexdigest()
    key = f"{run_id}/vocabulary"
    found = dht.get(key, latest=True)
    if found is None:
        dht.store(key, digest, shoal.get_dht_time() + 86400)
    elif found.value != digest:
        raise SystemExit("this peer's tokenizer is not that of the run: all need the same --data and --vocabulary")


def main() -> None:
    """Trains until the run has reached --epochs."""
    arguments = parse_arguments()
    with shoal.DHT(
        arguments.initial_peers,
        start=True,
        host_maddrs=arguments.host_maddrs,
        identity_path=arguments.identity,
        record_validators=rules(arguments.run_id),
    ) as dht:
        print("others join with --initial-peers", *dht.get_visible_maddrs(), flush=True)
        texts = read_files(arguments.data)
        tokenizer = train_tokenizer(texts, arguments.vocabulary, arguments.length)
        samples = windows(tokenizer, texts, arguments.length)
        special = {name: getattr(tokenizer, name) for name in ("pad_token_id",)}
        special |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = make_model(arguments.size, len(tokenizer), arguments.length, special).to(device)
        print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(samples)} windows", flush=True)
        agree_on_vocabulary(dht, arguments.run_id, tokenizer.backend_tokenizer.to_str())
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id=arguments.run_id,
            target_batch_size=arguments.target_batch_size,
            batch_size_per_step=arguments.batch_size,
            params=parameter_groups(model, arguments.weight_decay),
            optimizer=lamb(arguments.lr),
            scheduler=warm_up(arguments.warm_up, arguments.epochs),
            grad_compression=MIXED,
            matchmaking_time=arguments.matchmaking_time,
            averaging_timeout=arguments.averaging_timeout,
            min_peers=arguments.min_peers,
        )
        if arguments.checkpoint is not None and arguments.checkpoint.exists():
            saved = torch.load(arguments.checkpoint, map_location=device, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            print(f"goes on from epoch {optimizer.local_epoch} of {arguments.checkpoint}", flush=True)
        epoch, losses, since = optimizer.local_epoch, [], time.monotonic()
        while optimizer.local_epoch < arguments.epochs:
            batch = samples[torch.randint(len(samples), (arguments.batch_size,))]
            inputs, labels = mask(tokenizer, batch)
            loss = model(input_ids=inputs.to(device), labels=labels.to(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if optimizer.local_epoch == epoch:
                continue
            epoch, seconds = optimizer.local_epoch, time.monotonic() - since
            made = len(losses) * arguments.batch_size
            publish(dht, arguments.run_id, Metrics(epoch, made / seconds, made, sum(losses), len(losses)))
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, {made / seconds:.0f} windows/s", flush=True)
            losses, since = [], time.monotonic()
            if arguments.checkpoint is not None:
                # Whole or not at all, also where several peers of one machine have the same file.
                unfinished = arguments.checkpoint.with_suffix(f".{os.getpid()}")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
                unfinished.replace(arguments.checkpoint)
        optimizer.shutdown()
    if arguments.export is not None:
        model.save_pretrained(arguments.export, safe_serialization=True)
        tokenizer.save_pretrained(arguments.export)


if __name__ == "__main__":
    main()
