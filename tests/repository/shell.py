"""Runs the commands of a page as a reader does, on one machine.

What a page can't know is put in:

- an address of the documentation, such as `/ip4/203.0.113.7/tcp/31337/p2p/bafzaaj…`, becomes the one that a command of
  the page has printed last, or else that of a node which is started for it;
- any other word with `…` in it becomes the last word with the same beginning and end that a command has printed;
- ports and hosts to listen on become free ones, and loopback.

Two kinds of commands do not run. `pip install` is held against the extras of `pyproject.toml`, and `make` says what it
would do.
"""

from __future__ import annotations

import codecs
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import tomllib
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.repository.blocks import ROOT, Block

SECONDS = 120.0  # for a command to end, or to print what it is waited for
# Commands that go on, and what each prints once it is well.
GOES_ON = (
    (re.compile(r"^shoal node\b"), re.compile("/p2p/")),
    (re.compile(r"^shoal top\b(?!.*--once)"), re.compile(r"\d\d:\d\d:\d\d")),  # when it has looked
    (re.compile(r"^shoal monitor\b"), re.compile("http://")),
    (re.compile(r"^(torchrun .*|python )examples/"), re.compile(r"epoch\W{1,4}\d")),
)
ADDRESS = re.compile(r"/ip[46]/((203\.0\.113|198\.51\.100|192\.0\.2)\.\d+[^\s\"']*|[^\s\"']*…[^\s\"']*)")
PRINTED_ADDRESS = re.compile(r"/ip[46]/[0-9a-f.:]+/tcp/\d+/p2p/\w+")
PLACEHOLDER = re.compile(r"[\w@:./-]*…")
LISTENED = re.compile(r"(?<=/tcp/|port[ =])(31\d\d\d|29\d\d\d|8080|9\d\d\d)\b")


class Shell:
    """A shell in a folder of its own, with the `examples` of the repository in it.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._state = folder / "here", folder / "state"
        self._running: list[_Running] = []
        self._printed: list[str] = []  # all commands' output, by line
        self._ports: dict[str, int] = {}
        self._folder.mkdir()
        (self._folder / "examples").symlink_to(ROOT / "examples")
        self._state.write_text("")
        self._environment = os.environ | {
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends what still runs, the last first, as Ctrl-C does."""
        for running in reversed(self._running):
            running.end()

    def save(self, name: str, code: str) -> None:
        """A file that the page tells its reader to save."""
        (self._folder / name).write_text(code)

    def run(self, block: Block) -> None:
        """Run the commands of a block. Raises AssertionError with the output of one that fails."""
        for command in commands(block.code):
            words = shlex.split(command, comments=True)
            if words[:2] == ["pip", "install"]:
                check_extras(words[2:])
            elif words[0] == "make":
                dry = ["make", "--dry-run", *words[1:]]
                done = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
                assert done.returncode == 0, f"{command!r}: {done.stderr}"
            else:
                self._run(command, block.until)

    def _run(self, command: str, until: str) -> None:
        plain = shlex.join(shlex.split(command, comments=True)).removesuffix(" '&'")
        filled = self._fill(command)
        said = re.compile(re.escape(until)) if until else next((s for c, s in GOES_ON if c.search(plain)), None)
        if said is not None:
            return self._start(filled.removesuffix("&"), said, may_end=not until)
        keep = (
            f"status=$?; {{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {shlex.quote(str(self._state))}; exit $status"
        )
        with tempfile.TemporaryFile("w+") as output:
            process = self._popen(f"{filled}\n{keep}", output.fileno())
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                status = None
                _end(process)
            output.seek(0)
            text = output.read()
        self._printed += text.splitlines()
        hint = "if it is meant to go on, put '<!-- runs until it prints: TEXT -->' above the block\n"
        assert status is not None, f"{filled!r} has not ended in {SECONDS:g} s; {hint}{text}"
        assert status == 0, f"{filled!r} ends with {status}:\n{text}"

    def _popen(self, script: str, output: int) -> subprocess.Popen[str]:
        script = f". {shlex.quote(str(self._state))}\n{script}"
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _start(self, command: str, said: re.Pattern[str], may_end: bool = False) -> None:
        """Start a command that goes on, in a terminal of its own, and wait for what it prints, or for its end."""
        terminal, side = pty.openpty()
        process = self._popen(f"exec {command}", side)
        os.close(side)
        running = _Running(process, terminal)
        self._running.append(running)
        output = running.wait_for(said)
        is_well = said.search(output) is not None or (may_end and process.poll() == 0)
        assert is_well, f"{command!r} has not printed {said.pattern!r} in {SECONDS:g} s:\n{output}"
        self._printed += output.splitlines()

    # -- what a page can't know

    def _fill(self, command: str) -> str:
        command = ADDRESS.sub(lambda match: self._address(), command)
        command = PLACEHOLDER.sub(lambda match: self._word(match[0]), command)
        command = LISTENED.sub(lambda match: str(self._port(match[0])), command)
        return command.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/")

    def _address(self) -> str:
        """The address that was printed last by a command that still runs."""
        for running in reversed(self._running):
            found = PRINTED_ADDRESS.search(running.output)
            if found and running.process.poll() is None:
                return found[0]
        self._start("shoal node --host-maddrs /ip4/127.0.0.1/tcp/0", re.compile("/p2p/"))
        return self._address()

    def _word(self, placeholder: str) -> str:
        start = placeholder.removesuffix("…")
        if re.fullmatch(r"\d+:\d+:[0-9a-f]+", start):  # a state, as `shoal keys pin` takes it
            return start + "0" * (64 - len(start.rpartition(":")[2]))
        words = (word.strip("\"'.,;:") for line in reversed(self._printed) for word in line.split())
        found = next((word for word in words if word.startswith(start) and len(word) > len(start)), None)
        hint = "let an earlier command of the page print it, or write it out"
        assert found is not None, f"nothing was printed that {placeholder!r} may stand for: {hint}"
        return found

    def _port(self, written: str) -> int:
        """A free port in place of that one, the same each time."""
        if written not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._ports[written] = server.getsockname()[1]
        return self._ports[written]


class _Running:
    """A command that goes on.

    Args:
        process: of the command.
        terminal: that it writes to; closed at the end.
    """

    def __init__(self, process: subprocess.Popen[str], terminal: int) -> None:
        self.process, self.output = process, ""
        self._terminal, self._closed, self._changed = terminal, False, threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with suppress(OSError):  # EIO: nobody has the other side any more
            while data := os.read(self._terminal, 1 << 16):
                with self._changed:
                    self.output += decoder.decode(data)
                    self._changed.notify()
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait_for(self, said: re.Pattern[str]) -> str:
        """Its output, when that has the pattern in it, or when the command has ended, or is late."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or said.search(self.output) is not None, SECONDS)
            if self._closed:
                self.process.wait(SECONDS)
            return self.output

    def end(self) -> None:
        """End it."""
        _end(self.process)
        self._reader.join()
        os.close(self._terminal)


def commands(code: str) -> list[str]:
    """The commands of a script, each as many lines as it takes."""
    found, lines = [], ""
    for line in code.splitlines():
        lines += f"{line}\n"
        is_whole = subprocess.run(["bash", "-n", "-c", lines], capture_output=True, timeout=SECONDS).returncode == 0
        if is_whole and not line.endswith("\\"):
            found += [lines.strip()] if shlex.split(lines, comments=True) else []
            lines = ""
    assert not lines, f"this is no whole command: {lines!r}"
    return found


def check_extras(packages: list[str]) -> None:
    """Every extra of Shoal that `pip install` names is one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in packages:
        named = re.fullmatch(r"(?:shoal|\.)\[(.*)\](?:[=<>~].*)?", package)
        for extra in named[1].split(",") if named else []:
            assert extra in extras, f"pip install {package}: pyproject.toml has no extra {extra!r}"


def _end(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and SIGKILL for whatever of the command is there 20 s later."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(20.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
