"""All states that the trainers of a simulated run have made, and what must be true of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.tip import Tip

if TYPE_CHECKING:
    from tests.simulation.trainers import Trainer

Batch = tuple[str, int]  # the process that made it, and the how-many-eth it was


@dataclass(frozen=True, slots=True)
class Made:
    """How a state was made.

    Attributes:
        parent: from which state.
        samples: that were added, as whoever made it says.
        begin: the round; None: one trainer made it alone.
        alone: that trainer's batch.
    """

    parent: Tip
    samples: float
    begin: Begin | None = None
    alone: Batch | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Two or more states were made from one.

    Attributes:
        parent: that one.
        sides: the names of the trainers that were at each of the others.
    """

    parent: Tip
    sides: dict[Tip, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Left:
    """A trainer has left its state for one that does not follow from it: what it had added is gone.

    Attributes:
        said: whether it says so.
    """

    trainer: str
    at: float
    before: Tip
    after: Tip
    said: bool


@dataclass
class History:
    """The states of a run, by name.

    Attributes:
        genesis: the first.
        states: the content.
        made: how each was made.
        stood: who has been at each.
        left: who has left states, in the order of time.
        violations: what must not be, in words.
        unbelieved: processes that may bring another number of samples than they say.
    """

    genesis: Tip
    states: dict[Tip, torch.Tensor] = field(default_factory=dict)
    made: dict[Tip, Made] = field(default_factory=dict)
    stood: dict[Tip, dict[str, None]] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    unbelieved: set[str] = field(default_factory=set)
    sides: dict[Tip, dict[str, None]] = field(default_factory=dict)  # states of other sides, by who tells of them
    _digests: dict[Tip, bytes] = field(default_factory=dict)
    # By round and member. Not by the name of the round: a coordinator that was started anew may give it to another one.
    _batches: dict[tuple[Begin, bytes], tuple[Batch, float]] = field(default_factory=dict)
    _at: dict[str, Tip] = field(default_factory=dict)

    # -- what the trainers tell

    def contributes(self, trainer: Trainer, begin: Begin, samples: float) -> None:
        """A trainer has brought its batch to a round."""
        if trainer.process in self.unbelieved:
            return
        self._batches.setdefault((begin, trainer.peer.key), (trainer.batch, samples))

    def committed(self, outcome: Outcome) -> None:
        """A round is committed."""
        begin, commit = outcome.begin, outcome.commit
        if begin.tip != commit.tip:
            self.violations.append(f"a round of epoch {begin.tip.epoch} was committed at another state")
        self._make(commit.next_tip, Made(commit.tip, commit.samples, begin))

    def made_alone(self, trainer: Trainer, before: Tip, after: Tip, samples: float) -> None:
        """A trainer has made an epoch alone."""
        self._make(after, Made(before, samples, alone=trainer.batch))

    def _make(self, tip: Tip, made: Made) -> None:
        known = self.made.setdefault(tip, made)
        if known != made:
            self.violations.append(f"epoch {tip.epoch} {tip.lineage.hex()[:6]} was made in two ways: {known}, {made}")

    def is_at(self, trainer: Trainer, now: float) -> None:
        """A trainer holds its state: there are never two states under one name."""
        tip, name = trainer.tip, trainer.process
        digest = blake3(trainer.state.view(torch.uint8).numpy()).digest()
        if self._digests.setdefault(tip, digest) != digest:
            self.violations.append(f"{name} has another state of epoch {tip.epoch} {tip.lineage.hex()[:6]} than others")
        if tip not in self.states:
            self.states[tip] = trainer.state.clone()
        self.stood.setdefault(tip, {})[name] = None
        before = self._at.get(name)
        self._at[name] = tip
        if tip != self.genesis and tip not in self.made:
            self.violations.append(f"{name} is at epoch {tip.epoch} {tip.lineage.hex()[:6]}, which nobody has made")
        elif before is not None and before != tip and not self.follows(tip, before):
            self.left.append(Left(name, now, before, tip, said=(before, tip) in trainer.left))

    def told(self, trainer: Trainer, tip: Tip) -> None:
        """A trainer says that the run has forked: somebody is at that state, and it stays at its own. (A liar may be
        the only one whom the other side reaches; where it does not lie, it does what all do.)"""
        self.sides.setdefault(tip, {})[trainer.process] = None

    # -- what follows

    def line(self, tip: Tip) -> Iterator[Tip]:
        """A state, the one that it was made from, and so on, without the first of all."""
        while tip in self.made:
            yield tip
            tip = self.made[tip].parent

    def follows(self, tip: Tip, before: Tip) -> bool:
        """Whether a state was made from that other one, directly or not."""
        return before == self.genesis or any(parent == before for parent in self.line(tip))

    def forks(self) -> list[Fork]:
        """Where the run has divided."""
        children: defaultdict[Tip, list[Tip]] = defaultdict(list)
        for tip, made in self.made.items():
            children[made.parent].append(tip)
        return [
            Fork(parent, {tip: tuple(self.stood.get(tip, ())) for tip in tips})
            for parent, tips in children.items()
            if len(tips) > 1
        ]

    def check(self) -> list[str]:
        """All that must not be, and was found."""
        found = list(self.violations)
        parents = {made.parent for made in self.made.values()}
        for tip, made in self.made.items():
            found += self._miscounted(tip, made)
        for head in (tip for tip in self.made if tip not in parents):
            found += self._twice(head)
        for left in self.left:
            found += self._untold(left)
        return found

    def batches(self, made: Made) -> list[Batch]:
        """The batches that went into a state."""
        if made.begin is None:
            return [made.alone] if made.alone is not None else []
        entries = (self._batches.get((made.begin, member.key)) for member in made.begin.members)
        return [entry[0] for entry in entries if entry is not None]

    def _miscounted(self, tip: Tip, made: Made) -> Iterator[str]:
        name = f"epoch {tip.epoch} {tip.lineage.hex()[:6]}"
        if tip.epoch != made.parent.epoch + 1 or tip.samples != made.parent.samples + made.samples:
            yield f"{name}: {tip.samples:g} samples, made from {made.parent.samples:g} and {made.samples:g}"
        if made.begin is None:
            return
        if abs(sum(made.begin.weights) - made.samples) > 1e-9 * made.samples:
            yield f"{name}: {made.samples:g} samples, and its members brought {sum(made.begin.weights):g}"
        for member, weight in zip(made.begin.members, made.begin.weights, strict=True):
            brought = self._batches.get((made.begin, member.key))
            if brought is not None and brought[1] != weight:
                yield f"{name}: {brought[0]} brought {brought[1]:g} samples, counted as {weight:g}"

    def _untold(self, left: Left) -> Iterator[str]:
        """What was left must be told of by who has left it, and by one of those who stay."""
        if left.trainer in self.unbelieved:
            return
        text = f"at {left.at:.1f} {left.trainer} left epoch {left.before.epoch} {left.before.lineage.hex()[:6]}"
        if not left.said:
            yield f"{text}, and says nothing of it"
        line = set(self.line(left.after))
        if not any(tip in self.sides for tip in self.line(left.before) if tip not in line):
            yield f"{text}, and nobody tells of it who stays"

    def _twice(self, head: Tip) -> Iterator[str]:
        seen: dict[Batch, Tip] = {}
        for tip in self.line(head):
            for batch in self.batches(self.made[tip]):
                if batch in seen:
                    yield f"batch {batch} counts in epoch {tip.epoch} and in epoch {seen[batch].epoch} of one line"
                seen[batch] = tip
