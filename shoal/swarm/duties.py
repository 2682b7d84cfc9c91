"""Which part of a closed run a peer must have for which message. Pure functions."""

from __future__ import annotations

from shoal.membership.membership import Part
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.view import Role

ROUNDS = (Part.CLIENT, Part.AUXILIARY)  # to train includes both
STATES = (Part.CLIENT,)


def parts_of(role: Role, *, averages: bool = True) -> tuple[Part, ...]:
    """The parts, of which a peer must have one to have that role in a run; in one that averages nothing, a client only
    listens."""
    if role is Role.CLIENT:
        return (Part.CLIENT,) if averages else (Part.WATCH,)
    return (Part.TRAIN,) if role is Role.NODE else (Part.AUXILIARY,)


def parts_for(message: object, *, averages: bool) -> tuple[Part, ...]:
    """The parts, of which the sender of that message must have one.

    Args:
        message: of a run's service.
        averages: whether the run's rounds average anything; if not, it only counts.
    """
    match message:
        case msg.Hello() | msg.Join():
            return parts_of(message.sender.role, averages=averages)
        case msg.Ping() | msg.Leave():
            return (Part.WATCH,)
        case msg.Progress(counted=False, loading=False):
            return (Part.WATCH,)
    return ROUNDS
