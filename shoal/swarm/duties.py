"""Which parts the membership of a closed run must permit for which role and message. Pure functions.

The *parts* of a run are what a membership can permit its peer to do: see `Part`.
"""

from __future__ import annotations

from shoal.membership.membership import Part
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.view import Role

ROUNDS = (Part.CLIENT, Part.AUXILIARY)  # a membership that permits to train permits both
STATES = (Part.CLIENT,)


def parts_of(role: Role, *, averages: bool = True) -> tuple[Part, ...]:
    """The parts of which a peer needs one for that role in a run. If the run `averages` nothing, a client only
    listens, and needs less."""
    if role is Role.CLIENT:
        return (Part.CLIENT,) if averages else (Part.WATCH,)
    return (Part.TRAIN,) if role is Role.NODE else (Part.AUXILIARY,)


def parts_for(message: object, *, averages: bool) -> tuple[Part, ...]:
    """The parts of which the sender of that message needs one.

    Args:
        message: a message of a run's service.
        averages: whether the run's rounds average anything; if not, the run only counts samples.
    """
    match message:
        case msg.Hello() | msg.Join():
            return parts_of(message.sender.role, averages=averages)
        case msg.Ping() | msg.Leave():
            return (Part.WATCH,)
        case msg.Progress(loading=True):
            return STATES
        case msg.Progress(counted=False):
            return (Part.WATCH,)
    return ROUNDS
