"""`ZeroRedundancyOptimizer`: each rank keeps the optimizer's state of its share, and all ranks get all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from shoal.flat import (
    OwnGroups,
    Together,
    after_loading,
    after_saving,
    before_loading,
    before_saving,
    names_of_members,
    neutral,
    users_modes,
)
from shoal.sharding import consolidation
from shoal.sharding.arguments import Partitions, checked, checked_class, checked_gradients, may_cut, warn_of_division
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

    A drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``. Each rank steps its share of the parameters; then
    each share goes to all ranks. Gradients must be equal on all ranks when `step` is called, as
    ``DistributedDataParallel`` leaves them. All ranks must give the same parameters in the same order, and must call
    the methods that communicate (`step`, `consolidate_state_dict`, `add_param_group`) together.

    Parameters may have different dtypes and devices and be in several groups, and some may be frozen. All this may
    change between steps. After every step all ranks hold the same bits.

    Args:
        params: tensors or parameter groups, as for ``optimizer_class``.
        optimizer_class: a subclass of ``torch.optim.Optimizer`` that steps each parameter from its own gradient and
            state. It is called with the parameter groups of this rank's share (groups may be empty) and ``defaults``. A
            class whose step computes something from all parameters, such as a common step size or norm, would compute
            it from this rank's share alone. LBFGS is such a class, and is refused.
        process_group: the ranks that share the state; None for all ranks.
        parameters_as_bucket_view: move the parameters into flat buffers, which can be sent without packing. Default:
            False.
        overlap_with_ddp: step inside DDP's backward pass, see `hook_with_zero_step`; `step` then does nothing. Default:
            False.
        partition: the shape of a share. ``"elements"``: even shares, cut anywhere at multiples of 64 bytes, for
            optimizers that update every element from its own gradient and state alone. ``"parameters"``: whole
            parameters, the largest first, each to the rank that has the fewest bytes so far. ``"auto"`` (the default):
            ``"elements"`` for classes of torch.optim that are element-wise and for classes with an attribute
            ``element_wise = True``, else ``"parameters"``. A subclass of an element-wise class may do anything in its
            step, so it gets ``"parameters"``. A list has one of these for each parameter group, for an
            ``optimizer_class`` that makes a `shoal.Together`: its matrices whole, the rest in spans.
        reduce_scatter: let this optimizer reduce gradients, to their owners only, while backward runs. Use it with the
            bare model, in place of DDP. A step then sends 2 times the parameters' size per rank instead of 3 times, and
            gradients take the memory of one share. ``param.grad`` is None after backward, and gradients must be clipped
            by this class's `clip_grad_norm_`. All ranks start with the parameters of rank 0. Accumulate gradients in
            `no_sync`, and scale losses by `shoal.sharding.GradScaler`. Default: False.
        buffers_of: with ``reduce_scatter``, a module whose buffers (BatchNorm's statistics) rank 0 sends to all ranks
            at the start and after every step; in a `Join` the first live rank does. DDP does this before every forward
            pass. Default: None.
        offload: keep the optimizer's state and a copy of this rank's share on the CPU, and step there. Default: False.
        master_weights: let the optimizer step float32 copies of float16 and bfloat16 parameters. The copies are part of
            the optimizer's state, under ``"master_weights"``. Default: False.
        defaults: further arguments of ``optimizer_class``.

    Attributes:
        optim: the local optimizer.
        overlap_with_ddp: as given.
        process_group, rank, world_size, global_rank: as torch's.

    Raises:
        TypeError: if ``params`` is no iterable of tensors or of groups, if ``optimizer_class`` is or derives from
            LBFGS, if it is a functional optimizer, or if it is SparseAdam and gradients would be dense.
        ValueError: if ``params`` is empty, if a parameter is sparse, was made within `torch.inference_mode()`, does not
            fill its memory (without ``parameters_as_bucket_view``) or shares memory with another one (with it), if
            arguments do not fit together, or if there is no process group or this process is not in it.
    """

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Within `cut_already`, makes the optimizer of the share directly, because the parameters are this rank's share
        already.
        """
        return of_share(*args, **given) if is_cut() else super().__new__(cls)

    @neutral
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Partitions = "auto",
        reduce_scatter: bool = False,
        buffers_of: nn.Module | None = None,
        offload: bool = False,
        master_weights: bool = False,
        **defaults: Any,
    ) -> None:
        given = checked(params)
        checked_class(optimizer_class)
        dense = {"reduce_scatter": reduce_scatter, "overlap_with_ddp": overlap_with_ddp}
        checked_gradients(optimizer_class, {**dense, "partition='elements'": partition == "elements"})
        self._built = False
        # Without the defaults: the constructor of the class may compute the options of the groups from them.
        Optimizer.__init__(self, given, {})
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
        cuts = self._cuts(partition, len(self.param_groups))
        self._sharded = ShardedStep(
            self,
            Communication(group, self._default_device),
            Failures(group, self.rank),
            Parameters(self.world_size, flat_buffers=parameters_as_bucket_view),
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
        self._partition = partition
        self._add_to_shard(self.param_groups, cuts)
        warn_of_division(self.optim, self.world_size)
        self.defaults = {**defaults, **self.optim.defaults}  # OneCycleLR reads momentum here
        self._built = True

    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]  # for `inspect.signature`, which reads it first

    # Names of torch's ZeroRedundancyOptimizer that other code reads: users' join hooks, and torch's DDP hooks.

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

    def __getattr__(self, name: str) -> Any:
        """Says why there is no `train` and no `eval`, as schedule-free optimizers have them."""
        made = self.__dict__.get("_sharded")
        if name in ("train", "eval") and made is not None and hasattr(made.shard.optimizer, name):
            raise AttributeError(
                f"ZeroRedundancyOptimizer has no {name}(): that of {type(made.shard.optimizer).__name__} changes "
                "parameters, and each rank has only a share of them. If yours needs train() before the first step, "
                "call it where you make it: optimizer_class=lambda params, **options: …. To evaluate, choose another "
                "class"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _cuts(self, partition: Partitions, groups: int) -> list[bool]:
        return may_cut(partition, groups, element_wise=self._element_wise, world_size=self.world_size)

    def _add_to_shard(self, groups: list[dict[str, Any]], cuts: list[bool]) -> None:
        params = [group["params"] for group in groups]
        parameters = self._sharded.parameters
        slices = parameters.add(params, self.rank, cuts)
        with self._sharded.failures.named("making ZeroRedundancyOptimizer"):
            self._gradients.watch(params)
        self._sharded.shard.add(groups, slices, parameters.params)
        self._sharded.show_options()
        stepped = {piece.param: piece.local for piece in self._sharded.shard.all_pieces}
        if self._shown is None:
            self._shown = OwnGroups(self.param_groups, self.optim)
        self._shown.fix(self.param_groups, stepped)

    @neutral
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group and divides it over the ranks. Earlier groups keep their division. Every rank must
        call this.

        Args:
            param_group: a dictionary with ``params`` and the options that differ from the defaults, as in torch.optim.

        Raises:
            ValueError: if a parameter is unfit, as for the constructor, or is in another group already; or if the
                groups are fixed, by a list as ``partition`` or by a `shoal.Together`.
            RuntimeError: if a rank was lost. The message names it.
        """
        if self._built and (isinstance(self.optim, Together) or not isinstance(self._partition, str)):
            raise ValueError(
                f"a group more would have no entry in partition, or be of no member of {names_of_members(self.optim)}: "
                "give all groups when making the ZeroRedundancyOptimizer"
            )
        super().add_param_group(param_group)
        if self._built:
            assert isinstance(self._partition, str)
            self._add_to_shard(self.param_groups[-1:], self._cuts(self._partition, 1))

    # --- stepping ----------------------------------------------------------------------------------

    @neutral
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps this rank's share, and sends all parameters to all ranks.

        With ``overlap_with_ddp`` this does nothing and returns None, because the backward pass has made the step.

        Args:
            closure: evaluates the model again and returns the loss; None if gradients are there already.
            kwargs: passed to the step of the optimizer class.

        Returns:
            The result of the optimizer's own step: the loss if there is a closure.

        Raises:
            RuntimeError: if a rank was lost. The message names it, and the error comes within the timeout of the
                process group. Also if the optimizer class did not evaluate the closure.
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
                if closure is not None:  # the optimizer class decides what it means
                    kwargs["closure"] = closure
            loss = self.optim.step(**kwargs)
            updated, self._updated = self._updated, None
            if updated is None:
                raise RuntimeError(f"{type(self.optim).__name__} did not evaluate its closure: call step() without")
            self._finish(updated)
        return loss

    def _step_as_they_come(self, gradients: ReducedGradients, kwargs: dict[str, Any]) -> None:
        """Steps bucket by bucket, while later gradients are still on their way in and earlier parameters on their way
        out.
        """

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
        """The closure in the form that the local optimizer may call any number of times."""

        def evaluate() -> Any:
            with users_modes():
                loss = closure()
            self._prepare()
            return loss

        return evaluate

    def _prepare(self) -> None:
        """Gives the local optimizer the present options and gradients."""
        self._sharded.follow()
        self._updated = self._gradients.prepare()

    def _finish(self, updated: list[int]) -> None:
        """After the local step: sends the parameters in the buckets ``updated`` to all ranks."""
        self._gradients.lend()
        self._sharded.shard.finish(drop_gradients=self._gradients.are_lent)
        self._sharded.show_options()
        self._sharded.gather(updated)
        self._gradients.used()

    @neutral
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, including those that were reduced already.

        Args:
            set_to_none: set ``param.grad`` to None instead of zero. Default: True.

        Raises:
            RuntimeError: with ``reduce_scatter``, if a rank was lost. The message names it.
        """
        super().zero_grad(set_to_none)
        if self._built:
            with self._sharded.failures.named("in zero_grad() of ZeroRedundancyOptimizer"):
                self._gradients.drop()

    def no_sync(self) -> AbstractContextManager[None]:
        """With ``reduce_scatter``: a context in which backward passes accumulate gradients and send nothing.

        Without ``reduce_scatter`` it does nothing: use the ``no_sync`` of the model.
        """
        return self._gradients.no_sync()

    @neutral
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales all gradients so that their norm, as of one vector, is at most ``max_norm``.

        Use this in place of ``torch.nn.utils.clip_grad_norm_``, which can't see gradients that are with their owners.
        With ``reduce_scatter`` every rank must call it, between backward and `step`. The norm is then added up in
        another order than torch's, and equals it up to float rounding.

        Args:
            max_norm: the bound.
            norm_type: the order of the norm, as in torch: ``inf`` for the largest absolute value, 0 for the number of
                parameters whose gradient is not zero. Default: 2.0.
            error_if_nonfinite: raise an error if the norm is not finite, and leave the gradients as they are. Default:
                False.

        Returns:
            The norm before clipping, a scalar tensor. With ``reduce_scatter`` it is on the CPU, in the widest dtype of
            the parameters and at least float32.

        Raises:
            RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is True, or if a rank was lost.
        """
        with self._sharded.failures.named("in clip_grad_norm_() of ZeroRedundancyOptimizer"):
            norm = self._gradients.clip(float(max_norm), float(norm_type), only_finite=error_if_nonfinite)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}: it cannot be clipped")
        return norm

    # --- state dicts -------------------------------------------------------------------------------

    @neutral
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state: whole on the rank that has consolidated it, and sharded elsewhere. Does not
        communicate.

        From `consolidate_state_dict` until the next step, the target rank returns the state of all parameters, on the
        CPU, in the format of torch.optim. In all other cases a rank returns the state of its slices.
        ``torch.distributed.checkpoint`` saves and loads these sharded tensors as whole ones, on any number of ranks;
        ``torch.save`` refuses them.

        This method and `load_state_dict` call the hooks that were registered for them on this optimizer, as torch's do.
        `consolidate_state_dict` calls none.

        Returns:
            A dictionary with ``"state"`` and ``"param_groups"``.
        """
        before_saving(self)
        own = self._sharded
        state = sharded(own.shard, own.parameters.params) if own.consolidated is None else own.consolidated
        return after_saving(self, {"state": dict(state), "param_groups": pack_groups(self.param_groups)})

    @neutral
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state of all parameters on one rank, in CPU memory. Every rank must call this.

        Args:
            to: the target, as a rank of the process group. Its `state_dict` is whole until the next step. Default: 0.

        Raises:
            ValueError: if there is no such rank. At the target, also if the optimizer's state has something that is of
                no parameter, and not equal on all ranks.
            TypeError: if the optimizer's state holds anything but tensors, numbers, strings, None, and lists, tuples
                and dictionaries of these.
            RuntimeError: if a rank was lost. The message names it.
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

    @neutral
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's share of a state dict. The dictionary does not change, and the optimizer shares no memory
        with it.

        Args:
            state_dict: from Shoal's or torch's ``ZeroRedundancyOptimizer`` on any number of ranks, or from the plain
                optimizer.

        Raises:
            ValueError: if the state dict is of another model. The message says where it differs, and nothing has
                changed.
        """
        state_dict = before_loading(self, state_dict)
        own = self._sharded
        states, of_none, options = read(
            state_dict, self.param_groups, own.shard.pieces, element_wise=self._element_wise
        )
        own.consolidated = None
        own.shard.load(states, of_none, options)
        own.show_options()
        after_loading(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is neither copied nor pickled, because all ranks hold its state together: save "
            "state_dict() after consolidate_state_dict(), and load it into a new optimizer, of the copy of the model"
        )

    # --- Join --------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook by which a rank without inputs steps its share, with the gradients and options of the live ranks.

        With ``reduce_scatter`` the count of live ranks travels with the gradients. With ``overlap_with_ddp`` the hook
        shadows nothing: the model's hook shadows backward passes, which make the steps.

        Args:
            kwargs: the arguments of `Join`. With ``reduce_scatter``, ``divide_by_initial_world_size`` (default True)
                says whether gradients are divided by the number of all ranks, or by the number of live ranks.
        """
        return AgreeingHook(self._sharded) if self.overlap_with_ddp else self._gradients.join_hook(**kwargs)

    @property
    def sharded_step(self) -> ShardedStep:
        """The division over the ranks. `hook_with_zero_step` and `GradScaler` use it."""
        return self._sharded

    @property
    def gradient_source(self) -> GradientSource:
        """The source of the gradients for a step."""
        return self._gradients

    @property
    def join_device(self) -> torch.device:
        """The device for the messages of `Join`: that of the first parameter."""
        return self._default_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return self.process_group
