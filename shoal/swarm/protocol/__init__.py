"""The protocol of a run, as plain classes: events in, actions out, time as an argument.

Nothing here does I/O, reads a clock or imports torch. `tip.py`, `view.py` and `messages.py` define the data;
`coordinator.py` and `participant.py` are the two sides of a round, and `peer.py` combines them.
"""
