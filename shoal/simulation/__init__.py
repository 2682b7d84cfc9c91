"""Whole swarms in one process, on a virtual clock, from one seed: for tests of protocols.

What this room promises to those who write such tests:

- Time costs nothing: the clock jumps to the next timer, so an hour of waiting is over when nothing is left to compute.
- A run is a function of its seed: the same seed gives the same events at the same times, in any process. `World.digest`
  tells whether two runs were the same.
- A run that can't go on, or goes on too long, ends with an error that says who waits where.
- A killed peer does nothing more; what it had sent still arrives.
"""
