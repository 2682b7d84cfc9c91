"""The worlds in which each optimizer trains, beside the same optimizer alone in a plain loop."""

from __future__ import annotations

import io
import logging
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import shoal
import shoal.swarm.protocol.peer
from tests.zoo.classes import Entry, Model, begin, drive, of_two_kinds
from tests.zoo.outcome import Kind, Outcome

EPOCHS = 8
FLOOD = 40
"""More log lines than that of one cause are a flood."""
CLOSE = 1e-6
RANDOM_STEPS = 21
JOIN_SECONDS = 25.0
"""How long a newcomer may take until it has had its common epochs."""


class Told(logging.Handler):
    """What Shoal has said, in its log and by warnings."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, str(record.msg), record.getMessage()))

    @property
    def warnings(self) -> list[str]:
        return list(dict.fromkeys(line for level, _, line in self.lines if level >= logging.WARNING))

    @property
    def flood(self) -> str:
        """The line that came too often; "" if none did."""
        causes = Counter(template for level, template, _ in self.lines if level >= logging.WARNING)
        return next((f"{count} lines: {cause}" for cause, count in causes.items() if count > FLOOD), "")


@contextmanager
def listening() -> Iterator[Told]:
    told, log = Told(), logging.getLogger("shoal")
    log.addHandler(told)
    log.setLevel(logging.INFO)
    log.propagate = False
    before = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *rest: Any) -> None:
        if "/shoal/" in filename or "Shoal" in str(message) or "shoal." in str(message):
            told.lines.append((logging.WARNING, str(message), str(message)))

    warnings.showwarning = show  # type: ignore[assignment]
    warnings.simplefilter("always")
    try:
        yield told
    finally:
        warnings.showwarning = before
        log.removeHandler(told)


class Given(Exception):
    """An outcome that is known before the end."""

    def __init__(self, kind: Kind, why: str = "") -> None:
        self.kind, self.why = kind, why


# -- the plain loop


def plain(entry: Entry, steps: int, *, saved_at: int | None = None, seed: int = 0) -> torch.Tensor:
    """The parameters after some steps without Shoal.

    Args:
        saved_at: after so many steps the state is saved, and loaded into a new optimizer.
        seed: of torch's generator, for those that draw random numbers.
    """
    model = Model(entry.needs)
    optimizer = entry.of(model.given(entry))
    torch.manual_seed(seed)
    begin(entry, optimizer)
    for step in range(steps):
        if step == saved_at:
            saved = file_of(model, optimizer)
            model = Model(entry.needs)
            optimizer = entry.of(model.given(entry))
            load(saved, model, optimizer)
            begin(entry, optimizer)
        drive(entry, model, optimizer, step)
    return model.numbers()


def must_work(entry: Entry) -> torch.Tensor:
    """Its parameters after all steps. Raises `Given` if it does not work without Shoal."""
    try:
        return plain(entry, EPOCHS)
    except Exception as error:
        raise Given(Kind.NONE, entry.note or f"alone: {shown(error)}") from error


def is_random(entry: Entry) -> bool:
    """Whether it draws random numbers; some do so in every tenth step."""
    return differ(plain(entry, RANDOM_STEPS), plain(entry, RANDOM_STEPS, seed=1)) > 0


def file_of(model: Model, optimizer: Any) -> bytes:
    """A checkpoint, with the state of torch's generator: the optimizer may draw random numbers."""
    return written({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()})


def load(saved: bytes, model: Model, optimizer: Any) -> str:
    """Continue from a checkpoint. Returns why it can't be read without unpickling; "" if it can."""
    read, word = read_from(saved)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    torch.set_rng_state(read["random"])
    return word


def written(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read_from(saved: bytes) -> tuple[Any, str]:
    """What was saved, and why it can't be read without unpickling; "" if it can."""
    try:
        return torch.load(io.BytesIO(saved), weights_only=True), ""
    except Exception as error:  # noqa: BLE001
        return torch.load(io.BytesIO(saved), weights_only=False), f"torch.load(weights_only=False): {shown(error)}"


# -- comparing


def differ(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """By how much; infinity for what is not a number at one of them only."""
    if torch.equal(ours.isnan(), theirs.isnan()):
        return float((ours - theirs).abs().nan_to_num(0.0).max())
    return float("inf")


def compared(ours: torch.Tensor, theirs: torch.Tensor, told: Told, word: str = "") -> Outcome:
    """The outcome for parameters that should be equal.

    Args:
        word: what is known about the difference beside what Shoal has said.
    """
    found = differ(ours, theirs)
    if not found:
        return Outcome(Kind.EQUAL, word)
    if found <= CLOSE:
        return Outcome(Kind.CLOSE, f"{found:.1e}")
    said = told.warnings
    if said or word:
        return Outcome(Kind.WORD, "; ".join(filter(None, [word, *said[:1]])))
    return Outcome(Kind.WRONG, f"differs by {found:.1e} in silence")


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def is_shoals(error: BaseException) -> bool:
    """Whether Shoal has raised it in its own words, and it does not come from within."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    if last is None:
        return False
    in_shoal = Path(shoal.__file__).parent in Path(last.filename).parents
    kinds = (ValueError, TypeError, RuntimeError, AttributeError, shoal.AveragingError)
    return in_shoal and isinstance(error, kinds) and (last.line or "").startswith("raise") and len(str(error)) > 30


def of_error(error: BaseException, moved: bool) -> Outcome:
    """The outcome of an error that the plain optimizer does not raise.

    Args:
        moved: whether a parameter has changed in the step that raised it.
    """
    if not is_shoals(error):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(Kind.WRONG, f"crash at {Path(where.filename).name}:{where.lineno}: {shown(error)}")
    return (
        Outcome(Kind.WRONG, f"refused after a step: {shown(error)}") if moved else Outcome(Kind.REFUSED, shown(error))
    )


# -- peers


@contextmanager
def peer(entry: Entry, dht: Any, model: Model, **options: Any) -> Iterator[Any]:
    given = {"target_batch_size": 8, "batch_size_per_step": 8, "matchmaking_time": 4.0, "averaging_timeout": 8.0}
    given |= {"load_state_timeout": 8.0, "run_id": "zoo"} | options
    if entry.of_model:
        optimizer = shoal.Optimizer(dht=dht, optimizer=entry.of(model), **given)
    else:
        optimizer = shoal.Optimizer(dht=dht, params=model.given(entry), optimizer=entry.of, **given)
    try:
        yield optimizer
    finally:
        optimizer.shutdown()


def trained(entry: Entry, steps: int, *, saved_at: int | None = None, **options: Any) -> tuple[torch.Tensor, str]:
    """The parameters after some steps of one peer, and what is to be said about reading its file."""
    word = ""
    with shoal.DHT(start=True) as dht:
        model, first, saved = Model(entry.needs), 0, b""
        for until in [saved_at, steps] if saved_at is not None else [steps]:
            try:
                with peer(entry, dht, model, run_id=f"zoo {first}", **options) as optimizer:
                    torch.manual_seed(0)
                    begin(entry, optimizer)
                    if saved:
                        word = load(saved, model, optimizer)
                        begin(entry, optimizer)
                    for step in range(first, until):
                        before = model.numbers()
                        drive(entry, model, optimizer, step)
                    if until != steps:
                        saved = file_of(model, optimizer)
                        model, first = Model(entry.needs), until
            except Exception as error:
                moved = "before" in locals() and differ(before, model.numbers()) > 0
                raise Given(*_kind_and_why(of_error(error, moved))) from error
    return model.numbers(), word


def _kind_and_why(outcome: Outcome) -> tuple[Kind, str]:
    return outcome.kind, outcome.why


# -- the worlds


def alone(entry: Entry, told: Told) -> Outcome:
    """A run of one peer, 8 epochs of one step."""
    wanted = must_work(entry)
    numbers, _ = trained(entry, EPOCHS)
    return compared(numbers, wanted, told)


def newcomer(entry: Entry, told: Told) -> Outcome:
    """A peer makes 3 epochs alone. Then a second one joins, and they make 8 together."""
    must_work(entry)
    digests: list[dict[int, str]] = [{}, {}]
    errors: list[Exception] = []
    downloads, first = [0, 0], 3

    def seen(number: int) -> Callable[[Any], None]:
        def on_event(event: Any) -> None:
            if isinstance(event, shoal.EpochReport):
                digests[number][event.epoch] = event.state_digest
            downloads[number] += isinstance(event, shoal.DownloadReport)

        return on_event

    def common() -> list[int]:
        return sorted(digests[0].keys() & digests[1].keys())

    with shoal.DHT(start=True) as a, shoal.DHT(initial_peers=a.get_visible_maddrs(), start=True) as b:
        models = [Model(entry.needs), Model(entry.needs)]
        moved = False
        try:
            with peer(entry, a, models[0], target_batch_size=16, batch_size_per_step=16) as host:
                begin(entry, host)
                for step in range(first):
                    before = models[0].numbers()
                    drive(entry, models[0], host, step)
                host.batch_size_per_step = 8
                with peer(entry, b, models[1], target_batch_size=16) as guest:
                    begin(entry, guest)
                    host.on_event, guest.on_event = seen(0), seen(1)
                    end = time.monotonic() + JOIN_SECONDS

                    def train(number: int, optimizer: Any) -> None:
                        step = first
                        try:
                            while len(common()) < EPOCHS and time.monotonic() < end and not errors:
                                drive(entry, models[number], optimizer, step, 1 + number)
                                step += 1
                                time.sleep(0.005)
                        except Exception as error:  # noqa: BLE001
                            errors.append(error)

                    threads = [threading.Thread(target=train, args=each) for each in enumerate((host, guest))]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
        except Exception as error:  # noqa: BLE001
            moved = "before" in locals() and differ(before, models[0].numbers()) > 0
            errors.append(error)
    both = common()
    unequal = [epoch for epoch in both if digests[0][epoch] != digests[1][epoch]]
    if told.flood:
        return Outcome(Kind.WRONG, f"flood of {told.flood}")
    if errors:
        outcome = of_error(errors[0], moved)
        return outcome
    said = told.warnings[:1]
    if len(both) >= EPOCHS - 2 and not unequal and downloads[1] + downloads[0] <= 1:
        return Outcome(Kind.EQUAL, f"{len(both)} epochs" if len(both) < EPOCHS else "")
    found = f"common epochs {both}, unequal {unequal}, downloads {downloads}"
    telling = [line for line in told.warnings if _tells(line) or ("compute alike" in line and len(unequal) <= 1)]
    if telling:
        return Outcome(Kind.REFUSED if not both else Kind.WORD, f"{telling[0]} ({found})")
    why = [line for _, _, line in told.lines if "epoch" not in line[:6]]
    return Outcome(Kind.WRONG, "; ".join([found, *said, *why]))


_TELLING = ("can't join", "outside of its state", "draws random", "can't travel", "can't have this peer's state")


def _tells(line: str) -> bool:
    return any(part in line for part in _TELLING)


INNER = 4


def diloco(entry: Entry, told: Told) -> Outcome:
    """DiLoCo: the inner steps equal the plain ones; a run that is saved and loaded equals one that is not."""
    wanted = must_work(entry)
    outer = shoal.DiLoCo(inner_steps=EPOCHS + 1)
    first, _ = trained(entry, EPOCHS, outer=outer, target_batch_size=None)
    inner = compared(first, wanted, told)
    if inner.kind is Kind.WRONG:
        return Outcome(Kind.WRONG, f"inner steps: {inner.why}")
    outer = shoal.DiLoCo(inner_steps=INNER)
    whole, _ = trained(entry, 4 * INNER, outer=outer, target_batch_size=None)
    resumed, word = trained(entry, 4 * INNER, saved_at=2 * INNER, outer=outer, target_batch_size=None)
    if differ(whole, resumed) and _forgets(entry, 4 * INNER, 2 * INNER):
        word = "its own state dict leaves something out"
    outcome = compared(resumed, whole, told, word)
    return inner if outcome.kind is Kind.EQUAL and inner.kind is not Kind.EQUAL else outcome


def resume(entry: Entry, told: Told) -> Outcome:
    """Saved after half of the epochs, and loaded into a new run."""
    must_work(entry)
    whole, _ = trained(entry, EPOCHS)
    resumed, word = trained(entry, EPOCHS, saved_at=EPOCHS // 2)
    if differ(whole, resumed) and _forgets(entry, EPOCHS, EPOCHS // 2):
        word = "its own state dict leaves something out"
    return compared(resumed, whole, told, word)


def _forgets(entry: Entry, steps: int, saved_at: int) -> bool:
    """Whether the plain optimizer does not continue from its own state dict."""
    try:
        return differ(plain(entry, steps), plain(entry, steps, saved_at=saved_at)) > 0
    except Exception:  # noqa: BLE001
        return True


def contiguous(entry: Entry, told: Told) -> Outcome:
    """Over `ContiguousParams`."""
    wanted = must_work(entry)
    if entry.of_model or entry.named:
        raise Given(Kind.NONE, "it is made of a model, or of names")
    model = Model(entry.needs)
    try:
        parameters = shoal.ContiguousParams(model.given(entry))
        optimizer = entry.of(parameters.contiguous())
        torch.manual_seed(0)
        begin(entry, optimizer)
        for step in range(EPOCHS):
            before = model.numbers()
            drive(entry, model, optimizer, step)
            parameters.assert_buffer_is_valid()
    except Exception as error:  # noqa: BLE001
        moved = "before" in locals() and differ(before, model.numbers()) > 0
        outcome = of_error(error, moved)
        if outcome.kind is Kind.WRONG and told.warnings:  # it was told that this class is not for flat memory
            return Outcome(Kind.WORD, f"{told.warnings[0]} ({outcome.why})")
        return outcome
    return compared(model.numbers(), wanted, told)


def zero(entry: Entry, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank of `ZeroRedundancyOptimizer`: the parameters after all steps, and those of a run that was saved after
    half of them."""

    def run(saved_at: int | None) -> torch.Tensor:
        model = Model(entry.needs)
        optimizer = made(model)
        torch.manual_seed(0)
        for step in range(EPOCHS):
            if step == saved_at:
                optimizer.consolidate_state_dict(to=0)
                state = [file_of(model, optimizer) if rank == 0 else b""]
                torch.distributed.broadcast_object_list(state, 0)
                model = Model(entry.needs)
                optimizer = made(model)
                load(state[0], model, optimizer)
            drive(entry, model, optimizer, step)
        return model.numbers()

    def made(model: Model) -> Any:
        given = of_two_kinds(model.given(entry)) if hasattr(entry.make, "wants_kinds") else model.given(entry)
        optimizer = shoal.ZeroRedundancyOptimizer(given, entry.make, **entry.options)
        begin(entry, optimizer)
        return optimizer

    return run(None), run(EPOCHS // 2)


WORLDS: dict[str, Callable[[Entry, Told], Outcome]] = {
    "alone": alone,
    "newcomer": newcomer,
    "diloco": diloco,
    "resume": resume,
    "contiguous": contiguous,
}
