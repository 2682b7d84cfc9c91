"""Which peers compute alike: the name of all on which the bits of a peer's step depend."""

from __future__ import annotations

import platform

import torch


class Machine:
    """What this peer says of itself in a round: peers of one name make bit-identical steps.

    Args:
        me: this peer's key.

    Attributes:
        name: at most 256 characters; may change between epochs.
    """

    def __init__(self, me: bytes) -> None:
        self._me, self._own = me, this_machine()
        self._lossy_epoch = -1  # of the last state that was downloaded through a lossy codec
        self.name = self._own

    def has_lossy_state(self, epoch: int) -> None:
        """The state of that epoch was downloaded through a lossy codec: it may differ from that of peers that compute
        alike, until the state is averaged."""
        self._lossy_epoch = epoch
        self.name = f"{self._me.hex()[:16]} after a lossy download, {self._own}"[:256]

    def has_averaged_state(self, epoch: int, *, whole: bool) -> None:
        """The state with which that epoch begins is made of averages; with `whole`, of nothing else."""
        # What is not averaged was downloaded exactly, and is still the others' if no step was made since.
        if whole or epoch == self._lossy_epoch + 1:
            self.name = self._own


def this_machine() -> str:
    """The name, before any download."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = [f"torch {torch.__version__}", platform.machine(), capability, f"{torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        names.append(torch.cuda.get_device_name())
    return ", ".join(names)[:256]
