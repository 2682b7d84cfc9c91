"""The protocol of a run, as plain classes: events in, actions out, time as an argument.

Nothing here does I/O, reads a clock or imports torch. `tip.py`, `view.py` and `messages.py` define the data.
`participant.py` is the member's side of a round; `gathering.py` and `leading.py` are the coordinator's, before and
after BEGIN; `peer.py` combines them.
"""
