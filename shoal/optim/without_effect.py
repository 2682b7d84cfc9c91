"""The options of hivemind that are accepted without effect, so that its scripts run, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ALL_ARE_ASKED: Final = "a newcomer asks all members for their state"
_NO_PROCESS: Final = "there is no process that could be a daemon"

WITHOUT_EFFECT: Final[Mapping[str, Mapping[str, str]]] = {
    "averager_opts": {
        "target_group_size": "all peers of a run average together",
        "part_size_bytes": "the size of chunks follows from the model",
        "min_vector_size": "the shares of reducers follow from `bandwidth`",
        "declare_state_period": _ALL_ARE_ASKED,
        "daemon": _NO_PROCESS,
    },
    "tracker_opts": {
        "metadata_expiration": "a peer counts while it is connected",
        "private_key": "the DHT's identity signs records",
        "daemon": _NO_PROCESS,
    },
    "DecentralizedAverager": {"declare_state_period": _ALL_ARE_ASKED, "daemon": _NO_PROCESS},
    "TrainingStateAverager": {"performance_ema_alpha": "it predicts nothing"},
}
"""By the argument of `Optimizer`, or by the class, that takes them. `ProgressTracker` takes those of `tracker_opts`."""
