"""A peer process's end of the pipes to its parent."""

from __future__ import annotations

import os
import queue
import threading

from shoal.cli.demo.messages import Message, encode

START = "start"
STOP = "stop"
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class Parent:
    """Sends :mod:`messages <shoal.cli.demo.messages>` to the parent, and waits for its words.

    It takes over standard input and output; everything else that is printed goes to standard error. When the parent
    ends, in any way, standard input ends, and this process exits at once. So no peer outlives its demo.
    """

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._output = os.fdopen(os.dup(_STDOUT), "wb", buffering=0)
        os.dup2(_STDERR, _STDOUT)
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def tell(self, message: Message) -> None:
        """Send a message to the parent. Any thread may call this."""
        with self._lock:
            self._output.write(encode(message) + b"\n")

    def wait_for(self, word: str) -> None:
        """Blocks until the parent has said ``word``."""
        while self._words.get() != word:
            pass

    def _read(self) -> None:
        # os.read and not sys.stdin: a thread that sleeps in sys.stdin holds a lock that the interpreter's exit needs.
        rest = b""
        while received := os.read(_STDIN, 4096):
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                self._words.put(line.decode())
        os._exit(1)
