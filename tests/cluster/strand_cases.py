"""What the ranks of a process group do: the cases below, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shoal.cluster import exchange
from shoal.cluster.cluster import Cluster
from shoal.cluster.strands import Strands

CASES: list[tuple[Callable[[], None], tuple[int, ...]]] = []


def case(*sizes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Of groups of so many ranks."""

    def marked(act: Callable[[], None]) -> Callable[[], None]:
        CASES.append((act, sizes))
        return act

    return marked


class Odd(nn.Module):
    """Rows that ranks do not divide, fewer rows than ranks, a scalar, a tied weight, a frozen layer, three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.few = nn.Linear(7, 2)
        self.one = nn.Linear(3, 1)
        self.frozen = nn.Linear(7, 3).requires_grad_(False)
        self.wide = nn.Linear(3, 9, dtype=torch.float64)
        self.narrow = nn.Linear(4, 10, dtype=torch.bfloat16)
        self.conv = nn.Conv2d(2, 5, (2, 3))
        self.scale = nn.Parameter(torch.ones(()))
        scramble(self)


def scramble(model: nn.Module) -> None:
    """Any bits, NaNs of all kinds among them; the same at all ranks."""
    made = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            bits = torch.randint(0, 256, (p.numel() * p.element_size(),), generator=made, dtype=torch.uint8)
            p.copy_(bits.view(p.dtype).view(p.shape))


def whole(tensor: Tensor) -> Tensor:
    """All of it, in row-major order; a collective where it is sharded."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return full.contiguous().view(-1).clone()


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def joined(strands: Strands, mine: list[Tensor]) -> list[Tensor]:
    """Of each parameter, the values of all its pieces at all ranks in the order of the strands."""
    found: list[Any] = [None] * dist.get_world_size(strands.group)
    told = {
        (number, strand): mine[place].detach().clone()
        for index, strand in enumerate(strands.mine)
        for number, place in enumerate(strands.numbers[index])
    }
    dist.all_gather_object(found, told, group=strands.group)
    everything = {key: value for theirs in found for key, value in theirs.items()}
    count = len(strands.carriers)
    assert len(everything) == count * len(strands.model)
    numbers = range(len(strands.model))
    return [torch.cat([everything[number, strand] for strand in range(count)]) for number in numbers]


def counting(tensor: Tensor, start: int = 0) -> Tensor:
    """The numbers from there on, of which bfloat16 has the small ones only."""
    return (torch.arange(start, start + tensor.numel()) % 200).to(tensor.dtype).view(tensor.shape)


def gradient(parameter: Tensor, factor: float) -> Tensor:
    """Known numbers, placed as the parameter is."""
    full = torch.arange(parameter.numel()).view(parameter.shape).mul(factor).to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements)


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def check(ranks: Cluster, params: Any, order: list[int] | None = None) -> Strands:
    """All that is promised of any model."""
    strands = Strands(ranks, params)
    before = [whole(p) for p in strands.model]
    share = ranks.strands // ranks.size
    wanted = range(ranks.size) if order is None else order
    assert strands.carriers == [rank for rank in wanted for _ in range(share)]
    assert [k for k, rank in enumerate(strands.carriers) if rank == ranks.rank] == list(strands.mine)

    assert all(same(*each) for each in zip(joined(strands, strands.pieces), before, strict=True))
    for piece in strands.pieces:
        assert piece.ndim == 1
        assert piece.dtype == strands.of[id(piece)].dtype
        assert piece.requires_grad == strands.of[id(piece)].requires_grad
        assert piece.untyped_storage().nbytes() == piece.nbytes
    strands.spread([])
    assert all(same(whole(p), was) for p, was in zip(strands.model, before, strict=True))

    gathered = list(strands.collect(dict(enumerate(strands.pieces))).values())
    assert len(gathered) == (len(strands.model) if ranks.rank == 0 else 0)
    for parameter, full, was in zip(strands.model, gathered, before, strict=False):
        assert full.shape == parameter.shape
        assert same(full.view(-1), was)
    meta = [torch.empty((), dtype=p.dtype, device="meta") for p in strands.model]
    back = strands.deal(dict(enumerate(gathered or meta)))
    assert all(same(back[place], piece) for place, piece in enumerate(strands.pieces))

    with torch.no_grad():
        for index, strand in enumerate(strands.mine):
            for number, place in enumerate(strands.numbers[index]):
                elements = strands.model[number].numel()
                piece = strands.pieces[place]
                assert piece.numel() == (strand + 1) * elements // ranks.strands - strand * elements // ranks.strands
                piece.copy_(counting(piece, strand * elements // ranks.strands))
    more = torch.full((3, 2), float(ranks.rank)).t()
    strands.spread([more])
    assert more.eq(0).all()
    assert all(same(whole(p), counting(was)) for p, was in zip(strands.model, before, strict=True))

    halves = [counting(piece).to(torch.float64) / 2 for piece in strands.pieces]  # another dtype than the parameter's
    gathered = list(strands.collect(dict(enumerate(halves))).values())
    assert all(same(one.view(-1), other) for one, other in zip(gathered, joined(strands, halves), strict=False))
    doubles = [torch.empty((), dtype=torch.float64, device="meta") for p in strands.model]
    back = strands.deal(dict(enumerate(gathered or doubles)))
    assert all(same(back[place], half) for place, half in enumerate(halves))
    last = len(strands.model) - 1
    some = strands.collect({places[last]: halves[places[last]] for places in strands.numbers})  # of one parameter only
    assert [*some] == [last][ranks.rank :]
    assert all(same(one, gathered[last]) for one in some.values())
    back = strands.deal({last: (gathered or doubles)[last]})
    assert back.keys() == {places[last] for places in strands.numbers}
    assert all(same(value, halves[place]) for place, value in back.items())
    check_gradients(strands)
    return strands


def check_gradients(strands: Strands) -> None:
    for factor in (1.5, -3.0):
        for number, parameter in enumerate(strands.model):
            parameter.grad = None if number % 3 == 2 else gradient(parameter, factor)
        strands.gather_for_step()
        for number in range(len(strands.model)):
            places = [places[number] for places in strands.numbers]
            has_gradient = number % 3 != 2
            assert strands.gradients[number] == has_gradient
            assert all((strands.pieces[place].grad is not None) == has_gradient for place in places)
        taken = [torch.empty(0) if piece.grad is None else piece.grad for piece in strands.pieces]
        for number, (parameter, found) in enumerate(zip(strands.model, joined(strands, taken), strict=True)):
            assert number % 3 == 2 or same(found, whole(parameter.grad))
    strands.clear(set_to_none=False)
    assert all(piece.grad is None for piece in strands.pieces)
    assert all(p.grad is None or not whole(p.grad).any() for p in strands.model)
    strands.clear(set_to_none=True)
    assert all(p.grad is None for p in strands.model)


def world(strands: int = 12) -> Cluster:
    return Cluster(strands=strands)


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def refused(params: Any, *said: str) -> None:
    error = str(error_of(params))
    assert all(each in error for each in (*said, "give Cluster(strands=1)")), error


def error_of(params: Any) -> ValueError | None:
    try:
        Strands(world(), params)
    except ValueError as error:
        return error
    return None


class Calls:
    """Within, counts exchanges."""

    def __enter__(self) -> Calls:
        self.bytes: list[int] = []
        self._was = dist.all_to_all_single
        dist.all_to_all_single = self._counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._was

    def _counted(self, received: Tensor, sent: Tensor, *given: Any, **options: Any) -> None:
        self.bytes.append(received.nbytes)
        self._was(received, sent, *given, **options)


# -- cases


@case(1, 2, 3, 4)
def replicated() -> None:
    model = Odd()
    check(world(), model.parameters())
    check(world(dist.get_world_size()), model.named_parameters())


@case(2, 3)
def six_strands() -> None:
    strands = check(world(6), Odd().parameters())
    assert len(strands.mine) == 6 // dist.get_world_size()


@case(1, 2, 3, 4)
def sharded() -> None:
    model = Odd()
    mesh = mesh_of_all()
    fully_shard(model.first, mesh=mesh)  # nested
    fully_shard([model.few, model.one], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    assert sum(isinstance(p, DTensor) for p in model.parameters()) == len(list(model.parameters())) - 1
    check(world(), model.parameters())
    check(world(dist.get_world_size()), model.parameters())


@case(2, 3, 4)
def small_buckets() -> None:
    was, exchange.BUCKET_BYTES = exchange.BUCKET_BYTES, 64
    try:
        for act in (replicated, sharded):
            with Calls() as calls:
                act()
            assert max(calls.bytes) <= max(8 * p.numel() for p in Odd().parameters())
    finally:
        exchange.BUCKET_BYTES = was


@case(4)
def copies_of_shards() -> None:
    """HSDP."""
    for shape, order in (((2, 2), [0, 2, 1, 3]), ((4, 1), [0, 1, 2, 3]), ((1, 4), [0, 1, 2, 3])):
        model = Odd()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
        fully_shard(model.few, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.scale})
        check(world(), model.parameters(), order)


@case(4)
def meshes_in_two_orders() -> None:
    """The first sharded parameter says who carries what."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
    first, other = torch.arange(21.0).view(7, 3), torch.arange(15.0).view(5, 3)
    everywhere = distribute_tensor(torch.arange(5.0), mesh, [Replicate(), Replicate()])
    crossed = distribute_tensor(first, mesh, [Shard(0), Replicate()])
    other_way = distribute_tensor(other, mesh, [Replicate(), Shard(0)])
    straight = distribute_tensor(other, mesh_of_all(), [Shard(0)])
    check(world(), [nn.Parameter(each) for each in (everywhere, crossed, other_way, straight)], [0, 2, 1, 3])
    check(world(), [nn.Parameter(each) for each in (everywhere, other_way, crossed)], [0, 1, 2, 3])


@case(4)
def a_part_of_the_ranks_is_the_cluster() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))["one"]
    model = Odd()
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    check(Cluster(mesh.get_group(), strands=12), model.parameters())


@case(2, 3)
def other_strides() -> None:
    """What is exchanged is in row-major order, whatever the memory of the rank."""
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    scramble(model)
    if dist.get_rank() == 0:
        model.to(memory_format=torch.channels_last)
        assert not model[0].weight.is_contiguous()
    check(world(), model.parameters())
    assert model[0].weight.is_contiguous() == (dist.get_rank() > 0)


@case(2, 3)
def sparse_gradients() -> None:
    table = nn.Embedding(9, 3, sparse=True)
    table(torch.tensor([1, 4, 4])).sum().backward()
    assert grad_of(table.weight).is_sparse
    strands = Strands(world(), table.parameters())
    strands.gather_for_step()
    (found,) = joined(strands, [grad_of(piece) for piece in strands.pieces])
    assert same(found, whole(grad_of(table.weight).to_dense()))
    found_digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found_digests, strands.digest())
    assert len(set(found_digests)) == 1
    table.weight.grad = torch.full((9, 3), float(dist.get_rank()))
    dist.all_gather_object(found_digests, strands.digest())
    assert len(set(found_digests)) == dist.get_world_size()


@case(2, 4)
def gradients_that_are_placed_otherwise() -> None:
    mesh = mesh_of_all()
    weight = nn.Parameter(distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Replicate()])
    strands = Strands(world(), [weight])
    strands.gather_for_step()
    assert same(joined(strands, [grad_of(piece) for piece in strands.pieces])[0], torch.arange(21.0))


@case(2, 4)
def exchanges_are_few() -> None:
    """None where each rank holds what it carries, and one for each dtype otherwise."""
    size = dist.get_world_size()
    even, odd = nn.Linear(8, 24), nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 24))
    fully_shard(even, mesh=mesh_of_all())
    fully_shard(odd, mesh=mesh_of_all())
    plain = nn.Linear(8, 25)
    for model, taking, spreading in ((even, 0, 0), (odd, 1, 1), (plain, 0, 1)):
        with Calls() as calls:
            strands = Strands(world(), model.parameters())
        assert len(calls.bytes) == taking
        with Calls() as calls:
            strands.spread([])
        assert len(calls.bytes) == spreading
    assert calls.bytes[0] == 4 * sum(
        p.numel() - sum(map(len, strands.pieces[n :: len(strands.model)])) for n, p in enumerate(strands.model)
    )
    assert size > 1


@case(1, 2, 3, 4)
def stepped_as_one() -> None:
    """Gradients of a real backward pass, and torch's optimizers on the pieces."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3))
        alone = copy.deepcopy(model)
        fully_shard(model[0], mesh=mesh_of_all())
        fully_shard(model, mesh=mesh_of_all())
        strands = Strands(world(), groups_of(model))
        stepper, other = kind(strands.params, lr=0.1), kind(groups_of(alone), lr=0.1)
        strands.model[0].detach().mul_(2)  # before the first step
        strands.gather_parameters()
        alone[0].weight.detach().mul_(2)
        for number in range(3):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
            for each, step in ((model, stepper), (alone, other)):
                each(inputs).square().mean().backward()
                if each is model:
                    strands.gather_for_step()
                step.step()
            strands.spread([])
            strands.clear(set_to_none=True)
            other.zero_grad()
        for mine, theirs in zip(
            strands.model, [p for group in groups_of(alone) for _, p in group["params"]], strict=True
        ):
            assert torch.allclose(whole(mine), whole(theirs), rtol=1e-5, atol=1e-6)
        if kind is torch.optim.AdamW:
            moments = {place: stepper.state[piece]["exp_avg"] for place, piece in enumerate(strands.pieces)}
            momentum = strands.collect(moments).values()
            given = [other.state[p]["exp_avg"] for p in alone.parameters()]
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(momentum, given, strict=False))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[:3], "weight_decay": 0.0}, {"params": iter(named[3:]), "weight_decay": 0.1}]


@case(1, 2, 3)
def groups_keep_their_order() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3))
    strands = Strands(world(6), groups_of(model))
    names = [name for name, _ in model.named_parameters()]
    for group, theirs in zip(strands.params, (names[:3], names[3:]), strict=True):
        assert [name for name, _ in group["params"]] == [f"{name}[{k}/6]" for k in strands.mine for name in theirs]
    flat = [piece for group in strands.params for _, piece in group["params"]]
    assert all(one is other for one, other in zip(flat, strands.pieces, strict=True))
    assert [group["weight_decay"] for group in strands.params] == [0.0, 0.1]
    for places in strands.numbers:
        assert [strands.of[id(strands.pieces[place])] is p for place, p in zip(places, model.parameters(), strict=True)]
    check(world(6), groups_of(model))


@case(2, 3, 4)
def refusals() -> None:
    mesh = mesh_of_all()
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    columns = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(1)]))
    with Calls() as calls:
        refused([model[0].weight, columns], "parameter 1 of shape (3, 7) has", "Shard(dim=1)")
        refused([("head.weight", columns)], "head.weight of shape (3, 7) has")
        refused([{"params": [("head.weight", columns)]}], "head.weight of shape (3, 7) has")
        model[1].weight = columns
        refused(model.parameters(), "1.weight of shape (3, 7) has")
    assert calls.bytes == []
    for mistake in ([3], [("a", 3)], [{"params": [3]}]):
        assert "params= has a int" in str(error_of(mistake))


@case(4)
def refused_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model[1], mesh=mesh["two"])
    refused(model.parameters(), "1.weight of shape (3, 7) has", "cluster's ranks, in their order, [0, 1, 2, 3]")
    tensors: Any = parallelize_module(nn.Sequential(nn.Linear(5, 8)), mesh["two"], {"0": ColwiseParallel()})
    fully_shard(tensors, mesh=mesh["one"])
    refused(tensors.parameters(), "0.weight of shape (8, 5) has", "StridedShard")
    both = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0), Shard(0)])
    refused([both], "parameter 0 of shape (8, 4) has")


def all_cases() -> list[str]:
    """Those of a group of this size, which have held. Raises what one has found: the others may wait for this rank."""
    mine = [act for act, sizes in CASES if dist.get_world_size() in sizes]
    for act in mine:
        act()
    return [act.__name__ for act in mine]
