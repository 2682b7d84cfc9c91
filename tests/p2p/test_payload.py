"""Payloads go out of flat memory and into it, without a detour over Python objects."""

from __future__ import annotations

import asyncio

import torch

from tests.p2p.recorder import LOOPBACK, Recorder, sockets

CHUNK = 1 << 18  # float32 elements: 1 MiB
CHUNKS = 8


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")


def test_a_flat_buffer_is_rebuilt_elsewhere_from_its_chunks():
    async def main():
        async with sockets(None, None, None) as (sender, one, other):
            await sender.transport.dial(await one.transport.listen(LOOPBACK))
            await other.transport.dial(await sender.transport.listen(LOOPBACK))
            source = torch.randn(CHUNK * CHUNKS)
            copies = {}
            kept: dict[Recorder, list[tuple[int, torch.Tensor]]] = {one: [], other: []}

            def fill(end):
                target = copies[end] = torch.zeros(CHUNK * CHUNKS)

                def on_message(peer, header, buffers):
                    start = int(bytes(header)) * CHUNK
                    # A view of what was received: no copy, and valid for as long as it is referenced.
                    chunk = torch.frombuffer(buffers[0], dtype=torch.float32)
                    target[start : start + CHUNK].copy_(chunk)
                    kept[end].append((start, chunk))
                    end._changed.set()

                end.transport._on_message = on_message

            for end in (one, other):
                fill(end)
            peers = [one.transport.peer_id, other.transport.peer_id]
            sent = source.clone()
            for number in range(CHUNKS):
                span = slice(number * CHUNK, (number + 1) * CHUNK)
                sender.transport.send(peers, b"%d" % number, [flat_bytes(sent[span])])
                sent[span].zero_()  # allowed: the transport has its copy
            await one.until(lambda: len(kept[one]) == CHUNKS)
            await other.until(lambda: len(kept[other]) == CHUNKS)
        for copy in copies.values():
            assert torch.equal(copy, source)
        # Also after the transports are gone.
        assert all(torch.equal(chunk, source[start : start + CHUNK]) for start, chunk in kept[one] + kept[other])

    asyncio.run(main())
