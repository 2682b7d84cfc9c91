"""What can be said of a machine without talking to anybody. The judgements are pure; `examine` looks."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import platform
import resource
import shutil
import socket
import ssl
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shoal.cli.doctor.finding import Finding, Level
from shoal.dht.interfaces import concrete_addresses
from shoal.p2p.congestion import has_bbr
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sealing import has_aes

LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 6)
FEW_DESCRIPTORS, TOO_FEW_DESCRIPTORS = 4096, 512
LITTLE_DISK = 5 << 30
STA_UNSYNC, STATUS_OFFSET, TIMEX_BYTES = 0x40, 40, 256  # of Linux's struct timex


def judge_python(found: tuple[int, int], *, has_tls13: bool) -> Finding:
    """Whether this Python will do."""
    name = ".".join(map(str, found))
    if found < LEAST_PYTHON:
        return Finding("python", Level.BAD, f"Python {name}", "install Python 3.11 or newer")
    if not has_tls13:
        return Finding("python", Level.BAD, f"Python {name}, whose OpenSSL has no TLS 1.3", "install another Python")
    return Finding("python", Level.GOOD, f"Python {name}")


def judge_torch(release: str | None, capability: str, gpus: Iterable[str]) -> Finding:
    """Whether this torch will do; `capability` is the instruction set that it uses."""
    if release is None:
        return Finding("torch", Level.BAD, "torch can't be imported", "pip install torch")
    names = ", ".join(gpus)
    says = f"torch {release}, {capability}, {names or 'no GPU'}"
    if tuple(int(part) for part in release.split("+")[0].split(".")[:2] if part.isdigit()) < LEAST_TORCH:
        return Finding("torch", Level.BAD, says, "install torch 2.6 or newer")
    if capability in ("x86_64 DEFAULT", "x86_64 NO AVX"):
        way = "peers with other instructions round otherwise, and average their states: nothing, or another machine"
        return Finding("torch", Level.POOR, says, way)
    return Finding("torch", Level.GOOD, says)


def judge_ciphers(*, aes: bool) -> Finding:
    """Whether what is sent is sealed by instructions made for it."""
    if aes:
        return Finding("ciphers", Level.GOOD, "the processor has instructions for AES")
    return Finding(
        "ciphers", Level.POOR, "no instructions for AES: sealing takes more CPU", "nothing, or another machine"
    )


def judge_listening(error: str) -> Finding:
    """Whether a port can be opened; `error` is "" if so."""
    if error:
        way = "allow this process to listen, or train with client_mode=True"
        return Finding("ports", Level.BAD, f"no port can be opened: {error}", way)
    return Finding("ports", Level.GOOD, "ports can be opened")


def judge_addresses(addresses: Iterable[Multiaddr]) -> Finding:
    """Whether others can reach this machine at one of its own addresses."""
    hosts = [address.host for address in addresses if not address.is_loopback]
    if not hosts:
        way = "only peers on this machine can be trained with, until it has a network"
        return Finding("addresses", Level.POOR, "this machine has no address but loopback", way)
    if all(_is_private(host) for host in hosts):
        way = (
            "peers elsewhere reach it only if the router forwards a port, named in announce_maddrs; else train with "
            "client_mode=True"
        )
        return Finding("addresses", Level.POOR, f"private addresses only: {', '.join(hosts)}", way)
    return Finding("addresses", Level.GOOD, ", ".join(hosts))


def judge_clock(status: int | None) -> Finding:
    """Whether the kernel says that something sets its clock; None if it can't be asked."""
    if status is None:
        return Finding("clock", Level.GOOD, "whether it is set by something can't be told here")
    if status & STA_UNSYNC:
        way = "peers whose clocks differ by a minute do not find each other: run chrony, or timedatectl set-ntp true"
        return Finding("clock", Level.POOR, "nothing is known to set this machine's clock", way)
    return Finding("clock", Level.GOOD, "it is synchronised")


def judge_descriptors(most: int) -> Finding:
    """Whether there are enough descriptors for connections."""
    says = "no limit of descriptors" if most < 0 else f"at most {most} descriptors"
    way = "raise it: ulimit -Hn, or LimitNOFILE= of a systemd unit"
    if 0 <= most < TOO_FEW_DESCRIPTORS:
        return Finding("descriptors", Level.BAD, says, way)
    if 0 <= most < FEW_DESCRIPTORS:
        return Finding("descriptors", Level.POOR, f"{says}, enough for some hundred peers", way)
    return Finding("descriptors", Level.GOOD, says)


def judge_disk(free: int, folder: str) -> Finding:
    """Whether there is room for checkpoints and kept states."""
    says = f"{free / 1e9:.1f} GB are free in {folder}"
    if free < LITTLE_DISK:
        return Finding("disk", Level.POOR, says, "make room for checkpoints, and for kept_state_dir")
    return Finding("disk", Level.GOOD, says)


def judge_congestion(*, bbr: bool) -> Finding:
    """Whether tensors pass fast over lines that lose packets."""
    if bbr:
        return Finding("congestion", Level.GOOD, "the kernel has BBR")
    way = "modprobe tcp_bbr, and the sysctl net.ipv4.tcp_allowed_congestion_control"
    return Finding("congestion", Level.POOR, "no BBR: tensors pass slowly over lines that lose packets", way)


def examine() -> list[Finding]:
    """Look at this machine."""
    release, capability, gpus = _torch()
    return [
        judge_python(sys.version_info[:2], has_tls13=ssl.HAS_TLSv1_3),
        judge_torch(release, capability, gpus),
        judge_ciphers(aes=has_aes()),
        judge_listening(_listening_error()),
        judge_addresses(concrete_addresses(Multiaddr("/ip4/0.0.0.0/tcp/1"))),
        judge_clock(_clock_status()),
        judge_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        judge_disk(shutil.disk_usage(Path.cwd()).free, os.fspath(Path.cwd())),
        judge_congestion(bbr=has_bbr()),
    ]


def _torch() -> tuple[str | None, str, list[str]]:
    try:
        version("torch")
        import torch
    except (PackageNotFoundError, ImportError, OSError):  # a build for another machine
        return None, "", []
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return torch.__version__, f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}", gpus


def _listening_error() -> str:
    try:
        socket.create_server(("", 0)).close()
    except OSError as error:
        return str(error)
    return ""


def _clock_status() -> int | None:
    asked = ctypes.create_string_buffer(TIMEX_BYTES)  # all zeros: it is only asked
    try:
        if ctypes.CDLL(None).adjtimex(asked) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return int.from_bytes(asked.raw[STATUS_OFFSET : STATUS_OFFSET + 4], sys.byteorder)


def _is_private(host: str) -> bool:
    return not ipaddress.ip_address(host).is_global
