"""What a rank of a cluster does in a case, and what it finds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.swarm.protocol.errors import AveragingError
from tests.optim.lack import Lack

RANK, SIZE, STRANDS = 0, 1, 1


def found_by(case: str, strands: int) -> list[Any]:
    """What this rank finds in the case of that name."""
    global RANK, SIZE, STRANDS
    RANK, SIZE, STRANDS = dist.get_rank(), dist.get_world_size(), strands
    found: list[Any] = globals()[case]()
    return found


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def made(model: nn.Module, **given: Any) -> Any:
    """The optimizer of this rank, in a run of its own."""
    dht = shoal.DHT(given.pop("peers", ()), start=True) if RANK == 0 or STRANDS > 1 else None
    usual = {"params": model.parameters(), "optimizer": sgd, "batch_size_per_step": 4}
    usual |= {"cluster": shoal.Cluster(strands=STRANDS), "target_batch_size": 4 * SIZE}
    return shoal.Optimizer(dht=dht, run_id="r", **{**usual, **given})


def values(model: nn.Module) -> list[Any]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).flatten().tolist() for p in model.parameters()]


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))


def backward(model: nn.Module, inputs: Tensor | None = None) -> None:
    model(torch.ones(4, 8) if inputs is None else inputs).square().mean().backward()


def error_of(act: Callable[..., object], *given: Any) -> str:
    try:
        act(*given)
    except (ValueError, RuntimeError, AveragingError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def two_meshes() -> Any:
    """Layers that are sharded over all ranks, and layers that are sharded over a part of them."""
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("dp", "tp"))
    model, alone = layers(), layers()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = made(model, batch_size_per_step=2)
    stepper = sgd(alone.parameters())
    for _ in range(2):
        for _half in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        stepper.zero_grad()
        backward(alone)
        stepper.step()
    pairs = zip(values(model), values(alone), strict=True)
    alike = all(torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=1e-6) for mine, theirs in pairs)
    return [optimizer.local_epoch, alike]


def other_strides() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 2))
    model.to(memory_format=torch.channels_last)
    before = values(model)
    wrapped = DistributedDataParallel(model)
    optimizer = made(model)
    same = values(model) == before
    backward(wrapped, torch.ones(4, 3, 4, 4))
    optimizer.step()
    return [same, values(model)]


def loaded_later() -> Any:
    model: Any = fully_shard(layers(), mesh=init_device_mesh("cpu", (SIZE,)))
    optimizer = made(model)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    backward(model)
    optimizer.step(batch_size=0)
    first = values(model)[0][0]
    state = optimizer.state_dict()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    optimizer.load_state_dict(state)
    return [first, values(model)[0][0]]


def some_parameters() -> Any:
    """The function leaves the frozen ones out: the groups of each rank have the same parameters."""
    model = layers()
    model[0].requires_grad_(False)
    optimizer = made(
        model, optimizer=lambda ps: torch.optim.SGD([p for p in reversed(list(ps)) if p.requires_grad], lr=0.1)
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [names[id(parameter)] for parameter in optimizer.param_groups[0]["params"]]
    backward(model)
    optimizer.zero_grad()
    return [grouped, all(parameter.grad is None for parameter in model.parameters())]


def groups_are_set() -> Any:
    """Users set the groups and the state of each rank, and change the parameters in a group in place."""
    model = layers()
    optimizer = made(model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    backward(model)
    optimizer.step()
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    before = values(model)
    optimizer.step()
    found = [values(model) == before, set(optimizer.state) <= set(model.parameters())]
    if RANK == 0 or STRANDS > 1:
        optimizer.state = {}
    else:
        found.append("rank 0 of the cluster has it" in error_of(setattr, optimizer, "state", {}))
    optimizer.step()
    removed = optimizer.param_groups[0]["params"].pop() if RANK == SIZE - 1 else None
    found.append("parameters of this optimizer are fixed" in error_of(optimizer.step))
    if removed is not None:
        optimizer.param_groups[0]["params"].append(removed)
    optimizer.step()
    optimizer.settle()
    return [*found, optimizer.local_epoch]


def finished() -> Any:
    model: Any = fully_shard(layers(), mesh=init_device_mesh("cpu", (SIZE,)))
    optimizer = made(model, delay_optimizer_step=True)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    optimizer.finish()
    return [optimizer.local_epoch, values(model)]


def spill() -> Tensor:
    raise ValueError("spilt coffee")


def own_strands() -> Any:
    """Each rank in turn has lost what it saved."""
    model: Any = fully_shard(layers(), mesh=init_device_mesh("cpu", (SIZE,)))
    optimizer = made(model)
    backward(model)
    optimizer.step()
    before, saved = values(model), optimizer.strand_state().state_dict()
    optimizer.step()
    found = []
    for culprit in range(SIZE):
        left = {name: value for name, value in saved.items() if culprit != RANK or not name.startswith("strand ")}
        found.append(error_of(optimizer.strand_state().load_state_dict, left))
    moved = values(model) != before
    optimizer.step()
    epoch = optimizer.local_epoch
    optimizer.strand_state().load_state_dict(saved)
    return [found, moved, epoch, optimizer.local_epoch, values(model) == before]


def no_memory() -> Any:
    """Each rank in turn has no memory to load its strands, then all have."""

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.1)

    donor, told, alone = layers(7), [["", []]], [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    giver: Any = None
    if RANK == 0:  # a peer of its own, in this process
        giver = made(donor, cluster=shoal.Cluster(alone, strands=STRANDS), optimizer=adam)
        for _ in range(3):
            backward(donor)
            giver.step(batch_size=4 * SIZE)
        told = [["", list(map(str, giver.dht.get_visible_maddrs()))]]
    dist.broadcast_object_list(told)
    model: Any = fully_shard(layers(), mesh=init_device_mesh("cpu", (SIZE,)))
    optimizer = made(model, peers=told[0][1], optimizer=adam)
    before, found = values(model), []
    for culprit in range(SIZE):
        with Lack(1 if culprit == RANK else 0):
            error = error_of(optimizer.load_state_from_peers)
        found.append([error, values(model) == before, optimizer.local_epoch])
    optimizer.load_state_from_peers()
    of_donor = [values(donor)]
    dist.broadcast_object_list(of_donor)
    found.append(["", values(model) == of_donor[0], optimizer.local_epoch])
    optimizer.shutdown()
    if giver is not None:
        giver.shutdown()
    return found


def errors() -> Any:
    """What one rank raises is raised at all; then they go on."""
    model: Any = fully_shard(layers(), mesh=init_device_mesh("cpu", (SIZE,)))
    optimizer = made(model)
    found = []
    for culprit in range(SIZE):
        backward(model)

        found.append(error_of(optimizer.step, spill if culprit == RANK else None))
        found.append(error_of(optimizer.step, None, 0.5 if culprit == RANK else 4))
        if culprit == RANK:
            optimizer.zero_grad()
        found.append(error_of(optimizer.step))
        optimizer.zero_grad()
    backward(model)
    optimizer.step()
    return [found, optimizer.local_epoch]


def after_the_step() -> Any:
    """A callback of the user at rank 0 raises once, when the end of an epoch was applied at rank 0 alone, or by no
    model yet; then without that error."""
    results: list[Any] = []
    for left in ([spill] if RANK == 0 else [], []):
        model = layers()
        net = DistributedDataParallel(model)
        optimizer = made(model, target_batch_size=None, outer=shoal.DiLoCo(inner_steps=2))
        optimizer.on_event = lambda _, left=left: left.pop()() if left else None
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            backward(net)
            found.append(error_of(optimizer.step))
        results.append([found, optimizer.local_epoch, values(model)])
        optimizer.shutdown()
    return results


def in_callbacks() -> Any:
    """With one strand, rank 0 has all that a callback may ask for."""
    model = layers()
    net = DistributedDataParallel(model)
    optimizer = made(model)
    epochs: list[Any] = []

    def save(event: Any) -> None:
        optimizer.settle()
        epochs.append(optimizer.state_dict()["state"]["local_epoch"])
        optimizer.step(batch_size=0)

    optimizer.on_event = save
    for _ in range(3):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
    return [epochs, optimizer.local_epoch, values(model)]


def unused_dht() -> Any:
    """With one strand, a DHT of another rank than 0 has no effect, whatever becomes of it."""
    model = layers()
    first = (
        [list(map(str, made_dht.get_visible_maddrs()))] if (made_dht := shoal.DHT(start=True)) and RANK == 0 else [[]]
    )
    dist.broadcast_object_list(first)
    if RANK:
        made_dht.shutdown()
        made_dht = shoal.DHT(first[0], client_mode=True, start=True)
    given: dict[str, Any] = {"params": model.parameters(), "optimizer": sgd, "cluster": shoal.Cluster(strands=1)}
    optimizer: Any = shoal.Optimizer(
        dht=made_dht, run_id="r", target_batch_size=8, batch_size_per_step=4, client_mode=False, **given
    )
    backward(DistributedDataParallel(model))
    optimizer.step()
    if RANK:
        made_dht.shutdown()
    alive = optimizer.is_alive()
    optimizer.finish()
    return [alive, optimizer.local_epoch, values(model)]


def lagging() -> Any:
    """The optimizer's step fails once at the last rank alone, and all go on; then they load a state."""
    model, fails = layers(), [RANK == SIZE - 1]

    class Failing(torch.optim.SGD):
        element_wise = True

        def step(self, closure: Any = None) -> Any:
            if fails.pop() if fails else False:
                raise ValueError("spilt coffee")
            return super().step(closure)

    optimizer = made(model, optimizer=lambda params: Failing(params, lr=0.1, momentum=0.9))
    saved, found = optimizer.state_dict(), []
    for _ in range(3):
        backward(model)
        found.append(error_of(optimizer.step))
    optimizer.load_state_dict(saved)
    backward(model)
    found.append(error_of(optimizer.step))
    return [found, optimizer.local_epoch, values(model)]


class Scaled(nn.Module):
    """Of its scale, one strand has all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = layers(), nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs) * self.scale


def one_element() -> Any:
    """What the user writes before a load concerns the strands of one rank only."""
    model = Scaled()
    net = DistributedDataParallel(model)
    optimizer = made(model, target_batch_size=None, outer=shoal.DiLoCo(inner_steps=2))
    saved = optimizer.state_dict()
    with torch.no_grad():
        model.scale.fill_(2.0)
    optimizer.load_state_dict(saved)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        backward(net)
        found.append(error_of(optimizer.step))
    return [found, optimizer.local_epoch, values(model)]


def other_calls() -> Any:
    """What rank 0 refuses in another call than `step` is heard, too."""
    model = layers()
    optimizer = made(model)
    found = error_of(functools.partial(optimizer.load_state_from_peers, timeout=-1.0))
    return [found, optimizer.load_state_from_peers()]


def not_made() -> Any:
    """A rank that can't make its optimizer tells the others; then all try again."""
    model = layers()
    patience = [-1.0 if culprit == RANK else 60.0 for culprit in range(SIZE)]
    found = [error_of(functools.partial(made, model, averaging_timeout=seconds)) for seconds in patience]
    wave = ("wave", nn.Parameter(torch.ones(4, dtype=torch.complex64)))
    refused = [
        error_of(functools.partial(made, model, params=[wave], **mode)) for mode in ({}, {"outer": shoal.DiLoCo()})
    ]
    optimizer = made(model)
    optimizer.shutdown()
    return [found, optimizer.is_alive(), refused]


def unlike() -> Any:
    """Ranks that carry strands compare what they were given; then they try again, with the same DHT."""
    model, dht = layers(), shoal.DHT(start=True)
    given: dict[str, Any] = {"params": list(model.parameters()), "cluster": shoal.Cluster(strands=2), "optimizer": sgd}

    def make(norm: float) -> Any:
        return shoal.Optimizer(
            dht=dht, run_id="r", target_batch_size=8, batch_size_per_step=4, max_grad_norm=norm, **given
        )

    found = error_of(make, 1.0 + RANK)
    optimizer = make(1.0)
    alive = optimizer.is_alive()
    dist.barrier()
    optimizer.shutdown()
    dht.shutdown()
    return [found, alive]


def late() -> Any:
    """An optimizer that was shut down has its state still, and takes another one."""
    model = layers()
    optimizer = made(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    backward(model)
    optimizer.step()
    optimizer.shutdown()
    state = optimizer.state_dict()
    epochs = [state["state"]["local_epoch"]]
    kept = [each["momentum_buffer"] for number, each in state["state"].items() if number != "local_epoch"]
    state["state"]["local_epoch"] = 5
    for momentum in kept:
        momentum += 1.0
    optimizer.load_state_dict(state)
    state = optimizer.state_dict()["state"]
    epochs.append(state.pop("local_epoch"))
    loaded = [each["momentum_buffer"].tolist() for each in state.values()]
    return [epochs, len(kept), loaded == [momentum.tolist() for momentum in kept]]


def ended() -> Any:
    """The training of one rank ends by an error between two calls."""
    optimizer = made(layers())
    dist.barrier()  # both have made it
    if RANK == 0:
        return error_of(optimizer.step, None, 0)
    try:
        raise KeyError("mine")
    except KeyError:
        optimizer.shutdown()
        return ""


def hooks() -> Any:
    """Each rank has hooks, also on its wrapped optimizer; with strands, those of each rank raise once in turn."""
    model, called, found = layers(), [], []  # type: ignore[var-annotated]
    adam = []

    def keeping(params: Any) -> torch.optim.Optimizer:
        adam.append(torch.optim.Adam(params))
        return adam[0]

    optimizer = made(model, optimizer=keeping)
    noted: Any = lambda what: lambda *_: called.append(what)  # noqa: E731
    for each, name in ((optimizer, ""), (adam[0], "wrapped ")):
        each.register_state_dict_pre_hook(noted(f"{name}saving"))
        each.register_state_dict_post_hook(noted(f"{name}saved"))
        each.register_load_state_dict_pre_hook(noted(f"{name}loading"))
        each.register_load_state_dict_post_hook(noted(f"{name}loaded"))
    backward(model)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    whole = list(called)
    called.clear()
    if STRANDS > 1:
        strands = optimizer.strand_state()
        strands.load_state_dict(strands.state_dict())
        for culprit in range(SIZE):
            hook = optimizer.register_state_dict_pre_hook(lambda _: spill()) if culprit == RANK else None
            found.append(error_of(strands.state_dict))
            if hook is not None:
                hook.remove()
    backward(model)
    optimizer.step()
    return [whole, called[:4], found, optimizer.local_epoch]


class ByLoss(torch.optim.Optimizer):
    """Its step size is the loss."""

    element_wise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.1 * float(loss))
        return loss


class Twice(ByLoss):
    """Evaluates the loss again where a step leads."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


def closures() -> Any:
    """The loss is the mean over all ranks' samples, which are 2 here and 6 there."""
    alone, parts = layers(), [torch.full((2 + 4 * rank, 8), 0.5 + rank) for rank in range(SIZE)]

    def closure_of(model: nn.Module, module: Any, inputs: Tensor, weight: float = 1.0) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            model.zero_grad()
            loss = module(inputs).square().mean()
            (loss * weight).backward()  # DistributedDataParallel takes the mean of ranks, whatever their samples
            return loss.detach()

        return closure

    model = layers()
    optimizer = made(model, optimizer=ByLoss)
    mine = closure_of(model, DistributedDataParallel(model), parts[RANK], SIZE * len(parts[RANK]) / 8)
    stepper = ByLoss(alone.parameters())
    for _ in range(3):
        optimizer.step(mine, batch_size=len(parts[RANK]))
        stepper.step(closure_of(alone, alone, torch.cat(parts)))
    pairs = zip(values(model), values(alone), strict=True)
    alike = all(torch.allclose(torch.tensor(own), torch.tensor(theirs), atol=1e-6) for own, theirs in pairs)
    epoch, found = optimizer.local_epoch, []
    optimizer.shutdown()
    for given in ({}, {"outer": shoal.DiLoCo()}):
        model = layers()
        before = values(model)
        optimizer = made(model, optimizer=Twice, **given)
        found += [error_of(optimizer.step, closure_of(model, DistributedDataParallel(model), parts[RANK]))]
        found += [str(values(model) == before)]
        optimizer.shutdown()
    return [epoch, alike, *found]
