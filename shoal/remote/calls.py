"""Calls to several workers at once, and one error for those that failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import rpc

from shoal.interrupts import holding


class RemoteOptimizerError(RuntimeError):
    """An operation failed on one or more workers. The other workers have completed it.

    If a worker did not answer within torch's `rpc_timeout`, it is unknown whether it has completed the operation or
    still will.

    The message has a line for every worker that failed. ``__cause__`` is the error of that worker, with the worker's
    traceback, or an `ExceptionGroup` if several failed.

    Attributes:
        errors: the error of each worker that failed, by the worker's name. It has the type that was raised there, if
            that type can be rebuilt. Empty if this error itself came through RPC.
    """

    def __init__(self, message: str, errors: Mapping[str, Exception] | None = None) -> None:
        # torch's RPC rebuilds an error on the other side from its message alone.
        super().__init__(message)
        self.errors = dict(errors or {})


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that every worker can import, and its arguments."""


@holding  # what a signal handler raises is no error of a worker
def call_all(what: str, calls: Mapping[str, Call]) -> dict[str, Any]:
    """Makes one call on each worker, all at the same time, and waits until all have answered.

    Args:
        what: the name of the calls in the error's message.
        calls: the call for each worker, by the worker's name.

    Returns:
        The answer of each worker, by the worker's name.

    Raises:
        RemoteOptimizerError: if any call failed, after all workers have answered or their `rpc_timeout` is over.
    """
    futures: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    # A user's optimizer may raise anything, and the answers of the other workers must be awaited nevertheless.
    for name, (function, arguments) in calls.items():
        try:
            futures[name] = rpc.rpc_async(name, function, args=arguments)
        except Exception as error:  # noqa: BLE001
            errors[name] = error
    for name, future in futures.items():
        try:
            answers[name] = future.wait()
        except Exception as error:  # noqa: BLE001
            errors[name] = error
    if errors:
        causes = list(errors.values())
        cause = causes[0] if len(causes) == 1 else ExceptionGroup(f"{what} failed on {len(causes)} workers", causes)
        lines = [f"{name}: {_summary(error)}" for name, error in errors.items()]
        raise RemoteOptimizerError("\n".join([f"{what} failed on {', '.join(errors)}", *lines]), errors) from cause
    return answers


def _summary(error: Exception) -> str:
    """The error without the worker's name and traceback, which torch adds to an error of another process."""
    text = str(error).replace("\\n", "\n")  # an error like KeyError shows its message as a literal
    remote = re.search(r"On WorkerInfo\(.*?\):\n(.*?)\nTraceback \(most recent call last\)", text, re.DOTALL)
    return remote[1] if remote else f"{type(error).__name__}: {error}"
