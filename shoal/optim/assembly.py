"""What the settings of an `Optimizer` ask for: its gradients, and its place in the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.options import described, term_of
from shoal.dht.dht import DHT
from shoal.flat import Layout
from shoal.optim.grad_averager import GradientAveragerFactory
from shoal.optim.gradients import GradientBuffers, Gradients
from shoal.optim.group_options import structure
from shoal.optim.own_gradients import AveragerGradients
from shoal.optim.replica import Replica
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.plan import largest_chunk
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tensors import Tensors


def make_gradients(
    settings: Settings, factory: GradientAveragerFactory | None, parameters: Sequence[torch.Tensor], dht: DHT
) -> Gradients | None:
    """What accumulates and averages the gradients of `parameters`; None with local updates. Raises ValueError as
    `AveragerGradients`, whose `factory` may be given."""
    if settings.use_local_updates:
        return None
    given = settings.averager_opts
    if factory is not None:
        return AveragerGradients(
            dht.peer_id.key,
            factory,
            parameters,
            dht=dht,
            prefix=f"{settings.run_id}/grad",
            min_group_size=1,
            min_matchmaking_time=settings.matchmaking_time,
            allreduce_timeout=settings.allreduce_timeout,
            next_chunk_timeout=settings.next_chunk_timeout,
            shutdown_timeout=settings.shutdown_timeout,
            client_mode=settings.client_mode,
            reuse_grad_buffers=settings.reuse_grad_buffers,
            compression=settings.grad_compression,
            bandwidth=given.get("bandwidth"),
            **{name: given[name] for name in ("request_timeout", "sender_timeout", "reducer_timeout") if name in given},
        )
    assert settings.grad_compression is not None
    return GradientBuffers(
        parameters,
        settings.grad_compression,
        apart=bool(settings.delay_optimizer_step),
        reuse=settings.reuse_grad_buffers,
    )


def make_run(settings: Settings, dht: DHT, terms: Terms, rules: Rules, tensors: Sequence[Tensors]) -> Run:
    """This peer's part in the run, not started."""
    given = settings.averager_opts
    return Run(
        dht,
        settings.run_id,
        terms,
        rules,
        role=settings.role,
        bandwidth=given.get("bandwidth"),
        chunk_timeout=settings.next_chunk_timeout,
        sender_timeout=given.get("sender_timeout"),
        reducer_timeout=given.get("reducer_timeout"),
        request_timeout=given.get("request_timeout"),
        shares_state=given.get("allow_state_sharing", True),
        tensors=tensors,
    )


def terms_of(
    settings: Settings,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    extra_tensors: Sequence[torch.Tensor],
    replica: Replica,
    gradients: Gradients | None,
) -> Terms:
    """All that must be equal in a run."""
    schemas = [replica.shared.layout.schema_hash, Layout.of(extra_tensors).schema_hash]
    agreed = settings.agreed() | {
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__,
        "param_groups": term_of(structure(optimizer.param_groups)),
    }
    if isinstance(gradients, GradientBuffers):
        schemas.append(gradients.layout.schema_hash)
    elif isinstance(gradients, AveragerGradients):
        agreed["grad_averager_factory"] = term_of(gradients.terms)
    return Terms(agreed, blake3(b"".join(schemas)).digest())


def tensors_of(
    optimizer: torch.optim.Optimizer, extra_tensors: Sequence[torch.Tensor], replica: Replica
) -> list[Tensors]:
    """The tensors behind the schema hash of the terms."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    trained = [name for name, parameter in zip(names, parameters, strict=False) if parameter.requires_grad]
    return [
        described("parameters", parameters, names),
        described("trained parameters", replica.trained, trained),
        described("extra_tensors", extra_tensors),
    ]


def rules_of(settings: Settings, replica: Replica, gradients: Gradients | None) -> Rules:
    """When rounds begin, and what they average: gradients only where the run's own rounds do."""
    sizes = tuple(spec.numel for spec in gradients.layout.buffers) if isinstance(gradients, GradientBuffers) else ()
    rules = settings.rules(sizes, replica.buffers.sizes, replica.shared.sizes)
    layouts = [replica.buffers.layout, replica.shared.layout]
    layouts += [gradients.layout] if isinstance(gradients, GradientBuffers) else []
    largest = largest_chunk(spec.dtype.itemsize for layout in layouts for spec in layout.buffers)
    return dataclasses.replace(rules, options_fit=replica.options.fits, chunk_elements=largest)
