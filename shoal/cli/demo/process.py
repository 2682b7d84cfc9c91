"""One child process of the demo's parent, which writes lines to its standard output."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

_ORDERLY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line that process ``index`` has written. ``text`` is ``None`` when the process has ended."""

    index: int
    text: bytes | None


class PeerProcess:
    """Starts ``command``; its lines go into ``lines``, its standard error into the file ``log``.

    The child has a session of its own, so a Ctrl-C in the terminal reaches only the parent, which then stops every
    child. A child must exit at the end of its standard input. So it also ends if the parent is killed.
    """

    def __init__(self, index: int, command: list[str], lines: queue.SimpleQueue[Line], log: Path) -> None:
        self.index = index
        self.log = log
        self._lines = lines
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        self._reader = threading.Thread(target=self._read, name=f"peer-{index}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def say(self, word: str) -> None:
        """Send a line to the child. Does nothing if the child has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # The child has ended, which its last Line says.
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the child with SIGKILL."""
        self._process.kill()

    def exit_code(self, timeout: float = _ORDERLY_SECONDS) -> int:
        """Wait until the child ends, and kill it after ``timeout`` seconds. Returns its exit code; a negative one is
        the signal that has ended it."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Kill the child and close its pipes."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # The pipe may have a word that the child never read.
                pipe.close()

    def last_words(self, lines: int = 3) -> str:
        """The last ``lines`` lines of the log, for an error message."""
        words = self.log.read_text(errors="replace").strip().splitlines()[-lines:]
        return " / ".join(word.strip() for word in words) or "it wrote nothing to its log"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(Line(self.index, line))
        self._lines.put(Line(self.index, None))
