"""The optimizers of other people that are tried: 205 of twelve packages, each with its arguments.

The packages are in an environment of their own (`make optimizers`), so they are imported by name: nothing here has
their types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import Any

import torch
from torch import nn


class Drive(Enum):
    """How a package asks that its optimizer be stepped."""

    STEP = "backward(), step()"
    CLOSURE = "step(closure)"
    AGAIN = "backward(), step(closure)"
    LOSS = "backward(), step(lambda: float(loss))"
    GRAPH = "backward(create_graph=True), step()"


class Needs(Enum):
    """The model that an optimizer can train."""

    ANY = "matrices and vectors"
    MATRICES = "matrices only"
    SPARSE = "sparse gradients"
    LARGE = "a matrix of 4,096 numbers or more"  # what is smaller keeps its bits


@dataclass(frozen=True)
class Entry:
    """An optimizer.

    Attributes:
        name: in the table.
        make: makes the optimizer of parameters; of a model with `of_model`.
        options: those with which `make` is called.
        drive: how it is stepped.
        needs: the model that it can train.
        named: it takes the parameters with their names.
        of_model: it takes the model.
        modes: the script calls `train()` before the first step.
        note: why it does not step without Shoal either; "" if it does.
    """

    name: str
    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    drive: Drive = Drive.STEP
    needs: Needs = Needs.ANY
    named: bool = False
    of_model: bool = False
    modes: bool = False
    note: str = ""

    def of(self, params: Any) -> Any:
        """The optimizer."""
        return self.make(params, **self.options)


def entries() -> list[Entry]:
    """All that are tried, in the order of the table.

    Raises:
        ImportError: if a package is missing.
    """
    found = [one for package in _PACKAGES for one in package()]
    names = [one.name for one in found]
    assert len(names) == len(set(names)), "a name is there twice"
    return found


def _names(text: str) -> list[str]:
    return text.split()


# Torch's own kernels round in other ways on flat memory than on single tensors. The plain loop does not.
_PLAIN = {"foreach": False, "fused": False}


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=False, fused=False)


def _accepted(make: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that it has."""
    known = inspect.signature(make).parameters
    return {name: value for name, value in options.items() if name in known}


_TORCHS = _names("SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD")


def _torch() -> Iterator[Entry]:
    of = torch.optim
    for name in _TORCHS:
        make = getattr(of, name)
        options = {"lr": 0.01} | _accepted(make, _PLAIN) | ({"momentum": 0.9} if name == "SGD" else {})
        yield Entry(f"torch.{name}", make, options)
    yield Entry("torch.Adafactor", of.Adafactor, {"lr": 0.01})
    yield Entry("torch.LBFGS", of.LBFGS, {"lr": 0.1}, drive=Drive.CLOSURE)
    yield Entry("torch.SparseAdam", of.SparseAdam, {"lr": 0.01}, needs=Needs.SPARSE)
    yield Entry("torch.Muon", of.Muon, {"lr": 0.01}, needs=Needs.MATRICES)


_WITHOUT_RATE = _names("Prodigy DAdaptAdam DAdaptSGD DAdaptAdan DAdaptLion DAdaptAdaGrad AdamG")
_POS_OWN = _names("""
    A2Grad ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGC AdaHessian AdaMax AdaMod AdaNorm
    AdaPNM AdaShift AdaSmooth AdaTAM Adai Adalite AdamC AdamG AdamMini AdamP AdamS AdamWSN Adan AggMo Aida Alice Amos
    Ano ApolloDQN AvaGrad BCOS CAME Conda DASH DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD DiffGrad
    DualAdam EXAdam EmoFact EmoLynx EmoNavi FAdam FOCUS FTRL Fira Fromage GaLore Grams Gravity GrokFastAdamW Kate Kron
    LARS LaProp Lamb Lion LoRARite MADGRAD MARS MSVAG Magma Nero NovoGrad PAdam PID PNM Prodigy QHAdam QHM RACS ROSE
    Ranger SGDP SGDSaI SGDW SM3 SOAP SPAM SPlus SRMM SWATS SaRA ScalableShampoo ScheduleFreeAdamW ScheduleFreeRAdam
    ScheduleFreeSGD Shampoo SignSGD SimplifiedAdEMAMix SophiaH SpectralSphere StableAdamW StableSPAM TAM Tiger VSGD Yogi
    Ranger21 SCION SCIONLight FlashAdamW
""")
_POS_MUONS = _names("Muon AdaMuon AdaGO NorMuon MuonClip")


def _pytorch_optimizer() -> Iterator[Entry]:
    po = import_module("pytorch_optimizer")
    for name in _POS_OWN:
        make = getattr(po, name)
        options = {} if name in _WITHOUT_RATE else _accepted(make, {"lr": 1e-2})
        special: dict[str, Any] = {}
        match name:
            case "AdaHessian" | "SophiaH":
                special = {"drive": Drive.GRAPH}
            case "AdamMini":
                special, options = {"of_model": True}, options | {"num_heads": 2, "num_embeds": 8}
            case "Ranger21":
                options = options | {"num_iterations": 1000}
            case "SpectralSphere":
                special = {"needs": Needs.MATRICES}
        yield Entry(f"po.{name}", make, options, **special)
    for name in _POS_MUONS:
        yield Entry(f"po.{name}", _of_two_kinds(getattr(po, name)))
    yield Entry("po.AliG", po.AliG, drive=Drive.LOSS)
    yield Entry("po.Lookahead(AdamW)", lambda params: po.Lookahead(_adamw(params), k=3))
    yield Entry("po.TRAC(AdamW)", lambda params: po.TRAC(_adamw(params)))
    yield Entry("po.OrthoGrad(AdamW)", lambda params: po.OrthoGrad(_adamw(params)))
    yield Entry("po.SFWrapper(AdamW)", lambda params: po.ScheduleFreeWrapper(_adamw(params)), modes=True)
    sgd = {"base_optimizer": torch.optim.SGD, "lr": 1e-2}
    yield Entry("po.SAM(SGD)", po.SAM, sgd, drive=Drive.AGAIN)
    yield Entry(
        "po.GSAM(SGD)", lambda params: _gsam(po, params), drive=Drive.AGAIN, note="it wants a model and a scheduler"
    )
    yield Entry("po.BSAM", po.BSAM, {"num_data": 100}, drive=Drive.AGAIN)
    yield Entry("po.LookSAM(SGD)", po.LookSAM, sgd, drive=Drive.AGAIN)


def _gsam(po: Any, params: Any) -> Any:
    return po.GSAM(params, base_optimizer=torch.optim.SGD(params, lr=1e-2), model=None, rho_scheduler=None)


def _of_two_kinds(make: Callable[..., Any]) -> Callable[[Any], Any]:
    """Muon for matrices, and the class's own AdamW for vectors."""

    def made(params: Iterable[Any]) -> Any:
        given = list(params)
        return make(given if given and isinstance(given[0], dict) else of_two_kinds(given))

    made.wants_kinds = True  # type: ignore[attr-defined]
    return made


def of_two_kinds(params: Iterable[Any]) -> list[dict[str, Any]]:
    """The groups that such a class wants."""
    given = list(params)
    kinds = ([p for p in given if p.ndim >= 2], True), ([p for p in given if p.ndim < 2], False)
    return [{"params": some, "use_muon": is_muon} for some, is_muon in kinds if some]


def _schedulefree() -> Iterator[Entry]:
    sf = import_module("schedulefree")

    def trained(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(params: Any, **options: Any) -> Any:
            optimizer = make(params, **options)
            optimizer.train()
            return optimizer

        return made

    names = [f"{of}ScheduleFree{kind}" for kind in ("", "Reference", "Paper") for of in ("AdamW", "SGD")]
    for name in [one for one in names if one != "SGDScheduleFreePaper"] + ["RAdamScheduleFree"]:
        make = getattr(sf, name)
        yield Entry(f"sf.{name}", trained(make), {"lr": 1e-2} | _accepted(make, {"foreach": False}))
    for name in ("SGDScheduleFreeClosure", "AdamWScheduleFreeClosure"):  # without train(): the closure is called there
        yield Entry(f"sf.{name}", getattr(sf, name), {"lr": 1e-2}, drive=Drive.CLOSURE)
    yield Entry("sf.AdamWScheduleFree.untrained", sf.AdamWScheduleFree, {"lr": 1e-2, "foreach": False}, modes=True)
    note = "its state is there before AdamW looks whether there is any: KeyError 'exp_avg'"
    yield Entry("sf.Wrapper(AdamW)", trained(lambda params: sf.ScheduleFreeWrapper(_adamw(params))), note=note)


def _small_packages() -> Iterator[Entry]:
    lion, prodigy = import_module("lion_pytorch"), import_module("prodigyopt")
    yield Entry("lion_pytorch.Lion", lion.Lion, {"lr": 1e-3})
    yield Entry("prodigyopt.Prodigy", prodigy.Prodigy, {"lr": 1.0})
    yield Entry("prodigyopt.Prodigy.slice11", prodigy.Prodigy, {"lr": 1.0, "slice_p": 11})
    yield Entry("came_pytorch.CAME", import_module("came_pytorch").CAME, {"lr": 1e-3})
    adaptation = import_module("dadaptation")
    for name in ("DAdaptAdam", "DAdaptSGD", "DAdaptAdan", "DAdaptLion", "DAdaptAdaGrad"):
        yield Entry(f"dadaptation.{name}", getattr(adaptation, name))
    mini = {"lr": 1e-3, "dim": 8, "n_heads": 2}
    yield Entry("adam_mini.Adam_mini", import_module("adam_mini").Adam_mini, mini, named=True)
    note = "it calls a function that its package does not have: NameError 'muon_update'"
    yield Entry("muon_fsdp2.Muon", _of_two_kinds(import_module("muon_fsdp2").Muon), note=note)


_HEAVYBALLS = _names("""
    AdamW SGD RMSprop NAdam ADOPT LaProp Muon MuonAdamW MuonLaProp SOAP SOLP KLSOAP SFAdamW PSGDKron PSGDPRO PSGDLRA
    OrthoLaProp LaPropOrtho SignLaProp Scion AdEMAMix AdamC UnscaledAdamW SUDSAdamW HeavySOAP MSAMLaProp HyperBallAdamW
    LATHER QSGD
""")


def _heavyball() -> Iterator[Entry]:
    heavyball = import_module("heavyball")
    heavyball.utils.compile_mode = None  # compiling takes a minute for each
    for name in _HEAVYBALLS:
        yield Entry(f"hb.{name}", getattr(heavyball, name), {"lr": 1e-2})


def _torchao() -> Iterator[Entry]:
    ao = import_module("torchao.optim")
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "_AdamW"):
        yield Entry(f"ao.{name}", getattr(ao, name), {"lr": 1e-2}, needs=Needs.LARGE)
    yield Entry(
        "ao.CPUOffload",
        lambda params: ao.CPUOffloadOptimizer(params, torch.optim.AdamW, lr=1e-2),
        note="it needs a GPU",
    )


_BITSANDBYTES = _names("""
    AdamW AdamW8bit Lion8bit SGD8bit LAMB LARS AdEMAMix AdEMAMix8bit Adagrad8bit RMSprop PagedAdamW
""")


def _bitsandbytes() -> Iterator[Entry]:
    bnb = import_module("bitsandbytes.optim")
    for name in _BITSANDBYTES:
        make, options = getattr(bnb, name), {"lr": 1e-2}
        if name in ("SGD8bit", "LARS"):
            options["momentum"] = 0.9
        if name.endswith("8bit"):  # tensors smaller than that keep 32 bits
            options |= _accepted(make, {"min_8bit_size": 16})
        yield Entry(f"bnb.{name}", make, options, needs=Needs.LARGE)


_PACKAGES = (_torch, _pytorch_optimizer, _schedulefree, _small_packages, _heavyball, _torchao, _bitsandbytes)


# -- models and data


class Model(nn.Module):
    """A small model of what an entry can train."""

    def __init__(self, needs: Needs) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers: nn.Module
        match needs:
            case Needs.SPARSE:
                self.layers = nn.EmbeddingBag(8, 4, mode="sum", sparse=True)
            case Needs.LARGE:
                self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
            case _:
                bias = needs is Needs.ANY
                self.layers = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.Tanh(), nn.Linear(16, 4, bias=bias))

    def loss(self, step: int, of: int = 0) -> torch.Tensor:
        """The loss of a batch of 8, another one in each step and at each peer."""
        generator = torch.Generator().manual_seed(1000 * of + step)
        batch = torch.randn(8, 8, generator=generator)
        if isinstance(self.layers, nn.EmbeddingBag):
            batch = torch.randint(0, 8, (8, 3), generator=generator)
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def numbers(self) -> torch.Tensor:
        """All parameters, as one vector."""
        return torch.cat([p.detach().flatten() for p in self.parameters()])

    def given(self, entry: Entry) -> Any:
        """What the optimizer is made of."""
        if entry.of_model:
            return self
        return list(self.named_parameters()) if entry.named else list(self.parameters())


def drive(entry: Entry, model: Model, optimizer: Any, step: int, of: int = 0) -> None:
    """One batch, as the package asks for it."""

    def closure() -> torch.Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = model.loss(step, of)
            loss.backward()
        return loss

    if entry.drive is Drive.CLOSURE:
        optimizer.step(closure)
        return
    loss = model.loss(step, of)
    loss.backward(create_graph=entry.drive is Drive.GRAPH)
    number = float(loss)
    match entry.drive:
        case Drive.AGAIN:
            optimizer.step(closure)
        case Drive.LOSS:
            optimizer.step(lambda: number)
        case _:
            optimizer.step()
    optimizer.zero_grad()


def begin(entry: Entry, optimizer: Any) -> None:
    """What a script calls before its first batch."""
    if entry.modes:
        optimizer.train()
