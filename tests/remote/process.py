"""One of three processes joined by torch's RPC. The trainer is rank 0."""

from __future__ import annotations

import os

# Before torch looks at them: everything on loopback.
os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"

from torch.distributed import rpc

from tests.workers.group import Caller

TRAINER, FIRST, SECOND = NAMES = ("trainer", "first", "second")


class RpcRank(Caller):
    """The rank, which calls functions."""

    def __init__(self, rank: int, store: str) -> None:
        backend = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=60)
        rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=backend)

    def leave(self) -> None:
        """When all do."""
        rpc.shutdown()
