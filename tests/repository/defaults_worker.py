"""`python -m tests.repository.defaults_worker SYSTEM [set]`: uses one of Shoal's systems, and prints what it computed.

With `set`, torch's default device is one without memory, and the default dtype a wide one. What is a user's says
itself what it is; so nothing else may change.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal

torch.manual_seed(0)
BATCH, VECTOR, WEIGHT = torch.randn(16, 32), torch.randn(5000), torch.randn(8, 32)


def linear() -> nn.Linear:
    """The same one each time."""
    model = nn.Linear(32, 8, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        model.weight.copy_(WEIGHT)
        model.bias.zero_()
    return model


def show(*tensors: Tensor) -> None:
    """All bits of them."""
    for tensor in tensors:
        print(tensor.dtype, tensor.tolist())


def codecs() -> None:
    """Every codec, also of an empty span."""
    for codec in (
        shoal.compression.NoCompression(),
        shoal.compression.Float16Compression(),
        shoal.compression.ScaledFloat16Compression(),
        shoal.compression.Uniform8BitQuantization(),
        shoal.compression.Quantile8BitQuantization(),
        shoal.compression.BlockwiseQuantization(),
    ):
        for numel in (0, 5000):
            sent = memoryview(bytes(codec.encode(VECTOR[:numel])))
            show(codec.decode(sent, torch.float32, numel))


def contiguous() -> None:
    """Flat parameters, with padding between them."""
    model = linear()
    flat = shoal.ContiguousParams(model.parameters())
    optimizer = torch.optim.SGD(flat.contiguous(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(BATCH).sum().backward()
        optimizer.step()
    show(*model.parameters())


def functional() -> None:
    """Updates with a counter in their state."""
    for update in (shoal.functional.Adam(lr=0.1), shoal.functional.SGD(lr=0.1, momentum=0.9, dampening=0.5)):
        params, grads = [VECTOR[:1000].clone(), VECTOR[1000:1007].clone()], [VECTOR[:1000], VECTOR[1000:1007]]
        state = update.init(params)
        for _ in range(3):
            update.step(params, grads, state)
        show(*params)


def averagers() -> None:
    """Two peers. With a codec or low ranks the bits hang on who reduces what, so it is shown that there are some."""
    float16 = shoal.compression.Float16Compression()
    with shoal.DHT(start=True) as first, shoal.DHT(initial_peers=first.get_visible_maddrs(), start=True) as second:
        for kind, options in (
            (shoal.GradientAverager, {}),
            (shoal.GradientAverager, {"compression": float16}),
            (shoal.PowerSGDGradientAverager, {"averager_rank": 2, "min_compression_ratio": 0}),
        ):
            models = [linear(), linear()]
            peers = [
                kind(
                    model.parameters(),
                    dht=dht,
                    prefix=f"{kind.__name__}{len(options)}",
                    target_group_size=2,
                    start=True,
                    **options,
                )
                for dht, model in zip((first, second), models, strict=True)
            ]
            for factor, averager, model in zip((1, 3), peers, models, strict=True):
                model(BATCH * factor).sum().backward()
                averager.accumulate_grads_(batch_size=1)
            for control in [averager.step(wait=False) for averager in peers]:
                control.result(30)
            for averager, model in zip(peers, models, strict=True):
                with averager.use_averaged_gradients():
                    grads = [parameter.grad for parameter in model.parameters()]
                    show(*(grads if not options else map(torch.isfinite, grads)))
                averager.shutdown()


def optimizer() -> None:
    """A peer alone, its optimizer on the host, its average clipped."""
    model = linear()
    with shoal.DHT(start=True) as dht:
        trained = shoal.Optimizer(
            dht=dht,
            run_id="run",
            target_batch_size=32,
            batch_size_per_step=16,
            params=model.parameters(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            offload_optimizer=True,
            max_grad_norm=1.0,
        )
        while trained.local_epoch < 3:
            model(BATCH).sum().backward()
            trained.step()
            trained.zero_grad()
        trained.shutdown()
    show(*model.parameters())


def sharding() -> None:
    """One rank, in Join, with both ways of reducing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for reduce_scatter in (False, True):
        model = linear()
        zero = shoal.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, reduce_scatter=reduce_scatter, lr=0.1, momentum=0.9
        )
        with shoal.Join([zero]):
            for _ in range(3):
                zero.zero_grad()
                model(BATCH).sum().backward()
                if reduce_scatter:
                    zero.clip_grad_norm_(1.0)
                zero.step()
        zero.consolidate_state_dict()
        show(*model.parameters(), *[entry["momentum_buffer"] for entry in zero.state_dict()["state"].values()])
    dist.destroy_process_group()


SYSTEMS = {use.__name__: use for use in (codecs, contiguous, functional, averagers, optimizer, sharding)}

if __name__ == "__main__":
    if "set" in sys.argv:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
    SYSTEMS[sys.argv[1]]()
