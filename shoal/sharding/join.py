"""Ranks that have run out of inputs keep the others company, so that nobody waits for them for ever.

`Joinable` and `JoinHook` are torch's own classes: whatever is written for torch's `Join` (torch's
`DistributedDataParallel` and `ZeroRedundancyOptimizer` among it) is for this one and the other way round, and the
`_join_config` that `Join` sets is what torch's code reads. Only `Join` itself is Shoal's.

A rank that is still training is *live*; one that has left the ``with`` block has *joined*. How the joined know what the
live do next:

* By messages, each an all-reduce of one number to which the joined add zero. Each live rank adds one at the start of an
  iteration (the heartbeat, torch's protocol: `Join.notify_join_context`), and a negative number, which says which,
  before an optimizer's step (`announcement`). So a joined rank steps when the others step, and not while they
  accumulate gradients. A sum of zero says that all have joined.
* Without messages, when all that is joined counts the live ranks in what it sends anyway (`CountingJoinHook`).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable as Joinable
from torch.distributed.algorithms.join import JoinHook as JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.sharding._torch import JoinConfig, join_config_of, set_join_config
from shoal.sharding.join_ddp import divide_by_all_ranks, divide_by_live
from shoal.sharding.join_optimizer import Companion
from shoal.sharding.join_state import Stepped, hand_over

PATIENCE = 1000
"""Iterations that a joined rank shadows before it warns."""


class CountingJoinHook(JoinHook, ABC):
    """A hook whose own communication tells how many ranks are live, so that `Join` needs no messages.

    Every live rank counts for one in what travels with its gradients anyway, a joined rank for zero, and every rank
    learns the sum in every iteration.
    """

    @abstractmethod
    def shadow(self) -> int:
        """Take part in one iteration of the live ranks, with nothing to add. Returns how many of them there were.

        At zero nobody trains any more: every rank gets zero in the same call, and nothing may have changed. With
        ``throw_on_early_termination`` it must return as soon as it has counted, because there the live ranks raise (see
        `raise_if_joined`) and go no further.
        """

    def main_hook(self) -> None:
        """One iteration, when other joinables of the `Join` need messages."""
        self.shadow()


class LendingJoinHook(JoinHook):
    """A hook that gets, by its own messages, what the live ranks step with."""


class _Config(JoinConfig):
    """What torch's code reads, and what Shoal's may ask for.

    Attributes:
        models: those that are to be told of this joinable's heartbeats.
        all_live: whether nobody had joined at the step that this joinable has announced last.
    """

    models: Sequence[DistributedDataParallel] = ()
    all_live: Callable[[], bool] | None = None


def all_live_of(joinable: Joinable) -> Callable[[], bool] | None:
    """What says whether anybody had joined at the last announcement of this optimizer; None if it announces nothing."""
    found: Callable[[], bool] | None = getattr(join_config_of(joinable), "all_live", None)
    return found


def raise_if_joined(joinable: Joinable, live: int, ranks: int) -> None:
    """Where a live rank that counted without messages raises, as torch's heartbeat would.

    Args:
        joinable: what counted; in a `Join` or not.
        live: ranks that had inputs of their own in this iteration.
        ranks: size of the process group.

    Raises:
        RuntimeError: it is in a `Join` with ``throw_on_early_termination``, and a rank has run out.
    """
    config = join_config_of(joinable)
    if config.enable and config.throw_on_early_termination and live < ranks:
        raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")


def announcement(order: int, ranks: int) -> float:
    """What each live rank adds to the message that says that the optimizer of this order (0, 1, …) steps."""
    return -(1.0 + order * (ranks + 1))


def read_announcement(message: float, ranks: int) -> tuple[int, int]:
    """From the sum of announcements: the optimizer's order, and how many ranks are live."""
    total = round(-message)
    live = total % (ranks + 1)  # at most `ranks`; the rest of the sum is a multiple of ranks + 1
    return total // (live * (ranks + 1)), live


class Join:
    """Train although ranks have unequal numbers of inputs, or none: a drop-in for torch's `Join`.

    ::

        with shoal.Join([model, optimizer]):
            for batch in batches:  # as many as this rank has
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

    A rank that leaves the block shadows the collectives of the others with the main hooks of the joinables until all
    have left; then each post hook runs. An exception in the block goes to the caller at once, and no hook runs.

    Beyond torch's:

    * Joinables that are optimizers (Shoal's `ZeroRedundancyOptimizer`, torch's) are shadowed when the others step them:
      gradient accumulation with `no_sync`, steps left out, and optimizers in any place of the list do not hang.
    * A joined rank steps its shard with the options and the gradients with which the live ranks step theirs, clipped if
      they are. (In torch's `Join` it steps with its own last gradients again and again.)
    * After the block joinables are as before: no messages, and the mean is over all ranks again. The options of sharded
      optimizers are those of a rank that joined last, wherever schedulers have left the others.
    * Schedulers and gradient scalers in the list take their counts from a rank that joined last, and the schedulers'
      optimizers its options: what is stepped for every batch would stay behind.
    * When all joinables are Shoal's with Shoal's own gradient reduction, there are no messages (`CountingJoinHook`).

    Args:
        joinables: all that makes collectives in an iteration, in the order in which they do. Hooks run in this order.
            And schedulers and a `GradScaler`, in any place.
        enable: False turns it off, for inputs known to be even.
        throw_on_early_termination: when the first rank has run out, raise on every rank, in the same iteration, instead
            of shadowing; for models with collectives of their own, such as SyncBatchNorm.
        kwargs: passed to every joinable's `join_hook`. `DistributedDataParallel` and Shoal's `ZeroRedundancyOptimizer`
            take ``divide_by_initial_world_size`` (default True: gradients are divided by the number of ranks; False: by
            the number of live ones).

    Raises:
        TypeError: something in the list is no joinable, no scheduler and no `GradScaler`.
        ValueError: no joinables, or joinables of different process groups; on leaving the block, if the state of a
            scheduler has not as many numbers on all ranks.
        RuntimeError: in the block or on leaving it, with ``throw_on_early_termination``.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable | Stepped],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._stepped = [each for each in joinables if isinstance(each, Stepped)]
        self._joinables = [each for each in joinables if not isinstance(each, Stepped)]
        if not self._joinables:
            raise ValueError(
                "Join got no joinables; pass all that makes collectives in an iteration, as the model does"
            )
        for each in self._joinables:
            if not hasattr(each, "join_hook"):
                raise TypeError(
                    f"Join got {type(each).__name__}, which is no Joinable: pass what makes collectives (the model, "
                    "sharded optimizers), and schedulers and a GradScaler that are stepped for every batch"
                )
        groups = [joinable.join_process_group or dist.group.WORLD for joinable in self._joinables]
        if any(group != groups[0] for group in groups):
            raise ValueError("Join got joinables of different process groups; use one Join for each group")
        self._enable = enable
        self._throw = throw_on_early_termination
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._group, self._device = groups[0], self._joinables[0].join_device
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)

        counting = [isinstance(hook, CountingJoinHook) for hook in self._hooks]
        self._needs_messages = not all(counting)
        # Optimizers announce their steps, if these are to be shadowed; to all others the heartbeat speaks.
        optimizers = [
            n for n, joinable in enumerate(self._joinables) if isinstance(joinable, Optimizer) and not counting[n]
        ]
        self._announced = [n for n in optimizers if type(self._hooks[n]).main_hook is not JoinHook.main_hook]
        self._heard = [n for n in range(len(self._joinables)) if n not in optimizers]
        self._models = [joinable for joinable in joinables if isinstance(joinable, DistributedDataParallel)]
        # Shoal's own optimizers lend by themselves, in torch's Join too.
        self._companions = {
            n: Companion(optimizer, self._group, self._device)
            for n in self._announced
            if not isinstance(self._hooks[n], LendingJoinHook)
            and isinstance(optimizer := self._joinables[n], Optimizer)
        }
        self._announcement: tuple[torch.Tensor, dist.Work] | None = None
        self._announcing, self._as_before = ExitStack(), ExitStack()

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Tell the joined ranks that this rank begins an iteration; a joinable calls it before its first collective.

        Of all joinables of a `Join` only one sends something. It is torch's own, and works in torch's `Join` too.

        Returns:
            The handle of the heartbeat, an asynchronous all-reduce whose result is the number of live ranks; None if
            this joinable sends none.

        Raises:
            RuntimeError: a rank has run out, with ``throw_on_early_termination``.
        """
        work: dist.Work | None = TorchJoin.notify_join_context(joinable)
        for model in getattr(join_config_of(joinable), "models", ()):
            divide_by_live(model, work)
        return work

    def __enter__(self) -> Self:
        leader = self._heard[0] if self._needs_messages and self._heard else None
        configs: dict[int, _Config] = {}
        for n, joinable in enumerate(self._joinables):
            self._as_before.callback(set_join_config, joinable, join_config_of(joinable))
            configs[n] = _Config(self._enable, self._throw, is_first_joinable=n == leader)
            if n == leader:
                configs[n].models = self._models
            set_join_config(joinable, configs[n])
        if self._enable:
            if leader is not None and isinstance(self._joinables[leader], DistributedDataParallel):
                self._announcing.callback(self._lead(self._joinables[leader]).remove)
            for order, n in enumerate(self._announced):
                optimizer: Any = self._joinables[n]
                configs[n].all_live = self._all_live
                handle = optimizer.register_step_pre_hook(partial(self._before_step, order))
                self._announcing.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._as_before:
            self._announcing.close()
            if not self._enable or error is not None:
                return
            is_last = self._follow_messages() if self._needs_messages else self._follow_counts()
            for hook in self._hooks:
                hook.post_hook(is_last)
            if self._stepped:
                hand_over(self._stepped, self._group, self._device, was_last=is_last)

    def _lead(self, model: Any) -> RemovableHandle:
        """Lets Join, and not `model` itself, send its heartbeats: so every model is told how many ranks are live."""
        config = join_config_of(model)
        set_join_config(model, _Config(config.enable, config.throw_on_early_termination, is_first_joinable=False))
        heart: Any = SimpleNamespace(join_device=self._device, join_process_group=self._group)
        set_join_config(heart, config)

        def beat(*_: Any) -> None:
            Join.notify_join_context(heart)

        handle: RemovableHandle = model.register_forward_pre_hook(beat, prepend=True)
        return handle

    # --- a live rank -------------------------------------------------------------------------------

    def _before_step(self, order: int, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Announce a step, just before its collectives."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._announce(order)
            return None

        def evaluate() -> Any:
            # It runs the model, whose heartbeat and gradients come first.
            loss = closure()
            self._announce(order)
            return loss

        return args[:1], {**kwargs, "closure": evaluate}

    def _announce(self, order: int) -> None:
        message = torch.full((1,), announcement(order, self._ranks), device=self._device)
        self._announcement = message, dist.all_reduce(message, group=self._group, async_op=True)
        companion = self._companions.get(self._announced[order])
        if (self._throw or companion is not None) and not self._all_live():
            if companion is not None and not self._throw:
                companion.share_step(live=True)
            else:
                raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")

    def _all_live(self) -> bool:
        """Whether nobody had joined when the last step was announced."""
        assert self._announcement is not None
        message, work = self._announcement
        work.wait()
        return read_announcement(message.item(), self._ranks)[1] == self._ranks

    # --- a rank that has joined --------------------------------------------------------------------

    def _follow_messages(self) -> bool:
        """Shadow what is announced until nobody is live. Returns whether this rank was among the last to join."""
        heartbeats = messages = 0
        while True:
            message = torch.zeros(1, device=self._device)
            work = dist.all_reduce(message, group=self._group, async_op=True)
            work.wait()
            heard = message.item()
            if heard == 0:
                break
            messages += 1
            if self._throw:
                if heard > 0:  # the second all-reduce of torch's heartbeat
                    dist.all_reduce(torch.ones(1, device=self._device), group=self._group)
                raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")
            if heard > 0:
                for n in self._heard:
                    self._hooks[n].main_hook()
                heartbeats += 1
                self._warn(heartbeats)
            else:
                order, _ = read_announcement(heard, self._ranks)
                number = self._announced[order]
                if number in self._companions:
                    self._companions[number].share_step(live=False)
                self._hooks[number].main_hook()
        for model in self._models:
            divide_by_all_ranks(model, work)
        for companion in self._companions.values():
            companion.share_options(was_last=messages == 0)
        return messages == 0

    def _follow_counts(self) -> bool:
        """Shadow until a hook has counted no live ranks. Returns whether this rank was among the last to join."""
        shadowed = 0
        for hook in cycle(self._hooks):
            assert isinstance(hook, CountingJoinHook)
            if hook.shadow() == 0:
                break
            if self._throw:
                raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")
            shadowed += 1
            self._warn(shadowed / len(self._hooks))
        return shadowed == 0

    def _warn(self, iterations: float) -> None:
        if iterations == PATIENCE:
            warnings.warn(
                f"rank {self._rank} has at least {PATIENCE} inputs fewer than others, and waits for them in Join; "
                "divide the inputs more evenly",
                stacklevel=4,
            )
