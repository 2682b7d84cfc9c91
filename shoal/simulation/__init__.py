"""Simulates whole swarms in one process, on a virtual clock and from one seed, for tests of protocols.

What this room promises to the authors of such tests:

- Waiting costs no time: the clock jumps to the next timer as soon as nothing is left to compute.
- A run is a function of its seed: the same seed gives the same events at the same times, in any process. `World.digest`
  tells whether two runs were the same.
- A run that can't continue, or takes too long, ends with an error that says which tasks wait where.
- A killed peer does nothing more, but the messages that it has sent still arrive.
"""
