"""Makes the gradients, or the drift, that a rank of a cluster brings to the rounds of its strands."""

from __future__ import annotations

from shoal.averaging.exchange import Vector
from shoal.dht.dht import DHT
from shoal.optim.accumulator import EpochGradients
from shoal.optim.drift import fragments_of
from shoal.optim.settings import Settings, Stepped
from shoal.optim.strand_averager import StrandAverager
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_gradients import StrandGradients
from shoal.optim.strand_replica import StrandReplica


def strands_of(settings: Settings, replica: StrandReplica, inner: Stepped, dht: DHT) -> StrandGradients | StrandDrift:
    """Make the gradients of this rank's strands, or their drift. The replica is stepped with their average.

    Args:
        settings: the settings of the optimizer.
        replica: the state of this rank's strands.
        inner: with an outer optimizer, the inner optimizer, which steps the model.
        dht: the DHT of this rank.
    """
    strands, crew, codec = replica.strands, replica.crew, settings.grad_compression
    feedback, max_norm = settings.error_feedback, settings.max_grad_norm

    def averager(vector: Vector, fragment: int, strand: int) -> StrandAverager:
        return StrandAverager(vector, strand, len(strands.carriers), fragment, lambda: replica.tip, settings, dht)

    made: StrandGradients | StrandDrift
    if settings.outer is None:
        trained = [[p for p in part.parameters if p.requires_grad] for part in replica.parts]
        gradients = [EpochGradients(pieces, codec, error_feedback=feedback) for pieces in trained]
        averagers = [averager(each, 0, strand) for each, strand in zip(gradients, strands.mine, strict=True)]
        made = StrandGradients(trained, gradients, averagers, strands.carriers, crew, max_norm)
    else:
        model = [parameter for parameter in strands.model if parameter.requires_grad]
        fragments = fragments_of(settings.outer.fragments, model)
        numbers = {id(piece): number for number, piece in enumerate(replica.trained)}
        of_strand = [
            [numbers[id(piece)] for piece in map(strands.pieces.__getitem__, places) if piece.requires_grad]
            for places in strands.numbers
        ]  # the number of the piece, for each strand and trained parameter
        turns = [[[own[number] for number in fragment] for own in of_strand] for fragment in fragments]
        parts = replica.trained, replica.stepped, replica.optimizer
        made = StrandDrift(settings, inner, *parts, turns=turns, make_averager=averager, strands=strands, crew=crew)
        made.schema = repr(fragments).encode()
        replica.drift = made
    replica.gradients = made
    return made
