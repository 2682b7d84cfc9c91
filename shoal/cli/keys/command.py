"""The commands of ``shoal keys``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.keys.folder import DEFAULT_FOLDER, Keys, closed, read_line, write_line
from shoal.membership import ClosedRun, OwnerKey, Part
from shoal.membership.holder import when
from shoal.membership.membership import MEMBERSHIP
from shoal.membership.pin import PIN
from shoal.membership.revocations import REVOCATIONS
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import KEY_BYTES, Identity, PeerID

app = typer.Typer(no_args_is_help=True, help="Closed runs: make a run's key, admit peers, revoke, and pin a state.")

Folder = Annotated[Path, typer.Option("--folder", help="Where the owner's keys are.", file_okay=False)]
Run = Annotated[str, typer.Argument(help="The run's id, name@key.")]
Peers = Annotated[
    list[str] | None,
    typer.Option("--initial-peers", help="Multiaddr of a peer of the run, so that it is told."),
]


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (PeerUnreachable, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command("run")
def make_run(
    name: Annotated[str, typer.Argument(help="Of the run; letters, digits, '.', '_' and '-'.")],
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """Make the key of a new closed run, and print the run's id."""
    with _clear_errors():
        keys = Keys(folder)
        key = keys.make(name)
    typer.echo(key.run.run_id)
    typer.echo(f"its secret key is in {keys.folder}: whoever has it decides who trains; keep a copy of it", err=True)


@app.command("peer")
def show_peer(
    identity: Annotated[Path, typer.Argument(help="The file of `identity_path=`, made if missing.", dir_okay=False)],
) -> None:
    """Print the peer id that a volunteer tells the owner."""
    with _clear_errors():
        typer.echo(str(Identity.from_file(identity).peer_id))


@app.command("admit")
def admit_peer(
    run_id: Run,
    peer: Annotated[str, typer.Argument(help="The peer id that is admitted.")],
    role: Annotated[
        list[Part] | None, typer.Option(help="What it may do; can be given several times; without it, train.")
    ] = None,
    days: Annotated[float, typer.Option(help="How long the membership is valid.")] = 30.0,
    out: Annotated[Path | None, typer.Option(help="File for the membership; without it, it is printed.")] = None,
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """Sign a membership for a peer: one line, to be given as membership= by that peer."""
    with _clear_errors():
        key = Keys(folder).key_of(run_id)
        line = key.admit(PeerID.parse(peer), role or [Part.TRAIN], days, time.time())
        if out is not None:
            write_line(out, line)
    typer.echo(f"written to {out}" if out is not None else line)


@app.command("revoke")
def revoke_peers(
    run_id: Run,
    peers: Annotated[list[str], typer.Argument(help="The peer ids that are put out.")],
    initial_peers: Peers = None,
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """End the memberships of peers before their time."""
    with _clear_errors():
        keys = Keys(folder)
        key = keys.key_of(run_id)
        line = key.revoke([PeerID.parse(peer) for peer in peers], keys.revocations(key.run), time.time())
        path = keys.revocations_file(key.run)
        write_line(path, line)
        _tell(keys, key, initial_peers or [], path)


@app.command("pin")
def pin_state(
    run_id: Run,
    tip: Annotated[str, typer.Argument(help="The state: `<epoch>:<samples>:<lineage>`, from a peer's log.")],
    rewind: Annotated[
        bool, typer.Option("--rewind", help="Peers at later states of the same line go back to it, too.")
    ] = False,
    initial_peers: Peers = None,
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """Have all members follow a state, and what descends from it, whatever else they hear."""
    with _clear_errors():
        keys = Keys(folder)
        key = keys.key_of(run_id)
        line = key.pin(tip, keys.pin(key.run), time.time(), rewind=rewind)
        path = keys.pin_file(key.run)
        write_line(path, line)
        _tell(keys, key, initial_peers or [], path)


def _tell(keys: Keys, key: OwnerKey, initial_peers: list[str], path: Path) -> None:
    """Publish the owner's revocations and pin in the DHT of the run, if initial peers are given."""
    typer.echo(f"signed: {path}")
    if not initial_peers:
        typer.echo("the run does not know it yet: give --initial-peers to tell it", err=True)
        return
    from shoal.cli.keys.publish import publish

    words = read_line(keys.revocations_file(key.run)), read_line(keys.pin_file(key.run))
    if not publish(key, initial_peers, words):
        raise OSError("no node of the DHT keeps it: is this machine's clock behind? Try other --initial-peers")
    typer.echo("told the run: members follow it within a minute")


@app.command("show")
def show(
    what: Annotated[str, typer.Argument(help="A run's id, a signed line, or a file: a membership, list, pin or peer.")],
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """Print what a run's owner has signed, or what a file says."""
    with _clear_errors():
        path = Path(what)
        if not os.path.lexists(path):
            lines = _describe(what) if what.startswith("shoal-") else _describe_run(Keys(folder), closed(what))
        else:
            data = path.read_bytes()
            if len(data) == KEY_BYTES:
                lines = [f"peer: {Identity(data).peer_id}"]
            else:
                lines = _describe(data.decode(errors="replace"))
    for line in lines:
        typer.echo(line)


def _describe_run(keys: Keys, run: ClosedRun) -> list[str]:
    lines = [f"run: {run.run_id}", f"owner: {run.owner}"]
    lines.append(f"its key is {'' if keys.has(run) else 'not '}in {keys.folder}")
    for path in (keys.revocations_file(run), keys.pin_file(run)):
        lines += _describe(read_line(path)) if path.exists() else []
    return lines


def _describe(text: str) -> list[str]:
    if MEMBERSHIP.is_one(text):
        membership = MEMBERSHIP.read_any(text)
        parts = ", ".join(part.value for part in membership.parts)
        until = "" if membership.is_valid(time.time()) else "; it has expired"
        return [
            f"membership of {membership.run_id}",
            f"peer: {membership.peer_id}",
            f"may: {parts}",
            f"issued: {when(membership.issued)}",
            f"expires: {when(membership.expires)}{until}",
        ]
    if REVOCATIONS.is_one(text):
        revocations = REVOCATIONS.read_any(text)
        rows = [f"revoked: {PeerID(one.peer)}, what was issued until {when(one.until)}" for one in revocations.revoked]
        return [f"revocations of {revocations.run_id}, number {revocations.number}", *rows]
    if PIN.is_one(text):
        pin = PIN.read_any(text)
        back = "; later states of its line go back" if pin.rewind else ""
        return [f"pin of {pin.run_id}, number {pin.number}", f"state: {pin.tip}{back}"]
    raise ValueError("this is neither a membership, a list of revocations or a pin, nor a peer's identity file")
