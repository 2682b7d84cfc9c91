"""What users choose of DiLoCo: many inner steps on each peer, then one step of an outer optimizer for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shoal.averaging.options import term_of
from shoal.outer import Nesterov, OuterRule

COUNT = "a whole number, at least 1"


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Train as DiLoCo does (Douillard et al. 2023, arXiv 2311.08105): every `Optimizer.step` steps the *inner*
    optimizer on the model. When the epoch ends, the peers average how far their models have *drifted* from the
    *anchor*, the state that they have in common, and the *outer* optimizer steps the anchor with that average. The
    model goes on from there.

    Give it as `Optimizer(outer=…)`, with either `inner_steps` here or `target_batch_size` there.

    Args:
        inner_steps: the epoch ends when the peers have made so many inner steps each, on average. A peer that has made
            its own waits for the others, at most for `matchmaking_time`, and goes on then. None: it ends at
            `target_batch_size` samples of all peers, and nobody waits: fast peers bring more.
        optimizer: of the anchor: one of `shoal.outer`, or a function that makes a torch optimizer from parameters.
            With those of `shoal.outer`, the anchors of unlike machines are bit-identical; torch's own are compared
            among machines of one kind only, and averaged where they differ.
        fragments: average the model in so many parts, one in each epoch, in turn (Streaming DiLoCo, arXiv 2501.18512):
            the largest round is smaller by that factor. Each part is averaged every `inner_steps` inner steps, so an
            epoch has `inner_steps / fragments`, which must be whole. Parameters of one layer stay together, and layers
            are dealt in turn. Or a list of lists of parameters, which has every trained parameter once.
        overlap: how the round is hidden behind inner steps. None: `step` waits for it. "free": the average is applied
            by the first `step` that finds it there. A number: it is applied after exactly so many inner steps more, for
            which `step` waits if need be; less than an epoch has.
        mix: how the result gets into the model, which has changed since its drift was taken: the share of the model as
            it is, in 0.0 (it becomes the anchor) to 1.0 (it stays); or "keep": the anchor plus what has changed in the
            model since.

    Raises:
        ValueError: for what makes no sense.
    """

    inner_steps: int | None = None
    optimizer: OuterRule | Callable[[Any], torch.optim.Optimizer] = field(default_factory=Nesterov)
    fragments: int | Sequence[Sequence[torch.Tensor]] = 1
    overlap: Literal["free"] | int | None = None
    mix: Literal["keep"] | float = 0.0

    def __post_init__(self) -> None:
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
        """In how many parts the model is averaged."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def steps_per_epoch(self) -> int | None:
        """The inner steps of an epoch; None where samples are counted."""
        return None if self.inner_steps is None else self.inner_steps // self.num_fragments

    @property
    def delay(self) -> int:
        """The inner steps between taking the drift and applying the average, where that is a number."""
        return self.overlap if isinstance(self.overlap, int) else 0

    @property
    def is_in_background(self) -> bool:
        """Whether the trainer goes on during a round."""
        return self.overlap == "free" or self.delay > 0

    def steps_before(self, epoch: int) -> int:
        """The inner steps that a peer has made when that epoch begins, where they are counted."""
        return max(0, epoch * (self.steps_per_epoch or 0) - self.delay) if epoch else 0

    def term(self) -> str:
        """What must be equal in a run, as text."""
        parts = [f"inner_steps={self.inner_steps}", f"fragments={self.num_fragments}"]
        return term_of(f"DiLoCo({', '.join([*parts, f'overlap={self.overlap}', f'mix={self.mix}'])})")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"DiLoCo({name}={value!r}): give {wanted}")
