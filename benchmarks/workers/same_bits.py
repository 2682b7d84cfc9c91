"""Trains in every mode and notes what it has, bit by bit: `benchmarks.same_bits` compares that with another checkout's.

Uses nothing of Shoal but what users have, so that it runs with the Shoal of any commit. One process holds one peer or
two; see `benchmarks.workers.same_bits_rank` for clusters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

import shoal
from benchmarks.workers.link import answer

EPOCHS, BATCH = 4, 8
PATIENCE = 60.0  # seconds for what both peers do at once
NEW_EACH_TIME = ("lineage", "line")  # in a state dict: they name the run and this peer
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
COMPRESSION = shoal.compression


# -- what is noted


def digest(data: bytes) -> str:
    """Some of it, for people to compare."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def bits_of(tensor: Tensor) -> str:
    """Of dtype, shape and values; a part of one that is divided between ranks."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach().cpu().contiguous()
    return f"{local.dtype} {tuple(local.shape)} {digest(local.reshape(-1).view(torch.uint8).numpy().tobytes())}"


def flatten(value: Any, at: str, into: dict[str, str]) -> None:
    """All that is in a state dict, by where it is."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in NEW_EACH_TIME:
                flatten(each, f"{at}/{key}", into)
    elif isinstance(value, Tensor):
        into[at] = bits_of(value)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            flatten(each, f"{at}/{number}", into)
    elif isinstance(value, bytes | bytearray):
        try:  # the head of a checkpoint of strands
            found = msgspec.msgpack.decode(value)
        except msgspec.MsgspecError:
            found = None
        if isinstance(found, dict | list):
            flatten(found, at, into)
        else:
            into[at] = digest(bytes(value))
    elif isinstance(value, bool | int | float | str | None):
        into[at] = repr(value)
    elif isinstance(value, io.BytesIO):  # what `torch.save` has written there
        flatten(torch.load(io.BytesIO(value.getvalue()), weights_only=False), at, into)
    else:
        into[at] = (
            f"{type(value).__name__} {value}" if isinstance(value, torch.dtype | torch.Size) else str(type(value))
        )


class Notes:
    """What a case has had, by moment and place."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._lock = threading.Lock()

    def note(self, at: str, value: Any) -> None:
        """Remember all that is in a value."""
        found: dict[str, str] = {}
        flatten(value, at, found)
        with self._lock:
            self.found |= found

    def model(self, at: str, model: nn.Module) -> None:
        """Remember parameters and buffers."""
        self.note(at, [*model.parameters(), *model.buffers()])


# -- what is trained


class Net(nn.Module):
    """Two layers and a scalar; perhaps normalised, perhaps with a frozen layer before.

    Args:
        normalised: with BatchNorm, whose running statistics are buffers.
        frozen: with a first layer that is not trained.
        seed: of the first values of what is trained.
    """

    def __init__(self, *, normalised: bool = False, frozen: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.base = nn.Linear(6, 6).requires_grad_(False) if frozen else nn.Identity()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 11)
        self.norm = nn.BatchNorm1d(11) if normalised else nn.Identity()
        self.second = nn.Linear(11, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.norm(self.first(self.base(x))))) * self.scale


def batch_of(number: int, part: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs and outputs of a step of a peer, or of a rank."""
    made = torch.Generator().manual_seed(1000 * number + part)
    return torch.randn(size, 6, generator=made), torch.randn(size, 3, generator=made)


def loss_of(model: Any, number: int, part: int) -> Tensor:
    """The mean loss of that batch."""
    inputs, outputs = batch_of(number, part)
    return nn.functional.mse_loss(model(inputs), outputs)


Make = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.3, max_iter=3)


def together(params: Any) -> torch.optim.Optimizer:
    matrices, rest = shoal.Together.divide(params, lambda _, parameter: parameter.ndim == 2)
    return shoal.Together(momentum(matrices), adamw(rest))


def falling(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, gamma=0.9)


class Averaging(torch.optim.Optimizer):
    """SGD that has train() and eval(), between which the parameters move."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "train_mode": True})

    def train(self) -> None:
        self._become(True, 0.1)

    def eval(self) -> None:
        self._become(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _become(self, train: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] is not train else ():
                if parameter in self.state:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, 0.1)


# -- how


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a peer trains.

    Attributes:
        options: of the `shoal.Optimizer`; or a function that makes them from the model.
        make: the model.
        optimizer, scheduler: functions that make them.
        steps: of each peer in an epoch.
        how: "backward" before the step, a "closure", or a "scaler" of the loss.
        settles: take the result of what runs in the background after each step: when it would come is chance.
        counted: the epoch ends by the number of steps alone, so nobody steps without samples until it has ended.
        is_last_noted: note the optimizer's state at the very end only, since to ask for it ends what overlaps.
    """

    options: Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]] = field(default_factory=dict)
    make: Callable[..., nn.Module] = Net
    optimizer: Make = adamw
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = falling
    steps: int = 2
    how: str = "backward"
    settles: bool = False
    counted: bool = False
    is_last_noted: bool = False


def outer(
    *,
    inner_steps: int | None = 4,
    settles: bool = False,
    last: bool = False,
    more: Mapping[str, Any] = {},
    **given: Any,
) -> Mode:
    """DiLoCo; with `inner_steps=None` an epoch has so many samples."""
    options = {"outer": shoal.DiLoCo(inner_steps=inner_steps, **given), **more}
    steps = (inner_steps or 3) // given.get("fragments", 1)
    if inner_steps is not None:
        options["target_batch_size"] = None
    return Mode(options=options, steps=steps, settles=settles, counted=inner_steps is not None, is_last_noted=last)


def buffers(model: nn.Module) -> dict[str, Any]:
    return {"extra_tensors": list(model.buffers())}


DELAYED_STEP = {"offload_optimizer": True, "delay_optimizer_step": True}
DELAYED = {**DELAYED_STEP, "delay_grad_averaging": True}
LOCAL = {"use_local_updates": True}
LOCAL_AT_ONCE = {**LOCAL, "delay_state_averaging": False}
NORMALISED = functools.partial(Net, normalised=True)
FROZEN = functools.partial(Net, frozen=True)
POWER_SGD = functools.partial(shoal.PowerSGDGradientAverager, averager_rank=1, min_compression_ratio=0.9)

ANY: dict[str, Mode] = {
    "AdamW, scheduler": Mode(),
    "SGD with momentum": Mode(optimizer=momentum, scheduler=None),
    "max_grad_norm": Mode(options={"max_grad_norm": 0.1}),
    "extra_tensors": Mode(make=NORMALISED, options=buffers),
    "reuse_grad_buffers": Mode(options={"reuse_grad_buffers": True}),
    "offload_optimizer": Mode(options={"offload_optimizer": True}),
    "delay_optimizer_step": Mode(options=DELAYED_STEP, settles=True),
    "delay_grad_averaging": Mode(options=DELAYED, settles=True),
    "delay_grad_averaging, extra_tensors": Mode(
        make=NORMALISED, options=lambda model: {**DELAYED, **buffers(model)}, settles=True
    ),
    "local updates": Mode(options=LOCAL_AT_ONCE),
    "local updates, delayed": Mode(options=LOCAL, settles=True),
    "local updates, statistics": Mode(options={**LOCAL_AT_ONCE, "average_opt_statistics": ["exp_avg", "exp_avg_sq"]}),
    "local updates, every other epoch": Mode(options={**LOCAL_AT_ONCE, "average_state_every": 2}),
    "average_opt_statistics": Mode(options={"average_opt_statistics": ["exp_avg_sq"]}),
    "closure": Mode(how="closure"),
    "closure, local updates": Mode(options=LOCAL_AT_ONCE, how="closure"),
    "LBFGS, local updates": Mode(optimizer=lbfgs, scheduler=None, options=LOCAL_AT_ONCE, how="closure"),
    "Together": Mode(optimizer=together),
    "Float16 gradients": Mode(options={"grad_compression": COMPRESSION.Float16Compression()}),
    "8-bit gradients, error_feedback": Mode(
        options={"grad_compression": COMPRESSION.BlockwiseQuantization(), "error_feedback": 1.0}
    ),
    "GradientAverager": Mode(options={"grad_averager_factory": shoal.GradientAverager}),
    "GradientAverager, offload": Mode(
        options={"grad_averager_factory": shoal.GradientAverager, "offload_optimizer": True}
    ),
    "GradientAverager, reuse_grad_buffers": Mode(
        options={"grad_averager_factory": shoal.GradientAverager, "reuse_grad_buffers": True}
    ),
    "PowerSGD": Mode(options={"grad_averager_factory": POWER_SGD}),
    "PowerSGD, delay_grad_averaging": Mode(options={**DELAYED, "grad_averager_factory": POWER_SGD}, settles=True),
    "frozen_parameters sample": Mode(make=FROZEN, options={"frozen_parameters": "sample"}),
    "frozen_parameters hash": Mode(make=FROZEN, options={"frozen_parameters": "hash"}),
    "frozen_parameters send": Mode(make=FROZEN, options={"frozen_parameters": "send"}),
    "frozen_parameters own": Mode(make=FROZEN, options={"frozen_parameters": "own"}),
    "frozen_parameters send, offload": Mode(
        make=FROZEN, options={"frozen_parameters": "send", "offload_optimizer": True}
    ),
    "DiLoCo": outer(),
    "DiLoCo, target_batch_size": outer(inner_steps=None),
    "DiLoCo, extra_tensors": Mode(
        make=NORMALISED,
        steps=4,
        options=lambda model: {
            "outer": shoal.DiLoCo(inner_steps=4),
            "target_batch_size": None,
            **buffers(model),
        },
        counted=True,
    ),
    "DiLoCo, fragments": outer(fragments=2),
    "DiLoCo, overlap 1": outer(overlap=1, last=True),
    "DiLoCo, overlap 2": outer(overlap=2, last=True),
    "DiLoCo, overlap 1, fragments, keep": outer(inner_steps=8, fragments=2, overlap=1, mix="keep", last=True),
    "DiLoCo, overlap free": outer(inner_steps=None, overlap="free", settles=True),
    "DiLoCo, overlap free, keep": outer(inner_steps=None, overlap="free", mix="keep", settles=True),
    "DiLoCo, mix 0.5": outer(mix=0.5),
    "DiLoCo, offload": outer(more={"offload_optimizer": True}),
    "DiLoCo, torch's SGD outside": outer(optimizer=momentum),
    "DiLoCo, Float16, error_feedback": outer(
        more={"grad_compression": COMPRESSION.Float16Compression(), "error_feedback": 1.0}
    ),
    "DiLoCo, 8 bit, error_feedback": outer(
        more={"grad_compression": COMPRESSION.BlockwiseQuantization(), "error_feedback": 0.5}
    ),
    "DiLoCo, max_grad_norm": outer(more={"max_grad_norm": 0.01}),
    "DiLoCo, closure": Mode(
        options={"outer": shoal.DiLoCo(inner_steps=2), "target_batch_size": None}, how="closure", counted=True
    ),
}
"""With one peer, and with two."""

STRANDS: dict[str, Mode] = {
    "strands": Mode(options=lambda model: strands_of(4)),
    "strands, max_grad_norm": Mode(options=lambda model: {**strands_of(4), "max_grad_norm": 0.1}),
    "strands, DiLoCo": Mode(
        options=lambda model: {
            **strands_of(4), "outer": shoal.DiLoCo(inner_steps=2), "target_batch_size": None,
        },
        counted=True,
    ),
}  # fmt: skip
"""Of processes that are peers of a run with clusters."""


def strands_of(count: int) -> dict[str, Any]:
    return {"cluster": shoal.Cluster(strands=count)}


ALONE: dict[str, Mode] = {
    "GradScaler": Mode(how="scaler"),
    "GradScaler, reuse_grad_buffers": Mode(how="scaler", options={"reuse_grad_buffers": True}),
    "GradScaler, local updates": Mode(how="scaler", options=LOCAL_AT_ONCE),
    "LBFGS, DiLoCo": Mode(
        optimizer=lbfgs,
        scheduler=None,
        options={"outer": shoal.DiLoCo(inner_steps=2), "target_batch_size": None},
        how="closure",
        counted=True,
    ),
}
"""With one peer."""

RESUMED = (
    "AdamW, scheduler", "offload_optimizer", "delay_grad_averaging", "local updates", "reuse_grad_buffers",
    "GradientAverager", "PowerSGD", "DiLoCo", "DiLoCo, fragments", "DiLoCo, overlap 2", "DiLoCo, offload",
    "DiLoCo, torch's SGD outside", "8-bit gradients, error_feedback", "frozen_parameters send", "Together",
)  # fmt: skip
"""Saved, and loaded into a new optimizer."""

JOINED = (
    "AdamW, scheduler", "extra_tensors", "offload_optimizer", "delay_grad_averaging", "local updates, statistics",
    "PowerSGD", "frozen_parameters send", "DiLoCo", "DiLoCo, fragments", "DiLoCo, offload",
)  # fmt: skip
"""Downloaded by a third peer."""


EVALUATED: dict[str, Mapping[str, Any]] = {
    "at once": {},
    "offload_optimizer": {"offload_optimizer": True},
    "local updates": LOCAL_AT_ONCE,
    "DiLoCo": {"outer": shoal.DiLoCo(inner_steps=2), "target_batch_size": None},
}
"""With `train()` and `eval()`."""

_SEEDED = threading.Lock()  # there is one generator for all threads


class Peer:
    """A model and its optimizer.

    Args:
        dht: of this peer.
        run_id: of the run.
        number: of this peer: which batches it has.
        peers: how many train.
        mode: how.
        seed: of the model.
        wrap: what makes the module that is called, and may shard the model.
        more: arguments of the optimizer.
    """

    def __init__(
        self,
        dht: shoal.DHT | None,
        run_id: str,
        number: int,
        peers: int,
        mode: Mode,
        seed: int = 0,
        wrap: Callable[[nn.Module], Any] = lambda model: model,
        **more: Any,
    ) -> None:
        self.mode, self.number, self.steps = mode, number, 0
        with _SEEDED:
            self.model = mode.make(seed=seed)
        self.module = wrap(self.model)
        options = mode.options(self.model) if callable(mode.options) else mode.options
        self._clears = not options.get("reuse_grad_buffers", False)
        self.optimizer = shoal.Optimizer(
            **{
                "dht": dht,
                "run_id": run_id,
                "target_batch_size": peers * mode.steps * BATCH,
                "batch_size_per_step": BATCH,
                "params": self.model.named_parameters(),
                "optimizer": mode.optimizer,
                "scheduler": mode.scheduler,
                "min_peers": peers,
                "matchmaking_time": 30.0,
                "averager_opts": {"bandwidth": 0.0 if number else 1.0},  # a lossy codec depends on who reduces
                **options,
                **more,
            }
        )
        self._scaler = shoal.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if mode.how == "scaler" else None
        self.returned: Any = None

    def step(self) -> None:
        """Train on the next batch."""
        number, optimizer, model = self.steps, self.optimizer, self.module
        self.steps += 1
        if self.mode.how == "closure":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, number, self.number)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            self.returned = optimizer.step(closure)
            return
        loss = loss_of(model, number, self.number)
        if self._scaler is not None:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            self.returned = optimizer.step()
        if self._clears:
            optimizer.zero_grad()

    def train(self, epoch: int, step: int) -> None:
        """Make that step of an epoch; if it is the last, be in a later epoch."""
        self.step()
        self.settle()
        # In the same call: the others may wait for this peer now.
        while step == self.mode.steps - 1 and not self.mode.counted and self.optimizer.local_epoch <= epoch:
            time.sleep(0.001)  # for those for whom it waits
            self.optimizer.step(batch_size=0)
            self.settle()

    def note_step(self, notes: Notes, epoch: int, step: int) -> None:
        """Remember what it has after that step."""
        with_state = step == self.mode.steps - 1 and not self.mode.is_last_noted
        self.note(notes, f"epoch {epoch} step {step}", with_state=with_state)

    def settle(self) -> None:
        """Take the result of what runs in the background."""
        if self.mode.settles:
            self.optimizer.state_dict()

    def note(self, notes: Notes, at: str, *, with_state: bool) -> None:
        """Remember all that it has."""
        at = f"{at}, peer {self.number}"
        notes.note(f"{at}: epoch", self.optimizer.local_epoch)
        notes.model(f"{at}: model", self.model)
        notes.note(f"{at}: returned", self.returned)
        if with_state:
            notes.note(f"{at}: state", self.optimizer.state_dict())


class Place:
    """What all cases of a process share: nodes of the DHT, and a thread for each peer.

    Args:
        identities: files with the keys of the peers, as gradients are summed in their order.
    """

    def __init__(self, identities: Sequence[str]) -> None:
        self.dhts: list[shoal.DHT] = []
        for identity in identities:
            known = [str(address) for dht in self.dhts[:1] for address in dht.get_visible_maddrs()]
            self.dhts.append(shoal.DHT(known, start=True, host_maddrs=[LOOPBACK], identity_path=identity))
        self._threads = [ThreadPoolExecutor(1, f"trainer {n}") for n in range(len(identities))]
        self._runs = 0

    def run_id(self) -> str:
        """A new one."""
        self._runs += 1
        return f"same bits {self._runs}"

    def at_once(self, acts: Iterable[Callable[[], Any]]) -> list[Any]:
        """Each in the thread of its peer."""
        futures = [thread.submit(act) for thread, act in zip(self._threads, acts, strict=False)]
        return [future.result(PATIENCE) for future in futures]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False)
        for dht in reversed(self.dhts):
            dht.shutdown()

    # -- a training

    def peers(self, mode: Mode, count: int, run_id: str = "", **more: Any) -> list[Peer]:
        """So many peers of a new run."""
        run_id = run_id or self.run_id()
        acts = [
            functools.partial(Peer, dht, run_id, number, count, mode, **more)
            for number, dht in enumerate(self.dhts[:count])
        ]
        return self.at_once(acts)

    def train(self, peers: Sequence[Peer], notes: Notes, epochs: int, first: int = 0) -> None:
        """Some epochs, all peers in lockstep."""
        for epoch in range(first, first + epochs):
            for step in range(peers[0].mode.steps):
                self.at_once(functools.partial(peer.train, epoch, step) for peer in peers)
                self.at_once(functools.partial(peer.note_step, notes, epoch, step) for peer in peers)

    def leave(self, peers: Sequence[Peer], notes: Notes) -> None:
        """End it, and remember what is left."""
        self.at_once(functools.partial(_note, peer, notes, "at the end") for peer in peers)
        self.at_once(peer.optimizer.shutdown for peer in peers)
        for peer in peers:
            notes.model(f"after shutdown, peer {peer.number}: model", peer.model)


Case = Callable[[Place, Notes], None]


def trained(mode: Mode, count: int) -> Case:
    def case(place: Place, notes: Notes) -> None:
        peers = place.peers(mode, count)
        place.train(peers, notes, EPOCHS)
        place.leave(peers, notes)

    return case


def resumed(mode: Mode, count: int) -> Case:
    """Saved after some epochs and a step, and loaded into new optimizers."""

    def case(place: Place, notes: Notes) -> None:
        before = place.peers(mode, count)
        place.train(before, notes, 2)
        if not mode.is_last_noted:
            place.at_once(peer.step for peer in before)
        saved = place.at_once(functools.partial(_saved, peer) for peer in before)
        place.at_once(peer.optimizer.shutdown for peer in before)
        after = place.peers(mode, count)
        place.at_once(functools.partial(_load, peer, each) for peer, each in zip(after, saved, strict=True))
        place.at_once(functools.partial(_note, peer, notes, "loaded") for peer in after)
        epoch = after[0].optimizer.local_epoch
        for peer in after:
            peer.steps = 100
        place.train(after, notes, 2, epoch)
        place.leave(after, notes)

    return case


def _note(peer: Peer, notes: Notes, at: str) -> None:
    peer.note(notes, at, with_state=True)


def _saved(peer: Peer) -> dict[str, Any]:
    state = copy.deepcopy(peer.optimizer.state_dict())
    return {"model": copy.deepcopy(peer.model.state_dict()), "optimizer": state}


def _load(peer: Peer, saved: dict[str, Any]) -> None:
    peer.model.load_state_dict(saved["model"])
    peer.optimizer.load_state_dict(saved["optimizer"])


def joined(mode: Mode) -> Case:
    """Two peers, whose state a third one downloads, which began otherwise."""

    def case(place: Place, notes: Notes) -> None:
        run_id = place.run_id()
        peers = place.peers(mode, 2, run_id)
        place.train(peers, notes, 2)
        late = Peer(place.dhts[2], run_id, 2, 2, mode, seed=5)
        notes.note("downloaded", late.optimizer.load_state_from_peers())
        late.note(notes, "downloaded", with_state=True)
        late.optimizer.shutdown()
        place.leave(peers, notes)

    return case


def evaluated(options: Mapping[str, Any]) -> Case:
    """`train()` and `eval()` of an optimizer that has them."""

    def case(place: Place, notes: Notes) -> None:
        mode = Mode(options=options, optimizer=Averaging, scheduler=None, counted="outer" in options)
        (peer,) = peers = place.peers(mode, 1)
        for epoch in range(EPOCHS):
            place.at_once([peer.optimizer.train])
            place.train(peers, notes, 1, epoch)
            place.at_once([peer.optimizer.eval])
            place.at_once([functools.partial(_note, peer, notes, f"epoch {epoch} in eval")])
        place.leave(peers, notes)

    return case


def in_turn(modes: Sequence[Mode]) -> Case:
    """Several runs of each peer in one thread, which each trains in another order."""

    def case(place: Place, notes: Notes) -> None:
        runs = [place.peers(mode, 2) for mode in modes]
        orders = [list(peers) for peers in zip(*runs, strict=True)]
        orders[1].reverse()

        def turn(peers: Sequence[Peer], epoch: int) -> None:
            for _ in range(modes[0].steps):
                for peer in peers:
                    peer.step()
            while any(peer.optimizer.local_epoch <= epoch for peer in peers):
                for peer in peers:
                    if peer.optimizer.local_epoch <= epoch:
                        peer.optimizer.step(batch_size=0)

        for epoch in range(EPOCHS):
            place.at_once(functools.partial(turn, peers, epoch) for peers in orders)
            for run, peers in enumerate(runs):
                place.at_once(functools.partial(_note, peer, notes, f"epoch {epoch}, run {run}") for peer in peers)
        for peers in runs:
            place.leave(peers, notes)

    return case


def with_roles(place: Place, notes: Notes) -> None:
    """One peer can't be dialled, and an auxiliary one helps."""
    run_id, mode = place.run_id(), Mode()
    peers = place.at_once(
        functools.partial(Peer, dht, run_id, number, 2, mode, client_mode=number == 1)
        for number, dht in enumerate(place.dhts[:2])
    )
    done = threading.Event()
    helper = shoal.Optimizer(
        dht=place.dhts[2],
        run_id=run_id,
        target_batch_size=2 * mode.steps * BATCH,
        params=Net().named_parameters(),
        optimizer=adamw,
        scheduler=falling,
        auxiliary=True,
        min_peers=2,
        matchmaking_time=1.0,
    )

    def help_them() -> None:
        while not done.is_set():
            helper.step()

    thread = threading.Thread(target=help_them)
    thread.start()
    try:
        place.train(peers, notes, EPOCHS)
    finally:
        done.set()
        thread.join()
        helper.shutdown()
    place.leave(peers, notes)


CASES: dict[str, Case] = {
    **{f"alone: {name}": trained(mode, 1) for name, mode in {**ANY, **ALONE, **STRANDS}.items()},
    **{f"alone, resumed: {name}": resumed(ANY[name], 1) for name in RESUMED},
    **{f"alone, train and eval: {name}": evaluated(options) for name, options in EVALUATED.items()},
    **{f"two peers: {name}": trained(mode, 2) for name, mode in {**ANY, **STRANDS}.items()},
    **{f"two peers, resumed: {name}": resumed(ANY[name], 2) for name in ("AdamW, scheduler", "PowerSGD", "DiLoCo")},
    **{f"newcomer: {name}": joined(ANY[name]) for name in JOINED},
    "two peers, two runs in turn": in_turn([ANY["AdamW, scheduler"], ANY["SGD with momentum"]]),
    "two peers, local updates in turn": in_turn([ANY["local updates"], ANY["AdamW, scheduler"]]),
    "two peers, one in client mode, and an auxiliary": with_roles,
}  # fmt: skip


def settle_at_once() -> None:
    """The first round of a run does not wait for peers that nobody has found yet, since `min_peers` says how many."""
    with contextlib.suppress(ImportError):
        importlib.import_module("shoal.swarm.protocol.peer").__dict__["SETTLE_SECONDS"] = 0.0


class Worker:
    """Answers what each case has noted."""

    def __init__(self) -> None:
        self._place: Place | None = None

    def handle(self, command: str, **given: Any) -> Any:
        """The methods below, by name."""
        if command not in ("open", "names", "case"):
            raise ValueError(f"no command is named {command!r}")
        return getattr(self, command)(**given)

    def names(self) -> list[str]:
        return list(CASES)

    def open(self, identities: list[str]) -> None:
        """Begin; keys that are not there are made."""
        self._place = Place(identities)

    def case(self, name: str) -> dict[str, str]:
        assert self._place is not None
        notes = Notes()
        CASES[name](self._place, notes)
        return notes.found

    def close(self) -> None:
        if self._place is not None:
            self._place.close()


def prepare() -> None:
    """What every process does first."""
    torch.set_num_threads(1)
    settle_at_once()
    importlib.import_module("torch._dynamo")  # an optimizer's first step would
    gc.collect()
    gc.freeze()  # what was imported: an optimizer looks through all else when it is made
    print(f"with {shoal.__file__}", file=sys.stderr)


if __name__ == "__main__":
    prepare()
    worker = Worker()
    answer(worker.handle, worker.close)
