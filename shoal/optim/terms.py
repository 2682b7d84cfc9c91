"""What the peers of a run must agree on: the options, shapes and machines that they compare, the rules of rounds."""

from __future__ import annotations

import platform

import torch
from blake3 import blake3

from shoal.averaging.exchange import encoded_bytes
from shoal.averaging.options import described
from shoal.compression import TensorRole, plan_codecs
from shoal.dht.dht import DHT
from shoal.flat import Layout
from shoal.optim.frozen import described_frozen
from shoal.optim.machine import EXACT
from shoal.optim.rounds import Rounds
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.optim.state import State, names_of
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.plan import largest_chunk
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tensors import Tensors
from shoal.swarm.protocol.view import Role


def make_run(settings: Settings, dht: DHT, state: State, rounds: Rounds) -> Run:
    """Make this peer's part in the run, not started."""
    work, extras = rounds.work, state.extra_tensors
    of_state = Layout.of(state.described) if state.is_divided else state.shared.layout
    schemas = [of_state.schema_hash, Layout.of(extras).schema_hash]
    agreed = state.agreed() | {"strands": "1"} | work.terms() | rounds.terms()
    if state.is_divided:
        agreed["strands' machine"] = name_of_machine(rounds, state.optimizer)
    compared: list[Tensors] = []
    if state.frozen and not state.is_divided:
        if (how := settings.frozen_parameters) != "sample":
            agreed["frozen_parameters"] = how
        if how in ("sample", "hash"):
            frozen = described_frozen(state.frozen, names_of(state.wrapped, state.frozen), whole=how == "hash")
            compared.append(frozen)
            schemas.append(repr(frozen.shapes).encode())
    schemas += rounds.schemas()
    turns = rounds.turns
    vectors = [vector for turn in turns for vector in turn]
    sizes = [tuple(size for vector in turn for size in vector.sizes) for turn in turns]
    layouts = [state.buffers.layout, state.shared.layout, *(vector.layout for vector in vectors)]
    # If all machines make the same bits, there is no state to average.
    is_alike = state.is_divided or (work.is_exact and not _is_lossy(settings, state))
    rules = Rules(
        sizes=sizes[0] if len(sizes) == 1 else (),
        in_turn=tuple(sizes) if len(sizes) > 1 else (),
        matchmaking_time=settings.matchmaking_time,
        # Less than `averaging_timeout`, after which those who have joined go on alone.
        own_rounds=settings.averaging_timeout / 3 if rounds.precede else 0.0,
        round_timeout=settings.allreduce_timeout,
        min_group=settings.min_group,
        min_share=settings.min_share,
        target_samples=settings.target,
        target_is_each=settings.counts_steps,
        ahead=settings.steps_ahead,
        wait_for_newcomers=settings.wait_for_newcomers,
        due_sizes=state.buffers.sizes,
        state_sizes=() if is_alike else state.shared.sizes,
        state_every=settings.average_state_every,
        state_always=not work.shares_state,
        options_fit=state.options.fits,
        chunk_elements=largest_chunk(spec.dtype.itemsize for layout in layouts for spec in layout.buffers),
        element_bytes=encoded_bytes(vectors or [state.shared]),
    )
    names = state.described_names
    trained = [name for name, tensor in zip(names, state.described, strict=False) if tensor.requires_grad]
    tensors = [
        described("parameters", state.described, names),
        described("trained parameters", state.described_trained, trained),
        described("extra_tensors", extras),
        *compared,
    ]
    # Beyond the bytes of a state, a newcomer is better off with a newer state. Nobody can replay rounds whose gradients
    # were averaged elsewhere.
    redo_bytes = 0 if rounds.precede else state.usual_nbytes
    place = settings.place(tensors, keeps_state=settings.role is not Role.AUXILIARY, redo_bytes=redo_bytes)
    return Run(dht, settings.run_id, Terms(agreed, blake3(b"".join(schemas)).digest()), rules, place)


def _is_lossy(settings: Settings, state: State) -> bool:
    """Whether newcomers get parameters that differ from their donors'. Only an average makes them equal again."""
    return plan_codecs(settings.load_state_compression, state.shared.layout, TensorRole.PARAMETER).lossy


def name_of_machine(rounds: Rounds, optimizer: torch.optim.Optimizer) -> str:
    """The name of this peer's machine before any download; `EXACT` if all machines make the same bits.

    Args:
        optimizer: the optimizer that makes the steps of epochs.
    """
    if rounds.work.is_exact:
        return EXACT
    if not rounds.work.has_any_threads or "fused" not in optimizer.defaults:
        return this_machine()
    # torch's fused kernels make the same bits with any number of threads.
    return ", ".join(part for part in this_machine().split(", ") if not part.endswith(" threads"))


def this_machine() -> str:
    """The name of this machine: torch, processor, instruction set, number of threads and GPU."""
    names = [f"torch {torch.__version__}", platform.machine(), torch.backends.cpu.get_cpu_capability()]
    names.append(f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        names.append(torch.cuda.get_device_name())
    return ", ".join(names)[:256]
