"""The arguments of the public classes of this room: which values make sense, alone and together, which must be equal in
a run, and how the torch objects are made from them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.averaging.options import term_of
from shoal.cluster.cluster import Cluster
from shoal.compression import Compression, NoCompression, check_for_state
from shoal.flat import Listed, Together, parameters_of
from shoal.optim.closures import needs_closure
from shoal.optim.diloco import DiLoCo
from shoal.optim.host_copy import HostCopy, check_none_missing, is_on_host, names_in
from shoal.optim.plain import plain_or
from shoal.optim.trainable import check_dense, check_real, check_writable
from shoal.optim.without_effect import WITHOUT_EFFECT
from shoal.sharding.cut import cut_already
from shoal.swarm.protocol.tensors import Tensors
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Place

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
AnyOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
AnyScheduler = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True, slots=True)
class Values:
    """The values that make sense for an argument.

    Attributes:
        wanted: what to give, for the message of an error.
        types: the types of the values. A bool does not count as a number here.
        fits: whether a value of these types makes sense.
    """

    wanted: str
    types: type | tuple[type, ...]
    fits: Callable[[Any], bool] = lambda value: True

    def check(self, name: str, value: Any) -> Any:
        """Return the value. A number or text of another library (numpy) becomes one of Python, which can be sent.

        Raises:
            ValueError: with the name of the argument, if the value makes no sense.
        """
        own = value if isinstance(value, list | tuple) else plain_or(value, otherwise=value)
        is_typed = isinstance(own, self.types) and (self.types is bool or not isinstance(own, bool))
        if not is_typed or not self.fits(own):
            raise ValueError(f"{name}={value!r}: give {self.wanted}")
        return own


def fields_of(record: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are fields of a dataclass."""
    return {field.name: arguments[field.name] for field in fields(record)}


def check_fields(record: object) -> None:
    """Check the fields of a frozen dataclass that are annotated with `Values`, and turn their numbers into Python's. A
    field may be None if its annotation says so."""
    for name, hint in get_type_hints(type(record), include_extras=True).items():
        value = getattr(record, name)
        for kind in getattr(hint, "__metadata__", ()):
            if value is not None or type(None) not in get_args(hint.__origin__):
                object.__setattr__(record, name, kind.check(name, value))


NUMBER = (int, float)
SECONDS = Values("a positive number of seconds, at most a day (86400)", NUMBER, lambda number: 0 < number <= 86400)
FRACTION = Values("a number over 0 and at most 1", NUMBER, lambda number: 0 < number <= 1)
SHARE = Values("a share of the run's time, from 0 (never) to 1", NUMBER, lambda number: 0 <= number <= 1)
POSITIVE = Values("a number over 0", NUMBER, lambda number: 0 < number < math.inf)
WHOLE_SAMPLES = Values("a whole number of samples, at least 0", int, lambda number: number >= 0)
SAMPLES = Values("a number of samples, at least 0", NUMBER, lambda number: 0 <= number < math.inf)
BATCH = Values("the number of samples behind the gradients, at least 1", NUMBER, lambda number: 0 < number < math.inf)
EPOCH = Values("the number of an epoch, at least 0", int, lambda number: 0 <= number < 1 << 63)
TARGET = Values("a number of samples, at least 1", NUMBER, lambda number: 1 <= number < math.inf)
NOT_NEGATIVE = Values("a number, at least 0", NUMBER, lambda number: 0 <= number < math.inf)
COUNT = Values("a whole number, at least 1", int, lambda number: number >= 1)
PEERS = Values(
    "a whole number, at least 1, or a share of the peers of the last epoch, over 0.0 and at most 1.0",
    NUMBER,
    lambda number: number >= 1 if isinstance(number, int) else 0 < number <= 1,
)
PORT = Values("a port from 1 to 65535, or 0 for any free one", int, lambda number: 0 <= number <= 65535)
LEVEL = Values("a level of logging, as logging.INFO", int)
RUN_ID = Values("a text of 1 to 100 characters", str, lambda text: 1 <= len(text) <= 100)
NAMES = Values("a list of names", (list, tuple), lambda names: all(isinstance(name, str) for name in names))
FOLDER = Values("the name of a folder", (str, os.PathLike))
OUTER = Values("a shoal.DiLoCo", DiLoCo)
CLUSTER = Values("a shoal.Cluster", Cluster)
FROZEN = Values('"sample", "hash", "send" or "own"', str, lambda what: what in ("sample", "hash", "send", "own"))
COMPRESSION = Values("one of shoal.compression, such as Float16Compression()", Compression)

COMPRESSIONS = ("grad_compression", "state_averaging_compression", "load_state_compression")
MODES = (
    "delay_optimizer_step", "delay_grad_averaging", "delay_state_averaging", "average_state_every", "use_local_updates"
)  # fmt: skip
WITHOUT_LOCAL_UPDATES = (
    "reuse_grad_buffers", "delay_grad_averaging", "delay_optimizer_step", "offload_optimizer", "grad_averager_factory",
    "max_grad_norm", "outer", "error_feedback"
)  # fmt: skip
WITHOUT_OUTER = (
    "reuse_grad_buffers", "delay_grad_averaging", "delay_optimizer_step", "grad_averager_factory",
    "average_opt_statistics"
)  # fmt: skip
WITHOUT_CLUSTER = ("reuse_grad_buffers", "auxiliary")
WITHOUT_STRANDS = (
    "delay_grad_averaging", "delay_optimizer_step", "offload_optimizer", "use_local_updates", "grad_averager_factory",
    "average_opt_statistics", "kept_state_dir"
)  # fmt: skip
NO_BATCH_SIZE = "step needs batch_size=…, since the optimizer was made without batch_size_per_step"
NO_SCALER = "a cluster takes no grad_scaler yet: train in bfloat16, which needs none"
# Where the first argument is None, it takes the value of the second.
AS_ANOTHER = {
    "allreduce_timeout": "averaging_timeout",
    "delay_optimizer_step": "delay_grad_averaging",
    "offload_optimizer": "delay_optimizer_step",
}
# Options of an averager that override an argument of the optimizer.
IN_PLACE_OF = {
    "min_matchmaking_time": "matchmaking_time",
    "next_chunk_timeout": "next_chunk_timeout",
    "min_group_size": "min_peers",
}
PLACE_TIMES = ("request_timeout", "sender_timeout", "reducer_timeout")
AVERAGER_OPTIONS = {
    **dict.fromkeys(("min_matchmaking_time", "next_chunk_timeout", *PLACE_TIMES), SECONDS),
    "bandwidth": Values("a number from 0 to 1e18", NUMBER, lambda number: 0 <= number <= 1e18),
    "min_group_size": COUNT,
    "allow_state_sharing": Values("True or False", bool),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of an `Optimizer`, with the defaults filled in, but for the objects that it trains and talks to.

    Raises:
        ValueError: with the name of an argument that makes no sense (or of two that contradict each other), and what to
            do.
    """

    run_id: Annotated[str, RUN_ID]
    target_batch_size: Annotated[int | None, TARGET]
    batch_size_per_step: Annotated[int | None, SAMPLES]
    matchmaking_time: Annotated[float, SECONDS]
    averaging_timeout: Annotated[float, SECONDS]
    allreduce_timeout: Annotated[float, SECONDS]
    next_chunk_timeout: Annotated[float | None, SECONDS]
    load_state_timeout: Annotated[float, SECONDS]
    shutdown_timeout: Annotated[float, SECONDS]
    reuse_grad_buffers: bool
    offload_optimizer: bool
    delay_optimizer_step: bool
    delay_grad_averaging: bool
    delay_state_averaging: bool
    average_state_every: Annotated[int, COUNT]
    use_local_updates: bool
    client_mode: bool
    auxiliary: bool
    grad_compression: Annotated[Compression, COMPRESSION]
    state_averaging_compression: Annotated[Compression, COMPRESSION]
    load_state_compression: Annotated[Compression, COMPRESSION]
    average_opt_statistics: Annotated[tuple[str, ...], NAMES]
    grad_averager_factory: Callable[..., Any] | None
    averager_opts: Mapping[str, Any]
    performance_ema_alpha: Annotated[float, FRACTION]
    max_grad_norm: Annotated[float | None, POSITIVE]
    min_peers: Annotated[float, PEERS]
    kept_state_dir: Annotated[str | os.PathLike[str] | None, FOLDER]
    metrics_port: Annotated[int | None, PORT]
    outer: Annotated[DiLoCo | None, OUTER]
    error_feedback: Annotated[float | None, FRACTION]
    frozen_parameters: Annotated[str, FROZEN]
    wait_for_newcomers: Annotated[float, SHARE]
    max_state_bytes: Annotated[int | None, COUNT]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """The settings among the arguments."""
        given = dict(arguments)
        given |= {name: NoCompression() for name in COMPRESSIONS if given[name] is None}
        for name, other in AS_ANOTHER.items():
            given[name] = given[other] if given[name] is None else given[name]
        names, options = given["average_opt_statistics"], _averager_options(given["averager_opts"] or {})
        given["average_opt_statistics"] = names if isinstance(names, str) else tuple(names or ())
        given["averager_opts"] = options
        given |= {argument: options[name] for name, argument in IN_PLACE_OF.items() if name in options}
        return cls(**fields_of(cls, given))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.delay_grad_averaging and not self.delay_optimizer_step:
            raise ValueError("delay_grad_averaging=True needs delay_optimizer_step, since the step comes later")
        if self.delay_optimizer_step and not self.offload_optimizer:
            raise ValueError("delay_optimizer_step=True needs offload_optimizer: it steps a copy of the parameters")
        if self.use_local_updates and (unused := [name for name in WITHOUT_LOCAL_UPDATES if getattr(self, name)]):
            raise ValueError(f"use_local_updates=True steps at once, and leaves no use for {unused[0]}: leave one out")
        self._check_target()
        for name in COMPRESSIONS[1:]:
            check_for_state(name, getattr(self, name))
        if self.error_feedback is not None and self.grad_averager_factory is not None:
            raise ValueError("error_feedback is of the optimizer's own rounds: give it to the averager of the factory")
        if self.outer is not None and (unused := [name for name in WITHOUT_OUTER if getattr(self, name)]):
            instead = "; DiLoCo(overlap=…) hides the round" if unused[0].startswith("delay") else ""
            raise ValueError(f"outer=DiLoCo(…) averages no gradients, and leaves no use for {unused[0]}{instead}")
        if self.auxiliary:
            if self.averager_opts.get("allow_state_sharing"):
                raise ValueError("auxiliary=True has no state for averager_opts['allow_state_sharing']: leave one out")
            if self.client_mode:
                raise ValueError("auxiliary=True lends bandwidth, client_mode=True has none to lend: choose one")
            if self.batch_size_per_step is not None:
                raise ValueError("auxiliary=True trains nothing: leave batch_size_per_step out")
            if self.grad_averager_factory is not None:
                raise ValueError("auxiliary=True does not work with grad_averager_factory: it would have to average")

    def _check_target(self) -> None:
        steps = None if self.outer is None else self.outer.inner_steps
        if self.target_batch_size is None and steps is None:
            more = "" if self.outer is None else ", or DiLoCo(inner_steps=…)"
            raise ValueError(f"give target_batch_size=…{more}: it says when an epoch ends")
        if self.target_batch_size is not None and steps is not None:
            raise ValueError(
                f"target_batch_size={self.target_batch_size} and DiLoCo(inner_steps={steps}) both say when an epoch "
                "ends: give one of the two"
            )

    @property
    def target(self) -> float:
        """The number of samples of all peers at which an epoch ends; if inner steps are counted, their number for each
        peer."""
        steps = None if self.outer is None else self.outer.steps_per_epoch
        return float(self.target_batch_size or 0) if steps is None else float(steps)

    @property
    def counts_steps(self) -> bool:
        """Whether an epoch ends after a number of inner steps."""
        return self.outer is not None and self.outer.inner_steps is not None

    @property
    def moves_within_epochs(self) -> bool:
        """Whether a step changes the model's parameters even if no epoch ends."""
        return self.use_local_updates or self.outer is not None

    @property
    def min_group(self) -> int:
        """`min_peers` if it is a number of peers, else 1."""
        return self.min_peers if isinstance(self.min_peers, int) else 1

    @property
    def min_share(self) -> float:
        """`min_peers` if it is a share, else 0.0."""
        return 0.0 if isinstance(self.min_peers, int) else self.min_peers

    @property
    def averages_in_background(self) -> bool:
        """Whether the trainer continues during a round."""
        overlaps = self.outer is not None and self.outer.is_in_background
        return overlaps or self.delay_grad_averaging or (self.use_local_updates and self.delay_state_averaging)

    @property
    def steps_in_background(self) -> bool:
        """Whether the trainer continues during the step that ends an epoch. With local updates there is no such step,
        and the average changes the parameters that the trainer uses."""
        return self.in_background and not self.use_local_updates

    @property
    def steps_ahead(self) -> float:
        """The number of inner steps of the next epoch that a peer has made when it applies the average of the last."""
        return 0.0 if self.outer is None else float(self.outer.delay)

    @property
    def role(self) -> Role:
        """The role of this peer in the run."""
        return Role.CLIENT if self.client_mode else Role.AUXILIARY if self.auxiliary else Role.NODE

    @property
    def in_background(self) -> bool:
        """Whether the trainer continues during some part of the end of an epoch."""
        return self.averages_in_background or self.delay_optimizer_step

    @property
    def sends_frozen(self) -> bool:
        """Whether frozen parameters are part of the state, which newcomers download."""
        return self.frozen_parameters == "send"

    def place(self, tensors: Sequence[Tensors], *, keeps_state: bool, redo_bytes: int = 0) -> Place:
        """The options of a run that this peer chooses for itself, see `Place`."""
        given: dict[str, Any] = {name: self.averager_opts.get(name) for name in ("bandwidth", *PLACE_TIMES)}
        given |= {"role": self.role, "chunk_timeout": self.next_chunk_timeout}
        return Place(keeps_state=keeps_state, redo_bytes=redo_bytes, tensors=tensors, **given)

    def for_averager(self) -> dict[str, Any]:
        """The options of an averager of gradients, which averages as the optimizer itself would."""
        names = ("allreduce_timeout", "next_chunk_timeout", "shutdown_timeout", "client_mode")
        return {
            **{name: getattr(self, name) for name in names},
            "min_group_size": 1,
            "min_matchmaking_time": self.matchmaking_time,
            "compression": self.grad_compression,
            "bandwidth": self.averager_opts.get("bandwidth"),
            **{name: value for name, value in self.averager_opts.items() if name in PLACE_TIMES},
        }

    def agreed(self) -> dict[str, str]:
        """The options here that must be equal in a run, by name: the number of samples, the modes, the codecs, what a
        round averages, and how many peers it needs. Each peer chooses the other options for itself: every time-out,
        `performance_ema_alpha`, and `averager_opts`, except `min_group_size`, which is compared as `min_peers`."""
        return {
            "target_batch_size": _term(self.target_batch_size),
            **{name: str(getattr(self, name)) for name in MODES},
            "grad_averager_factory": str(self.grad_averager_factory is not None),
            "outer": "None" if self.outer is None else self.outer.term(),
            "average_opt_statistics": term_of(", ".join(self.average_opt_statistics)),
            "max_grad_norm": _term(self.max_grad_norm),
            "min_peers": str(self.min_peers),
            **{name: term_of(getattr(self, name).spec) for name in COMPRESSIONS},
        }


def whole(number: float) -> int | float:
    """A finite number as an int if it is whole, else as a float."""
    return int(number) if number == int(number) else float(number)


def samples_of(batch_size: Any, grad_scaler: object) -> int:
    """The number of samples of a rank in a step.

    Raises:
        ValueError: if `batch_size` is no whole number, or if a scaler is given.
    """
    if grad_scaler is not None:
        raise ValueError(NO_SCALER)
    if batch_size is None:
        raise ValueError(NO_BATCH_SIZE)
    samples: int = WHOLE_SAMPLES.check("batch_size", batch_size)
    return samples


def check_cluster(cluster: Any, settings: Settings, optimizer: AnyOptimizer, params: Params | None) -> None:
    """Check that a cluster can train with these arguments.

    Raises:
        ValueError: with the argument that does not go together with a cluster.
    """
    CLUSTER.check("cluster", cluster)
    if unused := [name for name in WITHOUT_CLUSTER if getattr(settings, name)]:
        raise ValueError(f"cluster=… does not go together with {unused[0]}=True: leave one out")
    if params is None or isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("cluster=… needs params=, and a function as optimizer=, which each rank calls")
    unused = [name for name in WITHOUT_STRANDS if getattr(settings, name)]
    if settings.outer is not None and settings.outer.is_in_background:
        unused.append("DiLoCo(overlap=…)")  # rank 0 leads one call at a time, and no other in the background
    if cluster.strands > 1 and unused:
        raise ValueError(
            f"shoal.Cluster(strands={cluster.strands}) does not go together with {unused[0]} yet: give strands=1, with "
            "which rank 0 speaks for all"
        )


def _term(value: float | None) -> str:
    """The number as peers compare it: 1 is 1.0."""
    return str(value) if value is None or value != int(value) else str(int(value))


def _averager_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have an effect, without those that are None, which stands for the default.

    Raises:
        ValueError: with the names of unknown options, or if a value makes no sense.
    """
    without_effect = WITHOUT_EFFECT["averager_opts"]
    if unknown := sorted(set(given) - set(AVERAGER_OPTIONS) - set(without_effect)):
        raise ValueError(
            f"averager_opts has {', '.join(map(repr, unknown))}, and there is no such option; there are "
            f"{', '.join((*AVERAGER_OPTIONS, *without_effect))}; give arguments of the optimizer to the optimizer "
            "itself"
        )
    used = {name: value for name, value in given.items() if name in AVERAGER_OPTIONS and value is not None}
    return {name: AVERAGER_OPTIONS[name].check(f"averager_opts[{name!r}]", value) for name, value in used.items()}


class Stepped(NamedTuple):
    """An optimizer, its scheduler, and the copy of the parameters on the host, if the optimizer steps that copy."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    host: HostCopy | None = None

    @property
    def given(self) -> list[torch.Tensor]:
        """The model's parameters, in the optimizer's order."""
        return parameters_of(self.optimizer) if self.host is None else self.host.given


class Use(NamedTuple):
    """What a local optimizer is made for.

    Attributes:
        on_host: make a copy of the parameters on the host, and the optimizer over that copy; none if all parameters are
            there and nothing steps `in_background`.
        in_background: the trainer goes on with the model while the optimizer steps, so it needs a copy.
        in_cluster: a `ZeroRedundancyOptimizer` does not divide the parameters. The cluster has divided them already, or
            rank 0 steps all of them.
        steps_average: the optimizer steps the average of the peers' gradients, and not this peer's own.
        frozen: frozen parameters are part of the state.
        calls_closure: each step of the optimizer gets the user's closure, and may call it.
    """

    on_host: bool = False
    in_background: bool = False
    in_cluster: bool = False
    steps_average: bool = False
    frozen: bool = False
    calls_closure: bool = False


def make_trained(optimizer: AnyOptimizer, params: Params | None, scheduler: AnyScheduler | None, use: Use) -> Stepped:
    """Make the local optimizer and its scheduler.

    Raises:
        ValueError: if `optimizer` and `params` do not go together, if the optimizer's step needs a closure or sparse
            gradients that it does not get, if a parameter is complex or was made within `inference_mode`, or if
            `scheduler` is not a scheduler of this optimizer. The parameters are where they were then.
    """
    host: HostCopy | None = None
    if use.on_host and (isinstance(optimizer, torch.optim.Optimizer) or params is None):
        raise ValueError(
            "offload_optimizer=True makes the optimizer over parameters of its own: give optimizer= as a function, "
            "and params="
        )
    if params is not None and not isinstance(optimizer, torch.optim.Optimizer):
        listed = Listed(params)
        params = listed.params  # the function may look at them more than once
        if use.on_host and (use.in_background or not is_on_host(listed)):
            host = HostCopy(params, in_background=use.in_background, frozen=use.frozen)
    made = _make_optimizer(optimizer, params if host is None else host.params, use.in_cluster)
    if needs_closure(type(made)) and not use.calls_closure:
        raise ValueError(
            f"optimizer= is a {type(made).__name__}, whose step evaluates the loss again and again (its closure), "
            "and peers average gradients once per step: choose an optimizer whose step needs no closure, or train "
            "without cluster= and with outer=shoal.DiLoCo(…) or use_local_updates=True, where its step gets the "
            "closure itself"
        )
    names = names_in(made.param_groups)
    model = parameters_of(made) if host is None else host.given
    check_real(model, names=names)
    check_writable(model, names=names)
    if use.steps_average:
        check_dense(made, "optimizer=")
    schedule = _make_scheduler(scheduler, made)
    if host is not None:
        host.adopt(made)
    return Stepped(made, schedule, host)


def make_outer(
    outer: DiLoCo,
    optimizer: AnyOptimizer,
    params: Params | None,
    scheduler: AnyScheduler | None,
    use: Use,
    pieces: Sequence[Any] | None = None,
) -> tuple[Stepped, HostCopy, torch.optim.Optimizer]:
    """Make the inner optimizer, the anchor and the outer optimizer.

    Args:
        use: what the inner optimizer is made for.
        pieces: parameter groups. If given, the anchor is a copy of these, and not of the model's parameters.

    Returns:
        The inner optimizer with its scheduler (and its copy of the parameters); the anchor; the outer optimizer.

    Raises:
        ValueError: as `make_trained`, or if `outer.optimizer` makes no optimizer.
    """
    made = inner, _, host = make_trained(optimizer, params, scheduler, use)
    if pieces is not None:
        anchor = HostCopy([{"params": group["params"]} for group in pieces], precise=True, frozen=True)
        return made, anchor, _make_outer(outer, anchor)
    model = iter(made.given)
    groups = []
    for group in inner.param_groups:
        tensors = [next(model) for _ in group["params"]]
        names = group.get("param_names")
        groups.append({"params": list(zip(names, tensors, strict=True)) if names else tensors})
    anchor = HostCopy(groups, precise=True, frozen=use.frozen, memory=None if host is None else host.memory)
    return made, anchor, _make_outer(outer, anchor)


def _make_outer(outer: DiLoCo, anchor: HostCopy) -> torch.optim.Optimizer:
    made = outer.optimizer(anchor.params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"DiLoCo(optimizer=…) made {type(made).__name__}, which is not a torch.optim.Optimizer")
    check_dense(made, "DiLoCo(optimizer=…)")
    anchor.adopt(made)
    return made


def _make_optimizer(optimizer: AnyOptimizer, params: Params | None, in_cluster: bool) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("optimizer= is a ready optimizer, which has its parameters: leave params= out")
        made = optimizer
    elif not callable(optimizer):
        raise ValueError(f"optimizer={optimizer!r}: give a torch optimizer, or a function that makes one from params")
    elif params is None:
        raise ValueError("optimizer= is a function, which needs params=: the model's parameters or parameter groups")
    else:
        with cut_already() if in_cluster else contextlib.nullcontext():
            made = optimizer(params)
        if isinstance(made, Together):  # any other class may be over a part of the model on purpose
            check_none_missing(made, [one for one in Listed(params).named if one[1].requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer= made {type(made).__name__}, which is not a torch.optim.Optimizer")
    return made


def _make_scheduler(scheduler: AnyScheduler | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler):
        if not callable(scheduler):
            raise ValueError(f"scheduler={scheduler!r}: give a torch scheduler, or a function that makes one")
        scheduler = scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(f"scheduler= is a {type(scheduler).__name__}: give a torch scheduler that needs no metric")
    if scheduler.optimizer is not optimizer:
        raise ValueError("scheduler= is of another optimizer than the one given: make it from that one")
    return scheduler
