"""The name of everything on which the bits of a peer's step depend."""

from __future__ import annotations

EXACT = "exact"
"""The name of all machines, if the step has the same bits on each."""


class Machine:
    """Names everything on which the bits of a peer's step depend. Peers with the same name make bit-identical steps.

    Args:
        me: this peer's key.
        own: the name before any download; `EXACT` if all machines make the same bits.

    Attributes:
        name: at most 256 characters; may change between epochs.
    """

    def __init__(self, me: bytes, own: str) -> None:
        self._me, self._own, self._is_exact = me, own, own == EXACT
        self._lossy_epoch = -1  # the epoch of the last state that was downloaded through a lossy codec
        self.name = self._own

    def has_lossy_state(self, epoch: int) -> None:
        """Note that the state of `epoch` was downloaded through a lossy codec. Until the state is averaged, it may
        differ from the state of peers that compute alike."""
        self._lossy_epoch = epoch
        self.name = f"{self._me.hex()[:16]} after a lossy download, {self._own}"[:256]

    def has_averaged_state(self, epoch: int, *, whole: bool) -> None:
        """Note that the state with which `epoch` begins was averaged. With `whole`, everything in it was averaged."""
        # The rest of the state was downloaded exactly. It still equals the others' if no step was made since. (The
        # state of an exact outer optimizer does not depend on the parameters.)
        if whole or self._is_exact or epoch == self._lossy_epoch + 1:
            self.name = self._own
