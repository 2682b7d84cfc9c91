"""The options of DiLoCo: many inner steps on each peer, then one step of an outer optimizer for all peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shoal.averaging.options import term_of
from shoal.optim.plain import plain_or
from shoal.outer import Nesterov, OuterRule

COUNT = "a whole number, at least 1"


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Train as DiLoCo does: many inner steps on each peer, then one outer step for all peers.

    Every `Optimizer.step` steps the *inner* optimizer on the model. The *anchor* is the state that all peers have in
    common, and a peer's *drift* is the anchor minus its model. When the epoch ends, the peers average their drifts, and
    the *outer* optimizer steps the anchor with the average as its gradient. The model continues from the new anchor.

    Give it as `Optimizer(outer=…)`, with either `inner_steps` here or `target_batch_size` there.

    Source: Douillard et al. 2023, arXiv 2311.08105.

    Args:
        inner_steps: the number of inner steps after which the epoch ends: so many for each peer, on average. A peer
            that has made its own steps waits for the others, at most for `matchmaking_time`, and then continues. If
            None, the epoch ends when all peers together have `target_batch_size` samples. Then no peer waits, and fast
            peers bring more samples.
        optimizer: the outer optimizer: one of `shoal.outer`, or a function that makes a torch optimizer from
            parameters. By default `shoal.outer.Nesterov()`. With an optimizer of `shoal.outer`, the anchors are
            bit-identical on unlike machines. With one of torch, like machines compare their anchors, and unlike
            machines average theirs where they differ.
        fragments: the number of parts into which the model is divided. Each epoch averages one of them, in turn, so the
            largest round is smaller by this factor. Each part is averaged every `inner_steps` inner steps, so an epoch
            has `inner_steps / fragments` of them, which must be a whole number. The parameters of a layer stay
            together, and layers are dealt to the parts in turn. Instead of a number, you may give a list of lists of
            parameters that has every trained parameter once. Source: Streaming DiLoCo, arXiv 2501.18512.
        overlap: how inner steps hide the time of the round. None: `step` waits for the round. "free": the first `step`
            that finds the average applies it. A number: the average is applied after exactly this many more inner
            steps, and `step` waits if it is not there by then; needs `inner_steps`, and must be less than the inner
            steps of an epoch.
        mix: how the new anchor gets into a model that has changed since its drift was taken. A number is the model's
            share of the mixture: with 0.0 the model becomes the anchor, with 1.0 it stays as it is. "keep": the model
            becomes the anchor plus its changes since the drift was taken.

    Raises:
        ValueError: if an argument makes no sense, alone or together with another.
    """

    inner_steps: int | None = None
    optimizer: OuterRule | Callable[[Any], torch.optim.Optimizer] = field(default_factory=Nesterov)
    fragments: int | Sequence[Sequence[torch.Tensor]] = 1
    overlap: Literal["free"] | int | None = None
    mix: Literal["keep"] | float = 0.0

    def __post_init__(self) -> None:
        for name in ("inner_steps", "fragments", "overlap", "mix"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):  # of parameters
                object.__setattr__(self, name, plain_or(value, otherwise=value))
        if self.inner_steps is not None and not _is_count(self.inner_steps, 1):
            raise _wrong("inner_steps", self.inner_steps, f"{COUNT}, or leave it out and give target_batch_size")
        if isinstance(self.optimizer, torch.optim.Optimizer) or not callable(self.optimizer):
            raise _wrong("optimizer", self.optimizer, "shoal.outer.Nesterov(…), or a function params -> optimizer")
        is_number = isinstance(self.fragments, int)
        is_list = isinstance(self.fragments, list | tuple) and len(self.fragments) > 0
        if not (_is_count(self.fragments, 1) if is_number else is_list):
            raise _wrong("fragments", self.fragments, f"{COUNT}, or a list of lists of parameters")
        count = self.num_fragments
        if self.inner_steps is not None and self.inner_steps % count:
            raise ValueError(
                f"DiLoCo(inner_steps={self.inner_steps}, fragments={count}): a fragment is averaged every inner_steps/"
                "fragments inner steps, which is not whole here: choose a multiple"
            )
        if self.overlap not in (None, "free") and not _is_count(self.overlap, 0):
            raise _wrong("overlap", self.overlap, 'None, "free" or a number of inner steps, at least 0')
        if isinstance(self.overlap, int):
            if self.inner_steps is None:
                raise ValueError(
                    f"DiLoCo(overlap={self.overlap}) counts inner steps, and the epoch ends at target_batch_size "
                    'samples: give inner_steps in its place, or overlap="free"'
                )
            if self.overlap >= self.inner_steps // count:
                raise ValueError(
                    f"DiLoCo(overlap={self.overlap}): an epoch has {self.inner_steps // count} inner steps, and the "
                    "average is to be applied before the next one ends: choose less"
                )
        is_share = isinstance(self.mix, int | float) and not isinstance(self.mix, bool) and 0 <= self.mix <= 1
        if not is_share and self.mix != "keep":
            raise _wrong("mix", self.mix, 'a number from 0.0 to 1.0, or "keep"')

    @property
    def num_fragments(self) -> int:
        """The number of parts into which the model is divided."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def steps_per_epoch(self) -> int | None:
        """The inner steps of an epoch; None where samples are counted."""
        return None if self.inner_steps is None else self.inner_steps // self.num_fragments

    @property
    def delay(self) -> int:
        """The number of inner steps between taking the drift and applying the average; 0 if `overlap` is no number."""
        return self.overlap if isinstance(self.overlap, int) else 0

    @property
    def is_in_background(self) -> bool:
        """Whether the trainer continues during a round."""
        return self.overlap == "free" or self.delay > 0

    def steps_before(self, epoch: int) -> int:
        """The number of inner steps that a peer has made when `epoch` begins, if inner steps are counted."""
        return max(0, epoch * (self.steps_per_epoch or 0) - self.delay) if epoch else 0

    def term(self) -> str:
        """The options that must be equal in a run, as text."""
        parts = [f"inner_steps={self.inner_steps}", f"fragments={self.num_fragments}"]
        return term_of(f"DiLoCo({', '.join([*parts, f'overlap={self.overlap}', f'mix={self.mix}'])})")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"DiLoCo({name}={value!r}): give {wanted}")
