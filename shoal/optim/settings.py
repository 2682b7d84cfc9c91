"""What users give to the public classes of this room: which arguments make sense, alone and together, which must be
equal in a run, and the torch objects that are made from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.averaging.options import term_of
from shoal.compression import Compression, NoCompression
from shoal.optim.placement import HostCopy
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.view import Role

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

MAX_SECONDS = 86400

COMPRESSIONS = ("grad_compression", "state_averaging_compression", "load_state_compression")
MODES = (
    "delay_optimizer_step", "delay_grad_averaging", "delay_state_averaging", "average_state_every", "use_local_updates"
)  # fmt: skip
# Options of an averager that stand for an argument of the optimizer.
IN_PLACE_OF = {
    "min_matchmaking_time": "matchmaking_time",
    "next_chunk_timeout": "next_chunk_timeout",
    "min_group_size": "min_peers",
}
PLACE_TIMES = ("request_timeout", "sender_timeout", "reducer_timeout")
AVERAGER_TIMES = ("min_matchmaking_time", "next_chunk_timeout", *PLACE_TIMES)
AVERAGER_OPTIONS = (*AVERAGER_TIMES, "bandwidth", "min_group_size", "allow_state_sharing")
# Options of hivemind's averagers that have no effect here: the peers of a run average all together, in chunks of a size
# that suits the model and in shares by bandwidth; who has the state is known; no process is started.
WITHOUT_USE = ("target_group_size", "part_size_bytes", "min_vector_size", "declare_state_period", "daemon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of an `Optimizer` that are numbers and switches, with the defaults filled in.

    Raises:
        ValueError: with the name of the argument (or of two that contradict each other) and what to do.
    """

    run_id: str
    target_batch_size: int
    batch_size_per_step: int | None
    matchmaking_time: float
    averaging_timeout: float
    allreduce_timeout: float | None
    next_chunk_timeout: float | None
    load_state_timeout: float
    shutdown_timeout: float
    reuse_grad_buffers: bool
    offload_optimizer: bool | None
    delay_optimizer_step: bool | None
    delay_grad_averaging: bool
    delay_state_averaging: bool
    average_state_every: int
    use_local_updates: bool
    client_mode: bool
    auxiliary: bool
    grad_compression: Compression | None
    state_averaging_compression: Compression | None
    load_state_compression: Compression | None
    average_opt_statistics: tuple[str, ...]
    own_averager: bool
    averager_opts: Mapping[str, Any]
    performance_ema_alpha: float
    max_grad_norm: float | None
    min_peers: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **others: Any) -> Settings:
        """The settings among the arguments; `others` replace arguments of the same name."""
        check_names(arguments["average_opt_statistics"])
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.name not in others}, **others)

    def __post_init__(self) -> None:
        fill = object.__setattr__
        for name in COMPRESSIONS:
            if getattr(self, name) is None:
                fill(self, name, NoCompression())
        if self.allreduce_timeout is None:
            fill(self, "allreduce_timeout", self.averaging_timeout)
        if self.delay_optimizer_step is None:
            fill(self, "delay_optimizer_step", self.delay_grad_averaging)
        if self.offload_optimizer is None:
            fill(self, "offload_optimizer", bool(self.delay_optimizer_step))
        fill(self, "averager_opts", _averager_options(self.averager_opts))
        self._check_each()
        self._check_together()
        for name, argument in IN_PLACE_OF.items():
            if name in self.averager_opts:
                fill(self, argument, self.averager_opts[name])

    def _check_each(self) -> None:
        _check_run_id(self.run_id)
        check_samples({"target_batch_size": self.target_batch_size}, least=1)
        if self.batch_size_per_step is not None:
            check_samples({"batch_size_per_step": self.batch_size_per_step}, least=0)
        times = ("matchmaking_time", "averaging_timeout", "allreduce_timeout", "load_state_timeout", "shutdown_timeout")
        check_times({name: getattr(self, name) for name in times})
        if self.next_chunk_timeout is not None:
            check_times({"next_chunk_timeout": self.next_chunk_timeout})
        for name in COMPRESSIONS:
            value = getattr(self, name)
            if not isinstance(value, Compression):
                raise ValueError(
                    f"{name}={value!r}: give a compression, such as shoal.compression.Float16Compression()"
                )
        alpha = self.performance_ema_alpha
        if not isinstance(alpha, int | float) or not 0 < alpha <= 1:
            raise ValueError(f"performance_ema_alpha={alpha!r}: give a number over 0 and at most 1")
        for name in ("average_state_every", "min_peers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number, at least 1")
        norm = self.max_grad_norm
        if norm is not None and (not isinstance(norm, int | float) or not 0 < norm < float("inf")):
            raise ValueError(f"max_grad_norm={norm!r}: give a positive number, or None not to clip")
        for name in self.average_opt_statistics:
            if not isinstance(name, str):
                raise ValueError(f"average_opt_statistics has {name!r}: give names of the optimizer's statistics")

    def _check_together(self) -> None:
        if self.delay_grad_averaging and not self.delay_optimizer_step:
            raise ValueError(
                "delay_grad_averaging=True needs delay_optimizer_step: the step comes after the average; leave it out"
            )
        if self.delay_optimizer_step and not self.offload_optimizer:
            raise ValueError(
                "delay_optimizer_step=True needs offload_optimizer: the step is made on a copy of the parameters while "
                "the model goes on with the old ones; leave it out"
            )
        if self.use_local_updates:
            unused = {
                "reuse_grad_buffers": self.reuse_grad_buffers,
                "delay_grad_averaging": self.delay_grad_averaging,
                "delay_optimizer_step": self.delay_optimizer_step,
                "offload_optimizer": self.offload_optimizer,
                "grad_averager_factory": self.own_averager,
                "max_grad_norm": self.max_grad_norm is not None,
            }
            for name, given in unused.items():
                if given:
                    raise ValueError(
                        f"use_local_updates=True makes every step at once with local gradients, which leaves no use "
                        f"for {name}: leave one of the two out"
                    )
        if self.averager_opts.get("allow_state_sharing") and self.auxiliary:
            raise ValueError(
                "averager_opts['allow_state_sharing']=True, but a peer with auxiliary=True has no state: leave one of "
                "them out"
            )
        if self.auxiliary:
            if self.client_mode:
                raise ValueError("auxiliary=True lends bandwidth, client_mode=True has none to lend: choose one")
            if self.batch_size_per_step is not None:
                raise ValueError("auxiliary=True trains nothing: leave batch_size_per_step out")
            if self.own_averager:
                raise ValueError("auxiliary=True does not work with grad_averager_factory: it would have to average")

    @property
    def averages_in_background(self) -> bool:
        """Whether the trainer goes on during a round."""
        return self.delay_grad_averaging or (self.use_local_updates and self.delay_state_averaging)

    @property
    def in_background(self) -> bool:
        """Whether the trainer goes on during some part of the end of an epoch."""
        return self.averages_in_background or bool(self.delay_optimizer_step)

    @property
    def role(self) -> Role:
        """What this peer does in rounds."""
        return Role.CLIENT if self.client_mode else Role.AUXILIARY if self.auxiliary else Role.NODE

    def rules(self, gradients: tuple[int, ...], buffers: tuple[int, ...], state: tuple[int, ...]) -> Rules:
        """When rounds begin and what they average, given the sizes of the parts of the vector."""
        assert self.allreduce_timeout is not None
        return Rules(
            sizes=gradients,
            matchmaking_time=self.matchmaking_time,
            round_timeout=self.allreduce_timeout,
            min_group=self.min_peers,
            target_samples=float(self.target_batch_size),
            due_sizes=buffers,
            state_sizes=state,
            state_every=self.average_state_every,
            state_always=self.use_local_updates,
        )

    def agreed(self) -> dict[str, str]:
        """Every option here that must be equal in a run, by its name: the number of samples, the modes, the codecs, and
        what a round averages and of how many peers. Each peer chooses the others for itself: every time-out,
        `performance_ema_alpha`, and `averager_opts` except `min_group_size`, which is compared as `min_peers`."""
        return {
            "target_batch_size": _number(self.target_batch_size),
            **{name: str(getattr(self, name)) for name in MODES},
            "grad_averager_factory": str(self.own_averager),
            "average_opt_statistics": term_of(", ".join(self.average_opt_statistics)),
            "max_grad_norm": _number(self.max_grad_norm),
            "min_peers": str(self.min_peers),
            **{name: term_of(getattr(self, name).spec) for name in COMPRESSIONS},
        }


def _number(value: float | None) -> str:
    """The number as peers compare it: 1 is 1.0."""
    return str(value) if value is None or value != int(value) else str(int(value))


def _check_run_id(run_id: object) -> None:
    if not isinstance(run_id, str) or not 1 <= len(run_id) <= 100:
        raise ValueError(f"run_id={run_id!r}: give a text of 1 to 100 characters")


def _averager_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have an effect and are not None, which stands for the default.

    Raises:
        ValueError: with the names of unknown options, and for values that make no sense.
    """
    unknown = sorted(set(given) - set(AVERAGER_OPTIONS) - set(WITHOUT_USE))
    if unknown:
        raise ValueError(
            f"averager_opts has {', '.join(map(repr, unknown))}, which is no option of an Optimizer's averaging; those "
            f"are {', '.join((*AVERAGER_OPTIONS, *WITHOUT_USE))}; an argument of the optimizer itself is given there"
        )
    used = {name: value for name, value in given.items() if name in AVERAGER_OPTIONS and value is not None}
    check_times({f"averager_opts[{name!r}]": used[name] for name in AVERAGER_TIMES if name in used})
    bandwidth, least = used.get("bandwidth", 1.0), used.get("min_group_size", 1)
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float) or not 0 <= bandwidth <= 1e18:
        raise ValueError(f"averager_opts['bandwidth']={bandwidth!r}: give a number that is not negative")
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise ValueError(f"averager_opts['min_group_size']={least!r}: give a whole number, at least 1")
    if not isinstance(shares := used.get("allow_state_sharing", True), bool):
        raise ValueError(f"averager_opts['allow_state_sharing']={shares!r}: give True or False")
    return used


def check_names(statistics: object) -> None:
    """Raise ValueError for one name in place of a list of names."""
    if isinstance(statistics, str):
        raise ValueError(f"average_opt_statistics={statistics!r} is one text: give a list of names, [{statistics!r}]")


def check_samples(arguments: Mapping[str, object], least: int) -> None:
    """Raise ValueError if a number of samples is not at least `least`."""
    for name, value in arguments.items():
        if not isinstance(value, int | float) or not least <= value < float("inf"):
            raise ValueError(f"{name}={value!r}: give a number of samples, at least {least}")


def check_times(arguments: Mapping[str, object]) -> None:
    """Raise ValueError if a time is not a positive number of seconds (at most a day)."""
    for name, value in arguments.items():
        if not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
            raise ValueError(f"{name}={value!r}: give a positive number of seconds, at most a day (86400)")


def make_trained(
    optimizer: torch.optim.Optimizer | OptimizerFactory,
    params: Params | None,
    scheduler: LRScheduler | SchedulerFactory | None,
    *,
    on_host: bool,
) -> tuple[torch.optim.Optimizer, LRScheduler | None, HostCopy | None]:
    """The local optimizer and its scheduler; `on_host`, with the copy of the parameters that the optimizer steps.

    Raises:
        ValueError: if `optimizer` and `params` do not go together, if the optimizer's step needs a closure, or if
            `scheduler` is not a scheduler of this optimizer.
    """
    host: HostCopy | None = None
    if on_host:
        if isinstance(optimizer, torch.optim.Optimizer) or params is None:
            raise ValueError(
                "offload_optimizer=True makes the optimizer over parameters of its own: give optimizer= as a function, "
                "and params="
            )
        host = HostCopy(params)
    made = _make_optimizer(optimizer, params if host is None else host.groups)
    return made, _make_scheduler(scheduler, made), host


def _make_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory, params: Params | None
) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("optimizer= is a ready optimizer, which has its parameters: leave params= out")
        return _steps_by_itself(optimizer)
    if not callable(optimizer):
        raise ValueError(f"optimizer={optimizer!r}: give a torch optimizer, or a function that makes one from params")
    if params is None:
        raise ValueError("optimizer= is a function, which needs params=: the model's parameters or parameter groups")
    made = optimizer(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer= made {type(made).__name__}, which is not a torch.optim.Optimizer")
    return _steps_by_itself(made)


def _steps_by_itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer= is a {type(optimizer).__name__}, whose step evaluates the loss again and again (its closure), "
            "and peers average gradients once per step: choose an optimizer whose step needs no closure"
        )
    return optimizer


def _make_scheduler(
    scheduler: LRScheduler | SchedulerFactory | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler):
        if not callable(scheduler):
            raise ValueError(f"scheduler={scheduler!r}: give a torch scheduler, or a function that makes one")
        scheduler = scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"scheduler= is a {type(scheduler).__name__}: give a torch scheduler that steps by itself, without a metric"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError("scheduler= is of another optimizer than the one given: make it from that one")
    return scheduler
