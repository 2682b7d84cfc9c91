"""Processes that tests start and talk to by lines of JSON, on their stdin and stdout."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

import msgspec

from tests.forked import ForkedProcess
from tests.workers.commands import Begun, command_of

Role = TypeVar("Role")
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Talking:
    """A process that is told lines, and says some.

    Args:
        module, arguments, environment, log: see ForkedProcess.
    """

    def __init__(
        self, module: str, *arguments: str, environment: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        self.process = ForkedProcess(module, *arguments, environment=environment, log=log, talk=True)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.addresses: list[str] = []
        self.peer = ""

    def _read(self) -> None:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # it was killed in the middle of its last one
                self._hear(json.loads(line))
        self._answers.put(None)

    def _hear(self, line: dict[str, Any]) -> None:
        self._answers.put(line)

    def _tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and all that it has said was heard, and say how, see ForkedProcess."""
        code = self.process.wait(timeout)
        self._reader.join()
        return code

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.wait()

    def leave(self, timeout: float = 60.0) -> int:
        """Tell it that nothing more comes, and wait as `wait` does."""
        self.process.stdin.close()
        return self.wait(timeout)

    def hang(self) -> None:
        """SIGSTOP: its connections stay, and nothing in it runs."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Leave nothing behind, whatever it is doing."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # it was told something when it was gone
                pipe.close()


class PeerProcess(Talking):
    """One whose lines are its own.

    Args:
        module: that is run; it says one line with `addresses` and `peer` when it is ready.
        options: its argument, as JSON.
    """

    def __init__(self, module: str, options: dict[str, Any]) -> None:
        super().__init__(module, json.dumps(options))

    def hear(self, timeout: float = 150.0) -> dict[str, Any] | None:
        """The next answer; None if the process has ended. Raises queue.Empty if there is none in time."""
        return self._answers.get(timeout=timeout)

    def started(self) -> None:
        """Wait until it is ready."""
        answer = self.hear()
        assert answer is not None, f"the worker ended before it was ready: {self.process.wait(10.0)}"
        self.addresses, self.peer = answer["addresses"], answer["peer"]

    def tell(self, **command: Any) -> None:
        self._tell(json.dumps(command))

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        answer = self.hear()
        assert answer is not None, f"the worker ended instead of answering: {self.process.wait(10.0)}"
        return answer


class Failed(Exception):
    """A worker has raised an error, of which this is the traceback."""


class Ended(Exception):
    """A worker has ended instead of answering."""


class Worker(Talking, Generic[Role]):
    """A process of tests.workers.

    Args:
        role: what it can be told to make, and then to do.
        environment, log: see ForkedProcess; the log has not what it answers and says.
    """

    def __init__(self, role: type[Role], environment: dict[str, str] | None = None, log: Path | None = None) -> None:
        self.role = role
        self.said: list[dict[str, Any]] = []
        """What it has said without being asked."""
        super().__init__("tests.workers", role.__module__, role.__name__, environment=environment, log=log)

    def _hear(self, line: dict[str, Any]) -> None:
        if line.keys() <= {"answer", "error"}:
            self._answers.put(line)
        else:
            self.said.append(line)

    def begin(self, role: Callable[Given, Role], *args: Given.args, **kwargs: Given.kwargs) -> None:
        """Tell it to make its role with these arguments, see `started`."""
        self._send(role, inspect.signature(role).bind(*args, **kwargs).arguments)

    def started(self) -> None:
        """Wait until that is made."""
        begun = self._answer(Begun, 150.0)
        self.addresses, self.peer = begun["addresses"], begun["peer"]

    def tell(
        self, method: Callable[Concatenate[Role, Given], Answer], *args: Given.args, **kwargs: Given.kwargs
    ) -> Callable[..., Answer]:
        """Tell it to call a method of its role. What is returned waits for the answer, in the order in which it was
        told: at most `timeout` seconds, else it raises queue.Empty."""
        given = inspect.signature(method).bind(None, *args, **kwargs).arguments
        self._send(method, {name: value for name, value in given.items() if name != "self"})
        return functools.partial(self._answer, get_type_hints(method)["return"])

    def ask(
        self, method: Callable[Concatenate[Role, Given], Answer], *args: Given.args, **kwargs: Given.kwargs
    ) -> Answer:
        """Tell it, and wait for the answer."""
        return self.tell(method, *args, **kwargs)()

    def _send(self, act: Callable[..., Any], given: dict[str, Any]) -> None:
        self._tell(msgspec.json.encode(command_of(act)(**given)).decode())

    def _answer(self, kind: Any, timeout: float = 150.0) -> Any:
        line = self._answers.get(timeout=timeout)
        if line is None:
            self._answers.put(None)  # for who asks next
            raise Ended(f"the worker has ended: {self.process.wait(10.0)}")
        if "error" in line:
            raise Failed(line["error"])
        return msgspec.convert(line["answer"], kind)


def ask_all(
    workers: Iterable[Worker[Role]],
    method: Callable[Concatenate[Role, Given], Answer],
    *args: Given.args,
    **kwargs: Given.kwargs,
) -> list[Answer]:
    """Tell all of them at once, and wait for their answers."""
    return [answer() for answer in [worker.tell(method, *args, **kwargs) for worker in workers]]


def outcomes(told: Iterable[Callable[[], Answer]]) -> list[Answer | None]:
    """What each answers; None of who has failed, or was killed."""
    found: list[Answer | None] = []
    for answer in told:
        try:
            found.append(answer())
        except (Failed, Ended) as error:
            print(error)
            found.append(None)
    return found


@contextlib.contextmanager
def workers(role: type[Role], count: int, **given: Any) -> Iterator[list[Worker[Role]]]:
    """So many of a role that takes `initial_peers`, which find each other through the first."""
    made = [Worker(role) for _ in range(count)]
    try:
        for worker in made:
            worker.begin(role, initial_peers=made[0].addresses, **given)
            if worker is made[0]:
                worker.started()
        for worker in made[1:]:
            worker.started()
        yield made
    finally:
        for worker in made:
            worker.end()
