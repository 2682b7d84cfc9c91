"""Who is waited for in a round, and for how long."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from shoal.swarm.protocol.doubts import COMPLAINT_SECONDS
from shoal.swarm.protocol.silence import MOST_TIMES, Silence
from tests.swarm.rounds import key
from tests.swarm.test_participant import BEGIN

LARGE = 1 << 20


def exchange_that_lacks_parts_of(number: int) -> Any:
    """What `Silence` sees of a round in which that member owes a part, and nothing else."""
    book = SimpleNamespace(
        begin=BEGIN, me=key(1), waiting_for=lambda: {key(number): None}, awaited={}, changes=0, complete=False
    )
    return SimpleNamespace(book=book, progressed=0)


def late_after(sends: int, progresses: bool = False, until: int = 1000) -> int | None:
    """In which second member 2 is complained of that sends so many bytes a second; None if it is not."""
    silence, exchange = Silence(5.0, 10.0), exchange_that_lacks_parts_of(2)
    moved = Counter[bytes]()
    for now in range(until):
        exchange.progressed += progresses
        moved[key(2)] += sends
        if silence.look(exchange, moved.__getitem__, False, float(now)):
            return now
    return None


def test_who_sends_nothing_is_late_after_its_time() -> None:
    assert late_after(sends=0) == 6


def test_a_complaint_is_there_before_the_coordinator_gives_up_who_complains() -> None:
    """Also where this peer's looks see both that something came, and that nothing has come since, as late as can be,
    where each comes a quarter of a second late."""
    silence, exchange, looks = (
        Silence(5.0, 10.0),
        exchange_that_lacks_parts_of(2),
        (1.24 * n for n in range(99)),
    )
    silence.look(exchange, lambda key: 0, False, next(looks))
    exchange.progressed += 1
    complains = next(now for now in looks if silence.look(exchange, lambda key: 0, False, now))
    assert 5.0 + 2.0 < complains < 5.0 + COMPLAINT_SECONDS, "the message takes a while, too"


def test_who_sends_is_waited_for_longer_and_not_for_ever_if_nothing_whole_comes() -> None:
    late = late_after(sends=LARGE)
    assert late is not None
    assert 5 * MOST_TIMES < late <= 5 * MOST_TIMES + 6


def test_a_slow_line_over_which_chunks_come_is_never_late() -> None:
    assert late_after(sends=LARGE, progresses=True) is None
