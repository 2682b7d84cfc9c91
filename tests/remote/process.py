"""One of three processes joined by torch's RPC. The trainer, rank 0, runs the checks that it is told over stdin."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any

# Before torch looks at them: everything on loopback.
os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
from torch.distributed import rpc

TRAINER, FIRST, SECOND = NAMES = ("trainer", "first", "second")


def run(module: str, name: str, arguments: list[Any]) -> str:
    """Calls a function; the traceback of its failure, or nothing."""
    try:
        getattr(import_module(module), name)(*arguments)
    except Exception:  # noqa: BLE001 - the test says it
        return traceback.format_exc()
    return ""


def main() -> None:
    """Joins, obeys, and leaves when all do."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = options["rank"]
    backend = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{options['store']}", rpc_timeout=60)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=backend)
    if rank == 0:
        for line in sys.stdin:
            command = json.loads(line)
            if "stop" in command:
                break
            print(json.dumps({"failure": run(**command)}), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
