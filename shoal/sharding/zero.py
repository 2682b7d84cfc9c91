"""`ZeroRedundancyOptimizer`: each rank keeps the optimizer's state of its share, and all get the parameters back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from shoal.sharding import consolidation
from shoal.sharding.arguments import Partition, checked, checked_class, may_cut
from shoal.sharding.communication import Communication
from shoal.sharding.cut import is_cut, of_share
from shoal.sharding.element_wise import is_element_wise
from shoal.sharding.failures import Failures
from shoal.sharding.gradient_source import GradientSource
from shoal.sharding.join import Join, JoinHook
from shoal.sharding.module_buffers import ModuleBuffers
from shoal.sharding.parameters import Parameters
from shoal.sharding.reduced_gradients import ReducedGradients
from shoal.sharding.replicated_gradients import AgreeingHook, ReplicatedGradients
from shoal.sharding.shard import Shard
from shoal.sharding.sharded_step import JoinableOptimizer, ShardedStep
from shoal.sharding.state_dict import pack_groups, read, sharded


class ZeroRedundancyOptimizer(JoinableOptimizer):
    """Any optimizer, with its state divided over the ranks of a process group (ZeRO, arXiv:1910.02054).

    A drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``. Each rank steps its share of the parameters, then
    each share goes to all ranks. Gradients must be equal on all ranks when `step` is called, as
    ``DistributedDataParallel`` leaves them. All ranks must give the same parameters in the same order, and call the
    methods that communicate (`step`, `consolidate_state_dict`, `add_param_group`) together.

    Parameters, groups, dtypes and devices may be mixed, parameters may be frozen, and may change in all this between
    steps. After every step all ranks hold the same bits.

    Args:
        params: tensors or parameter groups, as for ``optimizer_class``.
        optimizer_class: a subclass of ``torch.optim.Optimizer`` that steps each parameter by its own gradient and
            state, called with the parameter groups of this rank's share (groups may be empty) and ``defaults``. One
            that computes something of all parameters in its step (LBFGS, which is refused, or a common step size or
            norm) would compute it of its share alone.
        process_group: the ranks that share; None for all.
        parameters_as_bucket_view: move the parameters into flat buffers, which travel without being packed.
        overlap_with_ddp: step inside DDP's backward pass: see `hook_with_zero_step`. `step` then does nothing.
        partition: what a share consists of. ``"elements"``: even parts, cut anywhere at multiples of 64 bytes; for
            optimizers that update every element from its own gradient and state only. ``"parameters"``: whole
            parameters, the largest first to the rank with the least so far. ``"auto"``: ``"elements"`` for those
            classes of torch.optim that are element-wise, and for classes with an attribute ``element_wise = True``; not
            for their subclasses, which may do anything.
        reduce_scatter: reduce gradients here, to their owners only, while backward runs: with the bare model, in the
            place of DDP. A step then sends 2 times the parameters' size per rank and not 3, and gradients take the
            memory of one share: ``param.grad`` is None after backward, and `clip_grad_norm_` is this class's. Rank 0's
            parameters are given to all ranks at the start. Use `no_sync` to accumulate, and `shoal.sharding.GradScaler`
            to scale losses.
        buffers_of: with ``reduce_scatter``, a module whose buffers (BatchNorm's statistics) rank 0 gives to all ranks
            at the start and after every step, as DDP does before every forward pass; in a `Join`, the first live rank.
        offload: keep the optimizer's state and a copy of this rank's share on the CPU, and step there.
        master_weights: let the optimizer step float32 copies of float16 and bfloat16 parameters, which belong to the
            optimizer's state (under ``"master_weights"``).
        defaults: further arguments of ``optimizer_class``.

    Attributes:
        optim: the local optimizer.
        overlap_with_ddp: as given.
        process_group, rank, world_size, global_rank: as torch's.

    Raises:
        TypeError: if ``params`` is not an iterable of tensors or of groups; for LBFGS, which makes one vector of all
            parameters; and for a functional optimizer.
        ValueError: if it is empty, a parameter is not strided, or arguments do not fit together.
    """

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Of parameters that are this rank's share already: the optimizer that would step the share."""
        return of_share(*args, **given) if is_cut() else super().__new__(cls)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Partition = "auto",
        reduce_scatter: bool = False,
        buffers_of: nn.Module | None = None,
        offload: bool = False,
        master_weights: bool = False,
        **defaults: Any,
    ) -> None:
        given = checked(params)
        checked_class(optimizer_class)
        self._built = False
        Optimizer.__init__(self, given, defaults)
        Joinable.__init__(self)
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None:
            raise ValueError("there is no process group: call torch.distributed.init_process_group() first")
        self.process_group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in process_group: only its members make the optimizer")
        self.world_size = dist.get_world_size(group)
        self.global_rank = dist.get_global_rank(group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        devices: list[torch.device] = [param.device for entry in self.param_groups for param in entry["params"]]
        self._default_device = devices[0]
        self._element_wise = is_element_wise(optimizer_class)
        self._sharded = ShardedStep(
            self,
            Communication(group, self._default_device),
            Failures(group, self.rank),
            Parameters(
                self.world_size,
                cut=may_cut(partition, self._element_wise, self.world_size),
                flat_buffers=parameters_as_bucket_view,
            ),
            Shard(optimizer_class, defaults, alias=overlap_with_ddp, offload=offload, master_weights=master_weights),
        )
        self._gradients: GradientSource = (
            ReducedGradients(self._sharded, ModuleBuffers(buffers_of))
            if reduce_scatter
            else ReplicatedGradients(self._sharded)
        )
        self._updated: list[int] | None = None
        if reduce_scatter and overlap_with_ddp:
            raise ValueError("reduce_scatter reduces gradients in the place of DDP: leave out overlap_with_ddp")
        if buffers_of is not None and not reduce_scatter:
            raise ValueError("without reduce_scatter it is DDP that synchronises buffers: leave out buffers_of")
        self._add_to_shard(self.param_groups)
        self.defaults = {**defaults, **self.optim.defaults}  # where OneCycleLR looks for momentum
        self._built = True

    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]  # for `inspect.signature`, which looks at it first

    # Names of torch's ZeroRedundancyOptimizer that code around it reads: join hooks of users, and torch's DDP hooks.

    @property
    def _all_params(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _overlap_with_ddp(self) -> bool:
        return self.overlap_with_ddp

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, over this rank's slices."""
        return self._sharded.shard.optimizer

    def _add_to_shard(self, groups: list[dict[str, Any]]) -> None:
        params = [group["params"] for group in groups]
        parameters = self._sharded.parameters
        slices = parameters.add(params, self.rank)
        with self._sharded.failures.named("making ZeroRedundancyOptimizer"):
            self._gradients.watch(params)
        self._sharded.shard.add(groups, slices, parameters.params)
        self._sharded.show_options()
        self.state = self.optim.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, and divides it over the ranks as well; what was there stays where it is.

        Every rank must call it.
        """
        super().add_param_group(param_group)
        if self._built:
            self._add_to_shard(self.param_groups[-1:])

    # --- stepping ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps this rank's share, and brings all parameters to all ranks.

        Args:
            closure: evaluates the model again and returns the loss.
            kwargs: passed to the step of the optimizer class.

        Returns:
            What the optimizer's own step returns, which is the loss if there is a closure. With ``overlap_with_ddp``
            None, and nothing happens: the backward pass has stepped.

        Raises:
            RuntimeError: if a rank was lost, names it; within the timeout of the process group.
        """
        if self.overlap_with_ddp:
            return None
        if not isinstance(self._gradients, ReducedGradients):
            Join.notify_join_context(self)
        with self._sharded.failures.named("in step() of ZeroRedundancyOptimizer"):
            if closure is None and self._element_wise and isinstance(self._gradients, ReducedGradients):
                return self._step_as_they_come(self._gradients, kwargs)
            if callable(closure):
                kwargs["closure"] = self._evaluating(closure)
            else:
                self._prepare()
                if closure is not None:  # whatever the optimizer class makes of it
                    kwargs["closure"] = closure
            loss = self.optim.step(**kwargs)
            updated, self._updated = self._updated, None
            if updated is None:
                raise RuntimeError(f"{type(self.optim).__name__} did not evaluate its closure: call step() without")
            self._finish(updated)
        return loss

    def _step_as_they_come(self, gradients: ReducedGradients, kwargs: dict[str, Any]) -> None:
        """Steps bucket by bucket, while other gradients are still on their way here and parameters away from here."""

        def stepped() -> Iterator[int]:
            for number in gradients.arriving():
                self.optim.step(**kwargs)
                self._sharded.shard.finish(drop_gradients=True)
                yield number

        self._sharded.follow()
        self._sharded.gather(stepped())
        self._sharded.show_options()
        gradients.used()

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as the local optimizer may call it, as often as it likes."""

        def evaluate() -> Any:
            loss = closure()
            self._prepare()
            return loss

        return evaluate

    def _prepare(self) -> None:
        """Gives the local optimizer the options and gradients of now."""
        self._sharded.follow()
        self._updated = self._gradients.prepare()

    def _finish(self, updated: list[int]) -> None:
        """After the local step: brings the parameters in the buckets ``updated`` to all ranks."""
        self._gradients.lend()
        self._sharded.shard.finish(drop_gradients=self._gradients.are_lent)
        self._sharded.show_options()
        self._sharded.gather(updated)
        self._gradients.used()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those that were reduced already included."""
        super().zero_grad(set_to_none)
        if self._built:
            with self._sharded.failures.named("in zero_grad() of ZeroRedundancyOptimizer"):
                self._gradients.drop()

    def no_sync(self) -> AbstractContextManager[None]:
        """With ``reduce_scatter``: backward passes inside accumulate, and send nothing. Else it does nothing."""
        return self._gradients.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales all gradients so that their norm, as of one vector, is at most ``max_norm``.

        As ``torch.nn.utils.clip_grad_norm_``, which cannot see gradients that are with their owners. With
        ``reduce_scatter`` every rank must call it, between backward and `step`; the norm is then added up in another
        order than torch's, and equal to it to float rounding.

        Args:
            max_norm: the bound.
            norm_type: of the norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before; with ``reduce_scatter`` on the CPU, in the widest dtype of the parameters and at least
            float32.

        Raises:
            RuntimeError: if the norm is not finite and that was to be an error, or a rank was lost.
        """
        with self._sharded.failures.named("in clip_grad_norm_() of ZeroRedundancyOptimizer"):
            norm = self._gradients.clip(max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}: it cannot be clipped")
        return norm

    # --- state dicts -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state: whole on the rank that it was consolidated on, else sharded.

        After `consolidate_state_dict` and until the next step, the target has the state of all parameters, on the CPU,
        in the format of torch.optim. Elsewhere each rank has the state of its slices, with tensors that
        ``torch.distributed.checkpoint`` saves and loads as the whole ones, on any number of ranks; ``torch.save``
        refuses them. It does not communicate.
        """
        own = self._sharded
        state = sharded(own.shard, own.parameters.params) if own.consolidated is None else own.consolidated
        return {"state": dict(state), "param_groups": pack_groups(self.param_groups)}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the state of all parameters to one rank, into memory of the CPU: every rank must call it.

        Args:
            to: the target, as a rank of the process group. Its `state_dict` is whole until the next step.

        Raises:
            ValueError: if there is no such rank.
            TypeError: if the optimizer keeps objects in its state that are no data.
            RuntimeError: if a rank was lost, names it.
        """
        if not 0 <= to < self.world_size:
            raise ValueError(f"the process group has ranks 0 to {self.world_size - 1}, got to={to}")
        own = self._sharded
        own.take_options()
        with own.failures.named("in consolidate_state_dict()"):
            if self.rank == to:
                own.consolidated = consolidation.collect(own.communication, own.shard, own.parameters.params)
            else:
                own.consolidated = None
                consolidation.give(own.communication, own.shard, to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's share of a state dict; the dictionary stays as it is and shares no memory with it.

        Args:
            state_dict: of Shoal's or torch's ``ZeroRedundancyOptimizer`` on any number of ranks, or of the plain
                optimizer.

        Raises:
            ValueError: if it is of another model, says where; then nothing was changed.
        """
        own = self._sharded
        states, options = read(state_dict, self.param_groups, own.shard.pieces, element_wise=self._element_wise)
        own.consolidated = None
        own.shard.load(states, options)
        own.show_options()
        self.state = self.optim.state

    # --- Join --------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does while the others step: it steps its share with their gradients and options.

        With ``reduce_scatter`` the count of live ranks travels with the gradients. With ``overlap_with_ddp`` there is
        nothing to do here: the model's hook shadows backward passes, and these step.

        Args:
            kwargs: of `Join`. With ``reduce_scatter``, ``divide_by_initial_world_size`` (default True) says whether
                gradients are divided by the number of ranks, or by the number of live ones.
        """
        return AgreeingHook(self._sharded) if self.overlap_with_ddp else self._gradients.join_hook(**kwargs)

    @property
    def sharded_step(self) -> ShardedStep:
        """The division over the ranks, which `hook_with_zero_step` and `GradScaler` work with."""
        return self._sharded

    @property
    def gradient_source(self) -> GradientSource:
        """Where the gradients for a step come from."""
        return self._gradients

    @property
    def join_device(self) -> torch.device:
        """Where the messages of `Join` lie: the device of the first parameter."""
        return self._default_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return self.process_group
