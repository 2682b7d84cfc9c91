"""The private names of the frameworks that this room uses. No other file of the room reaches for one.

"It has it since" was read from the sources, and both ends of the ranges in ``pyproject.toml`` were tried.

| name | what for | it has it since | where it is missing |
|---|---|---|---|
| ``Trainer._clip_grad_norm`` of Transformers | overridden: this peer's gradients are measured, not clipped | 5.3 | they are clipped, too, and a test fails |
| ``Trainer._load_best_model`` of Transformers | overridden: the run is left before | 5.0 or before | the run is left after, and a test fails |
| ``Trainer._load_optimizer_and_scheduler`` of Transformers | overridden: checkpoints without the run's state | 5.3 | those begin at epoch 0, or raise, and a test fails |
| ``Trainer._save_optimizer_and_scheduler`` of Transformers | overridden: all ranks of a cluster give the state at once | 5.3 | with strands, or with steps in the background, rank 0 waits for ever when it saves |
| ``Trainer._tr_loss`` of Transformers | the sum of losses that is logged | 5.3 | AttributeError at the end of the first epoch |
| ``Trainer._accelerator_connector._parallel_devices`` and ``._num_nodes_flag`` of Lightning | how many devices were asked for | 2.4 or before | AttributeError when training begins |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

from typing import Any


def add_loss(trainer: Any, loss: Any) -> None:
    """Add to the sum that Transformers' Trainer divides by the number of its steps when it logs (`_tr_loss`)."""
    trainer._tr_loss += loss


def devices_of(trainer: Any) -> int:
    """The number of devices that a Lightning Trainer was asked to use, on all machines. `Trainer.num_nodes` is 1 for
    whatever strategy has one device."""
    asked = trainer._accelerator_connector
    return int(max(len(asked._parallel_devices), 1) * asked._num_nodes_flag)
