"""The ``shoal`` command.

It promises to its users: help and errors appear quickly (only commands that need torch import it), and no process is
left behind. The commands use Shoal's public names only, and no other room depends on this one.
"""

from __future__ import annotations

import signal
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import shoal
from shoal.cli.demo.script import ENOUGH_EPOCHS, DemoSettings, GradientCodec, load_text
from shoal.cli.keys.command import app as keys_app
from shoal.cli.watched import Watched

HELP = """
Train with the PyTorch optimizer that you already use on whatever machines you have.

**Begin with** `shoal demo`: several peers train a small model on this machine, and one is killed.

**Two machines:** `shoal node` on one of them prints an address; give it to the training script on each
(`shoal.DHT(initial_peers=[address])`). If they do not meet, `shoal doctor ADDRESS` says what is in the way.

**A run:** `shoal top` and `shoal monitor` show how it is. `shoal plot` draws how it was.
"""

app = typer.Typer(no_args_is_help=True, add_completion=False, help=HELP, rich_markup_mode="markdown")
app.add_typer(keys_app, name="keys")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # Both signals end a command in good order. (A shell that starts a command in the background lets it ignore SIGINT.)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@app.command("demo")
def demo_command(
    peers: Annotated[int, typer.Option(help="How many peers begin, each a process of its own.")] = 4,
    epochs: Annotated[
        int, typer.Option(help=f"How many epochs they train; from {ENOUGH_EPOCHS} on, what they learned is checked.")
    ] = 150,
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill one peer on the way with SIGKILL.")] = True,
    compression: Annotated[GradientCodec, typer.Option(help="Codec of the averaged gradients.")] = GradientCodec.NONE,
    seed: Annotated[int, typer.Option(help="Seed of the model and of the batches of each peer.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(help="Text to learn; without it Python's standard library.", exists=True, dir_okay=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; without it `runs/demo-<time>`.", file_okay=False)
    ] = None,
) -> None:
    """Train a small language model with several peers on this machine; kill one, take in a new one."""
    from shoal.cli.demo.report import run_demo

    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        settings = DemoSettings(
            out=folder, peers=peers, epochs=epochs, kill=kill, compression=compression, seed=seed, data=data
        )
        load_text(data)  # here, so that an unusable text is one clear error and not one for each peer
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run_demo(settings, Console(markup=False, highlight=False)))


InitialPeers = Annotated[
    list[str],
    typer.Option(help="Multiaddr of a peer of the run, ending in `/p2p/<peer id>`; can be given several times."),
]
Identity = Annotated[Path | None, typer.Option(help="File with this watcher's key, for a closed run.", dir_okay=False)]
Membership = Annotated[
    str | None, typer.Option(help="Line or file from `shoal keys admit --role watch`, for a closed run.")
]


@app.command("top")
def top_command(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as its peers have it.")],
    initial_peers: InitialPeers,
    once: Annotated[
        bool, typer.Option("--once", help="Print what is known now; exit code 1 if it is not well.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: as one line of JSON.")] = False,
    identity: Identity = None,
    membership: Membership = None,
) -> None:
    """Show how a run is, in this terminal, until Ctrl-C."""
    from shoal.cli.watch import run_top

    if json and not once:
        raise typer.BadParameter("give --once with it", param_hint="--json")
    raise typer.Exit(run_top(Watched(run_id, initial_peers, identity, membership), Console(), once=once, json=json))


@app.command("monitor")
def monitor_command(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as its peers have it.")],
    initial_peers: InitialPeers,
    port: Annotated[
        int, typer.Option(help="Port of the page on this machine; 0 for any free one.", min=0, max=65535)
    ] = 8080,
    history: Annotated[
        Path | None,
        typer.Option(help="SQLite file for the history; by default `runs/monitor-<run>.sqlite`.", dir_okay=False),
    ] = None,
    identity: Identity = None,
    membership: Membership = None,
) -> None:
    """Serve a page that shows how a run is, and was, until Ctrl-C; and /metrics for Prometheus."""
    try:
        from shoal.cli.page import run_monitor
    except ModuleNotFoundError as error:
        typer.echo(f"shoal monitor needs {error.name}: pip install 'shoal[monitor]'", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(run_monitor(Watched(run_id, initial_peers, identity, membership), port, history, Console()))


@app.command("plot")
def plot_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="The traces of the replicas, see `shoal.Trace`.", exists=True, dir_okay=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="The picture: a .svg or .png file.", dir_okay=False)] = Path("trace.svg"),
) -> None:
    """Draw what each replica of a run did over time, and what became of its samples, from traces."""
    if out.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"{out} is neither .svg nor .png", param_hint="--out")
    try:
        from shoal.cli.plot.command import run_plot
    except ModuleNotFoundError as error:
        typer.echo(f"shoal plot needs {error.name}: pip install 'shoal[demo]'", err=True)
        raise typer.Exit(1) from error
    try:
        run_plot(files, out, Console(markup=False, highlight=False))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command("doctor")
def doctor_command(
    address: Annotated[str | None, typer.Argument(help="Of a peer or node, as it printed it.")] = None,
    run_id: Annotated[str, typer.Option("--run", help="Look also at the members of this run.")] = "",
    membership: Annotated[
        str | None, typer.Option(help="Of a closed run: the line that its owner has sent, or the file with it.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(help="File with this peer's key, for a closed run.", exists=True, dir_okay=False)
    ] = None,
    port: Annotated[int, typer.Option(help="The TCP port at which the peer will listen; 0 for any.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what would stop this machine from taking part in a run, each with the way out.

    Exits with 1 if something does.
    """
    from shoal.cli.doctor.command import run_doctor
    from shoal.cli.doctor.peer import asked_about

    try:
        asked = asked_about(address, run_id, membership, identity)
        code = run_doctor(asked, port, Console(), as_json=as_json)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


@app.command("node")
def node_command(
    host_maddrs: Annotated[
        list[str] | None,
        typer.Option(
            help="Multiaddr to listen on; can be given several times. Without it all interfaces, and any free port: "
            "the peers of other machines are to reach this node."
        ),
    ] = None,
    initial_peers: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of a peer of the swarm to join; can be given several times.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(help="File that keeps the peer's key, made if missing: the address stays the same.")
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="Lead peers to others that nobody can dial: what they send passes here.")
    ] = False,
    relay_bandwidth: Annotated[
        float | None, typer.Option(help="Bytes per second that pass through the relay at most: 12.5e6 is 100 Mbit/s.")
    ] = None,
) -> None:
    """Run a DHT node that others can join by; it prints its addresses and stays until Ctrl-C.

    Without --host-maddrs it listens on all interfaces (/ip4/0.0.0.0/tcp/0, any free port), since it is there for other
    machines to find each other. A shoal.DHT in a script listens on loopback only, unless it is told otherwise: a script
    that is tried opens no port to the network. To keep an address, fix the port and give --identity.

    With --relay, peers behind routers that let nobody in reach each other through this node. It can't read what they
    send; it costs this machine those bytes, in and out.
    """
    from shoal.cli.node import run_node
    from shoal.p2p.errors import PeerUnreachable

    try:
        listen = host_maddrs or ["/ip4/0.0.0.0/tcp/0"]
        console = Console()
        run_node(listen, initial_peers or [], identity, console, relay=relay, relay_bandwidth=relay_bandwidth)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (PeerUnreachable, OSError) as error:
        typer.echo(f"the node could not start: {error}", err=True)
        raise typer.Exit(1) from error
