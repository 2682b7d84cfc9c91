"""Sums up in one sentence whether a run is well. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.monitor.snapshot import PeerView, Standing

MAX_NAMED = 3  # peers that the sentence names, and as many refused ones


def sentence_of(
    run_id: str,
    peers: Sequence[PeerView],
    epoch: int,
    epoch_seconds: float,
    *,
    alike: int,
    refused: Sequence[str],
    waits: float,
) -> tuple[bool, str]:
    """Sum up whether a run is well.

    Args:
        run_id: the name of the run.
        peers: the peers that count: all that are there, and those that were lost a short time ago.
        epoch, epoch_seconds: those of the run.
        alike: how many peers were found to hold equal parameters.
        refused: sentences about peers with other terms that publish nothing.
        waits: for how many more seconds the round waits for newcomers.

    Returns:
        Whether the run is well, and the sentence.
    """
    if not peers:
        ask = "is that its run_id, does anybody train, and is this machine's clock right?"
        return False, f"nobody in the run {run_id!r} says how it is: {ask}"
    bad = [peer for peer in peers if peer.findings]
    here = sum(peer.standing is not Standing.LOST and not peer.joining for peer in peers)
    well, count = len(peers) - len(bad), len(peers)
    pace = f", {epoch_seconds:.2f} s an epoch" if epoch_seconds > 0 else ""
    coming = _coming([f"…{peer.name}" for peer in peers if peer.joining], waits)
    if not bad and not refused:
        if count == 1:
            return True, f"1 peer in epoch {epoch}{pace}{coming}"
        like = ", all alike" if alike == here else ""
        return True, f"{here} of {count} peers in epoch {epoch}{pace}{like}{coming}"
    said = [f"…{peer.name} {peer.findings[0]}" for peer in bad[:MAX_NAMED]]
    if len(bad) > MAX_NAMED:
        said.append(f"and {len(bad) - MAX_NAMED} more")
    said += refused[:MAX_NAMED]
    if len(refused) > MAX_NAMED:
        said.append(f"and {len(refused) - MAX_NAMED} more were refused")
    return False, f"{well} of {count} peers are well in epoch {epoch}{pace}: {'; '.join(said)}{coming}"


def _coming(names: list[str], waits: float) -> str:
    """Who joins, and for how long the run waits."""
    who = " and ".join(names[:MAX_NAMED] + [f"{len(names) - MAX_NAMED} more"] * (len(names) > MAX_NAMED))
    if waits:
        return f"; the run waits for {who or 'a newcomer'} to load the state, {waits:.0f} s left"
    return f"; {who} {'is' if len(names) == 1 else 'are'} joining" if names else ""
