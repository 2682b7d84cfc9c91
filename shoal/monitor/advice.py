"""Advice on how to shorten epochs, from the times of their phases. Pure functions."""

from __future__ import annotations

from shoal.monitor.snapshot import Phases

MOST = 0.75  # if computing takes at least this share of an epoch, the network is no bottleneck


def advice_of(phases: Phases, sent: float, peers: int) -> str:
    """How to make epochs shorter.

    Args:
        phases: the times of an epoch.
        sent: how many bytes a peer sends in a round.
        peers: the number of peers.

    Returns:
        One or two sentences; "" if nothing was measured.
    """
    whole = phases.computing + phases.waiting + phases.matchmaking + phases.exchange + phases.step
    if whole <= 0:
        return ""
    share = {name: getattr(phases, name) / whole for name in ("waiting", "matchmaking", "exchange", "step")}
    if phases.computing >= MOST * whole:
        return f"{phases.computing / whole:.0%} of an epoch is computing: more peers make more epochs."
    largest = max(share, key=lambda name: share[name])
    part = f"{share[largest]:.0%} of an epoch"
    match largest:
        case "exchange":
            return (
                f"{part} goes into bytes, {sent / 1e6:.1f} MB from each peer: send fewer (grad_compression, 16 or 8 "
                "bits), send them less often (a larger target_batch_size), or train meanwhile (delay_grad_averaging, "
                "use_local_updates)."
            )
        case "waiting":
            way = "batch_size_per_step smaller on slow peers, or a larger target_batch_size"
            return f"{part} is waiting for the samples of others, so peers' steps are long or unequal: {way}."
        case "matchmaking":
            way = "a larger target_batch_size, a smaller batch_size_per_step"
            few = f", or some of the {peers} peers as clients" if peers > 16 else ""
            return (
                f"{part} is waiting for all to join the round, and for newcomers to load the state. If it stays so, "
                f"steps are long beside an epoch: {way}{few}."
            )
        case _:
            return (
                f"{part} is the optimizer's step: step in the background (delay_optimizer_step), or make fewer of them "
                "(a larger target_batch_size)."
            )
