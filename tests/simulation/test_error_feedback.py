"""Peers die at any moment of a round with error feedback: each survivor owes what the part that counted has lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from shoal.averaging.residual import Residual
from shoal.compression import Blockwise4Bit, Codec, CodecPlan, NoCompression, TopK
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.contribution import Outcome
from tests.codecs import codecs_of
from tests.simulation.swarms import seeds, spawn_swarm

ELEMENTS = 24 * 4096


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), torch.float32, len(values)).float()


class Chunk:
    """One chunk of a round: the parts of all peers, and what happened to them."""

    def __init__(self, parts: list[torch.Tensor], weights: list[float], start: int, stop: int, plan: CodecPlan) -> None:
        self.parts = [part[start:stop] for part in parts]
        codec, self.results = plan.codec_of(0, start, stop), plan.results.codec_of(0, start, stop)
        self.sent, self.weights = [through(codec, part) for part in self.parts], weights

    def stories(self, victim: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """What the result and the residuals may be: with any reducer, and with or without the part of the victim."""
        everyone = range(len(self.parts))
        for reducer, left_out in product(everyone, (None, victim)):
            if reducer == left_out:
                continue
            total = sum(weight for number, weight in enumerate(self.weights) if number != left_out)
            mean = torch.zeros_like(self.parts[0])
            for number in everyone:
                if number != left_out:
                    part = self.parts[number] if number == reducer else self.sent[number]
                    mean += part * (self.weights[number] / total)
            result = through(self.results, mean) if self.results.lossy else mean
            owed = [part - sent for part, sent in zip(self.parts, self.sent, strict=True)]
            owed[reducer] = (mean - result) * (total / self.weights[reducer])
            yield result, owed


@pytest.mark.parametrize("results", [NoCompression(), Blockwise4Bit()], ids=["exact", "lossy"])
@pytest.mark.parametrize("parts", [Blockwise4Bit(), TopK()], ids=["4 bits", "top k"])
@pytest.mark.parametrize("seed", seeds(6))
def test_a_kill_at_any_moment_leaves_the_right_residuals(seed: int, parts: Codec, results: Codec) -> None:
    async def scenario() -> None:
        world = World(seed, bandwidth=3e5)
        peers = await spawn_swarm(world, 4, elements=ELEMENTS)
        plan = codecs_of([peers[0].vector], parts)
        plan = CodecPlan(plan.spans, 1, codecs_of([peers[0].vector], results).spans)
        for peer in peers:
            peer.codecs, peer.residual = plan, Residual(torch.zeros(ELEMENTS), 1.0)
        await asyncio.gather(*(peer.round() for peer in peers))
        before = []
        for peer in peers:
            assert peer.exchange is not None
            assert peer.exchange._errors is not None
            peer.exchange._errors.settle()
            assert peer.residual is not None
            before.append(peer.residual.values.clone())
        weights = [world.rng.choice([0.5, 1.0, 2.0]) for _ in peers]
        victim = world.rng.randrange(4)
        tasks = [peer.spawn_round(weight=weight) for peer, weight in zip(peers, weights, strict=True)]
        await asyncio.sleep(world.rng.uniform(0.0, 0.4))
        world.kill(peers[victim].node.peer_id)
        alive = [number for number in range(4) if number != victim]
        for number in alive:
            peer, outcome = peers[number], await tasks[number]
            assert isinstance(outcome, Outcome), outcome
            assert peer.residual is not None
            assert torch.equal(peer.residual.values, before[number]), "it has changed before COMMIT was used"
            assert peer.exchange is not None
            assert peer.exchange._errors is not None
            peer.exchange._errors.settle()
        brought = [peer.vector + residual for peer, residual in zip(peers, before, strict=True)]
        survivor = peers[alive[0]]
        assert survivor.exchange is not None
        for span in survivor.exchange.book.chunks:
            chunk = Chunk(brought, weights, span.start, span.stop, plan)
            held = [peer.residual.values[span.start : span.stop] for peer in peers if peer.residual is not None]
            result = survivor.output[span.start : span.stop]
            assert any(
                torch.allclose(result, told, atol=1e-5)
                and all(torch.allclose(held[number], owed[number], atol=1e-4) for number in alive)
                for told, owed in chunk.stories(victim)
            ), f"chunk {span} has no explanation"

    run(scenario())
