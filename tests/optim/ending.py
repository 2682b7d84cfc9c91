"""What tests see of the end of an epoch in the background."""

from __future__ import annotations

from shoal.optim.epoch import Epoch


def is_done(epoch: Epoch) -> bool:
    """Whether the background thread has a result to apply."""
    ending = epoch._ending
    return ending is not None and ending.result.done()
