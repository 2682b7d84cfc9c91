"""Collects all state on one rank: every slice is received straight into its place in the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.flat import are_equal, bytes_of, own_saving_hooks
from shoal.sharding.communication import Communication, Finish, chunks_of, run_in_window
from shoal.sharding.flat_views import flat_like, shaped_like
from shoal.sharding.shard import Piece, Shard
from shoal.sharding.state_dict import is_per_element
from shoal.sharding.tree import decode, encode

MAX_DESCRIPTION: Final = 2**30
"""Bytes of the JSON in which a rank describes its state."""


def give(communication: Communication, shard: Shard, to: int) -> None:
    """Sends this rank's state to rank ``to``: first a description as JSON, then the tensors one by one."""
    tensors: list[Tensor] = []
    content = json.dumps(_described(shard, tensors)).encode()
    description = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    communication.send_all(torch.tensor([len(content)], device="cpu"), to)
    communication.send_all(description, to)
    for tensor in tensors:
        communication.send_all(tensor.detach().reshape(-1), to)


def collect(communication: Communication, shard: Shard, params: Sequence[Tensor]) -> dict[Any, Any]:
    """The state of all parameters, and of no parameter, on the CPU, in the format of torch.optim's state dict. The
    other ranks call :func:`give`.

    Chunks of all ranks are processed in turn, this rank's own among them: it copies its own chunks while others are on
    their way.

    Raises:
        ValueError: if state of no parameter is not equal on all ranks that have it.
    """
    own: list[Tensor] = []
    described = [
        _described(shard, own) if rank == communication.rank else _receive_description(communication, rank)
        for rank in range(communication.ranks)
    ]
    state: dict[int, dict[str, Any]] = {}
    flats: dict[tuple[int, str], Tensor] = {}
    targets: list[list[Tensor]] = [[] for _ in described]
    of_none: list[dict[Any, Any]] = []
    for (pieces, others), coming in zip(described, targets, strict=True):

        def receive(dtype: torch.dtype, shape: tuple[int, ...], coming: list[Tensor] = coming) -> Tensor:
            target = torch.empty(shape, dtype=dtype, device="cpu")
            coming.append(target.view(-1))
            return target

        for number, start, stop, entries in pieces:
            param = params[number]
            of_param = state.setdefault(number, {})
            for name, per_element, entry in entries:
                if not per_element:
                    of_param[name] = decode(entry, receive)
                    continue
                if (number, name) not in flats:
                    flats[number, name] = torch.empty(
                        param.numel(), dtype=getattr(torch, entry["tensor"][0]), device="cpu"
                    )
                    of_param[name] = shaped_like(flats[number, name], param)
                coming.append(flats[number, name][start:stop])
        of_none.append({decode(key, receive): decode(value, receive) for key, value in others})
    turns = zip_longest(
        *(
            _copying(coming, own) if rank == communication.rank else _receiving(coming, communication, rank)
            for rank, coming in enumerate(targets)
        )
    )
    run_in_window(start for turn in turns for start in turn if start is not None)
    return {number: state[number] for number in sorted(state) if state[number]} | _agreed(of_none)


def _receive_description(communication: Communication, rank: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    communication.receive_all(length, rank)
    if not 0 < length.item() <= MAX_DESCRIPTION:
        raise ValueError(f"rank {rank} announces a description of {length.item()} bytes")
    content = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    communication.receive_all(content, rank)
    return json.loads(bytes(bytes_of(content)))


def _receiving(targets: Sequence[Tensor], communication: Communication, rank: int) -> Iterator[Callable[[], Finish]]:
    for target in targets:
        yield from communication.receiving(target, rank)


def _copying(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterator[Callable[[], Finish]]:
    """Copies chunk by chunk, each at once: there is nothing to finish."""

    def start(target: Tensor, source: Tensor) -> Finish:
        target.copy_(source)
        return lambda: None

    for target, source in zip(targets, sources, strict=True):
        for chunk, there in zip(chunks_of(target), chunks_of(source.detach().reshape(-1)), strict=True):
            yield partial(start, chunk, there)


def _described(shard: Shard, tensors: list[Tensor]) -> list[Any]:
    """The state of this rank: that of each slice, see `_describe`, and that of no parameter."""
    _check_form(shard.optimizer)
    pieces = [_describe(piece, shard, tensors) for piece in shard.all_pieces]
    return [pieces, [[encode(key, tensors), encode(value, tensors)] for key, value in shard.of_none.items()]]


def _check_form(optimizer: Optimizer) -> None:
    """Refuse a class whose state dicts have more than torch's.

    Raises:
        TypeError: if it is such a class.
    """
    kind = type(optimizer)
    if kind.state_dict is Optimizer.state_dict and not own_saving_hooks(optimizer):
        return
    state_dict = optimizer.state_dict()
    if more := sorted(map(str, state_dict.keys() ^ {"state", "param_groups"})):
        raise TypeError(
            f"the state dict of {kind.__name__} has a form of its own ({', '.join(more):.80}), and those of several "
            "ranks can't be put together: save the state_dict() of each rank's `optim` by itself, or choose another "
            "class"
        )


def _agreed(of_ranks: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """The state of no parameter, which is one for all ranks.

    Raises:
        ValueError: with the key of a value that is not.
    """
    agreed: dict[Any, Any] = {}
    first: dict[Any, int] = {}
    for rank, own in enumerate(of_ranks):
        for key, value in own.items():
            if key not in agreed:
                agreed[key], first[key] = value, rank
            elif not are_equal(agreed[key], value):
                raise ValueError(
                    f"the optimizer's state {key!r}, which is of no parameter, is {agreed[key]!r:.40} on rank "
                    f"{first[key]} and {value!r:.40} on rank {rank}: one state dict can't hold both. Choose a class "
                    "that keeps the same on all ranks, or save the state_dict() of each rank by itself"
                )
    return agreed


def _describe(piece: Piece, shard: Shard, tensors: list[Tensor]) -> list[Any]:
    """``[parameter, start, stop, [[name, whether per element, encoded value], …]]``; appends the tensors to
    ``tensors``.
    """
    entries = []
    for name, value in shard.state_of(piece).items():
        per_element = is_per_element(name, value, piece)
        if per_element and piece.whole:
            value = value.view(-1) if piece.is_copy else flat_like(value, piece.param)
        entries.append([str(name), per_element, encode(value, tensors)])
    return [piece.part.tensor, piece.part.span.start, piece.part.span.stop, entries]
