"""Training with uneven inputs: ranks that have run out of inputs go on to take part in the collectives of the others.

`Joinable` and `JoinHook` are torch's own classes. So code written for torch's `Join`, such as torch's
`DistributedDataParallel` and `ZeroRedundancyOptimizer`, works with this one, and the other way round. The
`_join_config` that `Join` sets is the one that torch's code reads. Only `Join` itself is Shoal's.

A rank that is still training is *live*. A rank that has left the ``with`` block has *joined*. Joined ranks learn in one
of two ways what the live ranks do next:

* By messages. Each message is an all-reduce of one number, to which joined ranks add zero. At the start of an iteration
each live rank adds one (the heartbeat, torch's protocol: `Join.notify_join_context`). Before an optimizer's step it
adds a negative number that says which optimizer steps (`announcement`). So a joined rank steps when the others step,
and not while they accumulate gradients. A sum of zero means that all ranks have joined.
* Without messages, if every joinable counts the live ranks in messages that it sends anyway (`CountingJoinHook`).
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
    """A hook that learns from its own communication how many ranks are live, so that `Join` needs no messages.

    In a message that travels with the gradients anyway, every live rank adds one and every joined rank adds zero. So
    every rank learns the number of live ranks in every iteration.
    """

    @abstractmethod
    def shadow(self) -> int:
        """Takes part in one iteration of the live ranks and adds nothing. Returns how many ranks were live.

        If the number is zero, no rank trains any more. All ranks get zero in the same call, and the call must have
        changed nothing. With ``throw_on_early_termination`` the hook must return as soon as it has counted, because the
        live ranks then raise (see `raise_if_joined`) and go no further.
        """

    def main_hook(self) -> None:
        """One iteration, for a `Join` in which other joinables need messages."""
        self.shadow()


class LendingJoinHook(JoinHook):
    """A hook that gets the options and gradients of the live ranks by messages of its own."""


class _Config(JoinConfig):
    """The settings that torch's code reads, and further ones for Shoal's code.

    Attributes:
        models: the models to tell of this joinable's heartbeats.
        all_live: returns whether no rank had joined at this joinable's last announcement.
    """

    models: Sequence[DistributedDataParallel] = ()
    all_live: Callable[[], bool] | None = None


def all_live_of(joinable: Joinable) -> Callable[[], bool] | None:
    """A function that returns whether no rank had joined at this optimizer's last announcement; None if it announces
    nothing.
    """
    found: Callable[[], bool] | None = getattr(join_config_of(joinable), "all_live", None)
    return found


def raise_if_joined(joinable: Joinable, live: int, ranks: int) -> None:
    """Raises on a live rank if a rank has joined, as torch's heartbeat would. For joinables that count without
    messages.

    Args:
        joinable: the joinable that has counted, in a `Join` or not.
        live: number of ranks that had inputs of their own in this iteration.
        ranks: size of the process group.

    Raises:
        RuntimeError: if the joinable is in a `Join` with ``throw_on_early_termination``, and a rank has run out of
            inputs.
    """
    config = join_config_of(joinable)
    if config.enable and config.throw_on_early_termination and live < ranks:
        raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")


def announcement(order: int, ranks: int) -> float:
    """The number that each live rank adds to the message which says that optimizer number ``order`` (0, 1, …) steps."""
    return -(1.0 + order * (ranks + 1))


def read_announcement(message: float, ranks: int) -> tuple[int, int]:
    """The number of the optimizer that steps and the number of live ranks, from the sum of announcements."""
    total = round(-message)
    live = total % (ranks + 1)  # at most `ranks`; the rest of the sum is a multiple of ranks + 1
    return total // (live * (ranks + 1)), live


class Join:
    """Trains with uneven inputs: ranks may have unequal numbers of inputs, or none. A drop-in for torch's `Join`.

    ::

        with shoal.Join([model, optimizer]):
            for batch in batches:  # as many as this rank has
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

    A rank that leaves the block shadows the collectives of the other ranks, by the main hooks of the joinables, until
    all ranks have left. Then each post hook runs. An exception in the block goes to the caller at once, and no hook
    runs.

    Beyond torch's `Join`:

    * Joined ranks shadow an optimizer (Shoal's `ZeroRedundancyOptimizer` or torch's) exactly when the live ranks step
    it. So nothing hangs if a script accumulates gradients with `no_sync` or skips steps, or has the optimizers at any
    place of the list.
    * A joined rank steps its shard with the options and gradients of the live ranks, clipped if theirs are. (In torch's
    `Join` it steps with its own last gradients again and again.)
    * After the block the joinables are as before: they send no messages of `Join`, and gradients are divided by the
    number of all ranks again. Sharded optimizers have, on every rank, the options of a rank that joined last, wherever
    schedulers have left those of the others.
    * Schedulers and gradient scalers in the list take, on every rank, the counts of a rank that joined last. The
    schedulers' optimizers take its options. Without this, schedulers and scalers that are stepped for every batch would
    stay behind on ranks with fewer inputs.
    * There are no messages if all joinables are Shoal's and use Shoal's own gradient reduction (`CountingJoinHook`).

    Args:
        joinables: all objects that make collectives in an iteration (models, sharded optimizers), in the order of their
            collectives. The hooks run in this order. Schedulers and a `GradScaler` may be at any place.
        enable: False switches `Join` off, for inputs known to be even. Default: True.
        throw_on_early_termination: when the first rank has run out of inputs, raise on every rank in the same
            iteration, instead of shadowing. For models with collectives of their own, such as SyncBatchNorm. Default:
            False.
        kwargs: passed to every joinable's `join_hook`. `DistributedDataParallel` and Shoal's `ZeroRedundancyOptimizer`
            take ``divide_by_initial_world_size``. If True (the default), gradients are divided by the number of all
            ranks; if False, by the number of live ranks.

    Raises:
        TypeError: if an object in the list is no joinable, no scheduler and no `GradScaler`.
        ValueError: if there are no joinables, or if they are of different process groups. On leaving the block: if the
            state of a scheduler holds more or fewer numbers on one rank than on another.
        RuntimeError: with ``throw_on_early_termination``, in the block or on leaving it, if a rank has run out of
            inputs before another.
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
        # Optimizers announce their steps, if their hooks shadow steps. All other joinables follow the heartbeat.
        optimizers = [
            n for n, joinable in enumerate(self._joinables) if isinstance(joinable, Optimizer) and not counting[n]
        ]
        self._announced = [n for n in optimizers if type(self._hooks[n]).main_hook is not JoinHook.main_hook]
        self._heard = [n for n in range(len(self._joinables)) if n not in optimizers]
        self._models = [joinable for joinable in joinables if isinstance(joinable, DistributedDataParallel)]
        # Shoal's own optimizers lend options and gradients by themselves, in torch's Join too.
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
        """Tells the joined ranks that this rank begins an iteration. A joinable calls this before its first collective.

        Only one of the joinables of a `Join` sends a message. This is torch's own method, and works in torch's `Join`
        too.

        Args:
            joinable: the joinable that begins an iteration; it need not be in a `Join`.

        Returns:
            The handle of the heartbeat, an asynchronous all-reduce whose result is the number of live ranks. None if
            this joinable sends none.

        Raises:
            RuntimeError: with ``throw_on_early_termination``, if a rank has run out of inputs.
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
        """Makes `Join`, and not `model` itself, send the model's heartbeats, so that every model learns the number of
        live ranks.
        """
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
            # The closure runs the model, whose heartbeat and gradients come before the announcement.
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
        """Whether no rank had joined when the last step was announced."""
        assert self._announcement is not None
        message, work = self._announcement
        work.wait()
        return read_announcement(message.item(), self._ranks)[1] == self._ranks

    # --- a rank that has joined --------------------------------------------------------------------

    def _follow_messages(self) -> bool:
        """Shadows what live ranks announce until none is live. Returns whether this rank was among the last to join."""
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
        """Shadows until a hook counts no live ranks. Returns whether this rank was among the last to join."""
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
