"""Traces: what the replicas of a run did and when, in files with one line of JSON for each event. `shoal.Trace` writes
them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.health.record import Amount, Count, Seconds, Time

Loss = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]


class TraceEvent(Enum):
    """What a line tells."""

    START = "start"
    """The replica's optimizer stands. Its process began `seconds` before."""
    WAITING = "waiting"
    ROUND = "round"
    DOWNLOADING = "downloading"
    STOPPED = "stopped"
    DEAD = "dead"
    """Like the four before it, a span, which took `seconds` until `time`."""
    STEP = "step"
    """A step was committed: `epoch`, `samples`, `peers`, `own`, `loss`."""
    LOST = "lost"
    """So many `samples` that this replica has computed are in no step, for this `reason`."""
    END = "end"
    """The replica was shut down."""


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of a trace. What its event does not have is 0, empty or None.

    Attributes:
        time: in seconds since 1970, by the clock of the replica's machine.
        replica: the name of the replica.
        event: what happened.
        seconds: the length of a span; at a start, the age of the process.
        epoch: the number of the epoch that began with the step.
        samples: those of all members in the step; or those that were lost.
        peers: the number of members.
        own: the samples of this replica in the step.
        loss: the mean loss that this replica has reported since its last step.
        reason: why samples were lost.
    """

    time: Time
    replica: str
    event: TraceEvent
    seconds: Seconds = 0.0
    epoch: Count = 0
    samples: Amount = 0.0
    peers: Count = 0
    own: Amount = 0.0
    loss: Loss | None = None
    reason: str = ""


def read_trace(path: Path) -> Iterator[TraceLine]:
    """The lines of a trace, or of several in one file. Lines that a killed replica has not written to their ends are
    left out.

    Raises:
        OSError: if the file can't be read.
        ValueError: if a line is no event, with the file and the number of the line.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.isspace():
                try:
                    yield _decoded(text)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    if text.endswith(b"\n"):
                        raise ValueError(f"{path}, line {number} is no event of a trace: {error}") from error


def _decoded(text: bytes) -> TraceLine:
    # A replica that is started anew, or `cat`, goes on behind what the killed one has written of its last line.
    begin = text.rfind(b'{"time"')
    return _decoder.decode(text[begin:] if begin > 0 else text)


_decoder = msgspec.json.Decoder(TraceLine)
