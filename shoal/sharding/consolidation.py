"""Bringing all state to one rank: every slice goes straight to its place in the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shoal.flat import bytes_of
from shoal.sharding.communication import Communication
from shoal.sharding.memory import flat_like, shaped_like
from shoal.sharding.shard import Piece, Shard
from shoal.sharding.state_dict import is_per_element
from shoal.sharding.tree import decode, encode

MAX_DESCRIPTION: Final = 2**30
"""Bytes of the JSON in which a rank describes its state."""


def give(communication: Communication, shard: Shard, to: int) -> None:
    """Sends this rank's state to rank ``to``: first what there is, as JSON, then the tensors one by one."""
    tensors: list[Tensor] = []
    content = json.dumps([_describe(piece, shard, tensors) for piece in shard.all_pieces]).encode()
    description = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    communication.send_all(torch.tensor([len(content)]), to)
    communication.send_all(description, to)
    for tensor in tensors:
        communication.send_all(tensor.detach().reshape(-1), to)


def collect(communication: Communication, shard: Shard, params: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
    """The state of all parameters, on the CPU, as torch.optim's state dict has it; the others :func:`give` theirs."""
    state: dict[int, dict[str, Any]] = {}
    flats: dict[tuple[int, str], Tensor] = {}
    for rank in range(communication.ranks):
        if rank == communication.rank:
            tensors: list[Tensor] = []
            described = [_describe(piece, shard, tensors) for piece in shard.all_pieces]
            coming = iter(tensors)
        else:
            length = torch.zeros(1, dtype=torch.int64)
            communication.receive_all(length, rank)
            if not 0 < length.item() <= MAX_DESCRIPTION:
                raise ValueError(f"rank {rank} announces a description of {length.item()} bytes")
            content = torch.empty(int(length.item()), dtype=torch.uint8)
            communication.receive_all(content, rank)
            described = json.loads(bytes(bytes_of(content)))
            coming = None

        def fill(target: Tensor, rank: int = rank, coming: Any = coming) -> None:
            if coming is not None:
                target.copy_(next(coming).detach().reshape(-1))
            else:
                communication.receive_all(target, rank)

        for number, start, stop, entries in described:
            param = params[number]
            of_param = state.setdefault(number, {})
            for name, per_element, entry in entries:
                if per_element:
                    dtype = getattr(torch, entry["tensor"][0])
                    if (number, name) not in flats:
                        flats[number, name] = torch.empty(param.numel(), dtype=dtype)
                        of_param[name] = shaped_like(flats[number, name], param)
                    fill(flats[number, name][start:stop])
                    continue

                def receive(dtype: torch.dtype, shape: tuple[int, ...], fill: Any = fill) -> Tensor:
                    target = torch.empty(shape, dtype=dtype)
                    fill(target.view(-1))
                    return target

                of_param[name] = decode(entry, receive)
    return {number: state[number] for number in sorted(state) if state[number]}


def _describe(piece: Piece, shard: Shard, tensors: list[Tensor]) -> list[Any]:
    """``[parameter, start, stop, [[name, whether per element, encoded value], …]]``; appends the tensors."""
    entries = []
    for name, value in shard.state_of(piece).items():
        per_element = is_per_element(value, piece)
        if per_element and piece.whole:
            value = value.view(-1) if piece.is_copy else flat_like(value, piece.param)
        entries.append([str(name), per_element, encode(value, tensors)])
    return [piece.part.tensor, piece.part.span.start, piece.part.span.stop, entries]
