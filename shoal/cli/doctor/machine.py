"""Checks of this machine, without other machines (Linux)."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator

from shoal.cli.doctor.finding import Check, Level
from shoal.p2p.congestion import has_bbr
from shoal.p2p.interfaces import concrete_addresses
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sealing import has_aes

LEAST_TORCH = (2, 6)
FEW_DESCRIPTORS = 1024  # the trainer needs 256; each peer needs 1, and up to 4 more if tensors pass
LITTLE_DISK, NO_DISK = 5e9, 100e6  # bytes


def look_at_machine(port: int) -> Iterator[Check]:
    """Run all checks that need no other machine.

    Args:
        port: the TCP port at which the peer would listen; 0 for any free one.
    """
    yield _python()
    yield _torch()
    yield _port(port)
    yield _interfaces()
    yield _descriptors()
    yield _disk()
    yield _congestion()


def _python() -> Check:
    version, system = platform.python_version(), platform.system()
    found = f"{version} on {system} {platform.machine()}"
    if system != "Linux":
        return Check("python", Level.MIND, found, "Shoal is tested on Linux only")
    return Check("python", Level.WELL, found, facts={"version": version})  # an older one does not install Shoal


def _torch() -> Check:
    advice = "install torch 2.6 or newer, as https://pytorch.org/get-started/locally says for this machine"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        return Check("torch", Level.STOPS, f"it does not load: {error}", advice)
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    aes = has_aes()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = f"{torch.__version__}, {', '.join(devices) or 'no GPU'}, {capability}{' and AES' * aes}, {threads} threads"
    facts = {"version": torch.__version__, "devices": devices, "capability": capability, "aes": aes, "threads": threads}
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < LEAST_TORCH:
        return Check("torch", Level.STOPS, found, advice, facts)
    if torch.version.cuda is not None and not devices:
        advice = "this build of torch is for GPUs, and none is found: is its driver there (nvidia-smi)?"
        return Check("torch", Level.MIND, found, advice, facts)
    if not aes:
        advice = "this processor has no instructions for AES: sealing tensors takes several times as long"
        return Check("torch", Level.MIND, found, advice, facts)
    return Check("torch", Level.WELL, found, "", facts)


def _port(port: int) -> Check:
    try:
        with socket.create_server(("", port)) as server:
            number = server.getsockname()[1]
    except (OSError, OverflowError) as error:
        advice = "choose another port, or end what listens there (`ss -ltnp` names it)"
        return Check("port", Level.STOPS, f"cannot listen on TCP port {port}: {error}", advice, {"port": port})
    found = f"TCP port {port} is free" if port else "can listen on a free TCP port"
    return Check("port", Level.WELL, found, "", {"port": number})


def _interfaces() -> Check:
    found = [concrete for host in ("/ip4/0.0.0.0", "/ip6/::") for concrete in _addresses(host)]
    others = [address for address in found if not address.is_loopback]
    facts = {"addresses": [address.host for address in found]}
    if not others:
        advice = "no other machine reaches this one: connect it to a network, or train on this machine alone"
        return Check("addresses", Level.MIND, "loopback only", advice, facts)
    text = ", ".join(address.host for address in others)
    if not any(_is_public(address) for address in others):
        advice = (
            "these are addresses within a network. Peers outside of it reach "
            "DHT(host_maddrs=['/ip4/0.0.0.0/tcp/<port>']) where the router forwards the port, or maps it "
            "(port_mapping=True). A peer that no other reaches can train as a client (client_mode=True). `shoal doctor "
            "ADDRESS`, with the address of a peer outside, says what works here"
        )
        return Check("addresses", Level.MIND, text, advice, facts)
    advice = "DHT(host_maddrs=['/ip4/0.0.0.0/tcp/<port>']) listens there; without it, on loopback only"
    return Check("addresses", Level.WELL, text, advice, facts)


def _addresses(host: str) -> list[Multiaddr]:
    everywhere = Multiaddr(f"{host}/tcp/0")
    return [address for address in concrete_addresses(everywhere) if address != everywhere]


def _is_public(address: Multiaddr) -> bool:
    return ipaddress.ip_address(address.host).is_global


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    found = f"this process may open {soft} files and connections, and raise that to {hard}"
    if hard != resource.RLIM_INFINITY and hard < FEW_DESCRIPTORS:
        advice = f"raise the hard limit (`ulimit -Hn`, or LimitNOFILE= of a service) to {FEW_DESCRIPTORS} or more"
        return Check("descriptors", Level.MIND, found, advice, facts)
    return Check("descriptors", Level.WELL, found, "", facts)


def _disk() -> Check:
    free = shutil.disk_usage(os.curdir).free
    found, facts = f"{free / 1e9:.1f} GB free here", {"free_bytes": free}
    advice = "checkpoints, and states that a peer leaves (kept_state_dir=), need room: free some, or use another folder"
    if free < NO_DISK:
        return Check("disk", Level.STOPS, found, advice, facts)
    return Check("disk", Level.MIND if free < LITTLE_DISK else Level.WELL, found, advice * (free < LITTLE_DISK), facts)


def _congestion() -> Check:
    if has_bbr():
        return Check("congestion control", Level.WELL, "BBR is there", "", {"bbr": True})
    advice = "`modprobe tcp_bbr`, and add bbr to the sysctl net.ipv4.tcp_allowed_congestion_control"
    found = "no BBR: tensors pass slowly over lines that lose packets"
    return Check("congestion control", Level.MIND, found, advice, {"bbr": False})
