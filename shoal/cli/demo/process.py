"""One child process that speaks in lines, owned by the demo's parent."""

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
    """Something that process ``index`` wrote; ``None`` when it has ended."""

    index: int
    text: bytes | None


class PeerProcess:
    """Starts ``command``; its lines go into ``lines``, its standard error into the file ``log``.

    The child has a session of its own: a Ctrl-C in the terminal reaches the parent alone, which then stops every child.
    A child that sees the end of its standard input must exit, which covers a parent that was killed.
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
        """Sends a line to the child; one that is gone does not hear it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended: its last Line says so.
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def exit_code(self, timeout: float = _ORDERLY_SECONDS) -> int:
        """Waits for the end, at most ``timeout`` seconds, then kills; negative: the signal that ended the child."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Ends the child, whatever it does, and lets go of its pipes."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # A word that the child never read.
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
