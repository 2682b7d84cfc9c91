"""Calls to several workers at once, and the one error that comes of those that failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import rpc


class RemoteOptimizerError(RuntimeError):
    """What was asked of the workers failed on one or more of them; the others have done it.

    Of a worker that did not answer within torch's `rpc_timeout` nobody knows whether it has done it, or still will.

    The message has a line for every worker that failed. ``__cause__`` is its error with the traceback of the worker, or
    an `ExceptionGroup` of them.

    Attributes:
        errors: worker's name to its error, of the type that was raised there where that can be rebuilt. Empty when this
            error itself came through RPC.
    """

    def __init__(self, message: str, errors: Mapping[str, Exception] | None = None) -> None:
        # torch's RPC makes an error anew, on the other side, from its message alone.
        super().__init__(message)
        self.errors = dict(errors or {})


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that every worker can import, and its arguments."""


def call_all(what: str, calls: Mapping[str, Call]) -> dict[str, Any]:
    """Makes one call on each worker, all at the same time, and waits until every one has answered.

    Args:
        what: the calls' name in the error's message.
        calls: worker's name to its call.

    Returns:
        worker's name to its answer.

    Raises:
        RemoteOptimizerError: if any failed, after all have answered or their `rpc_timeout` is over.
    """
    futures: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    # An optimizer of the user's may raise anything, and the other workers' answers are to be waited for all the same.
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
    """The error without the worker's name and traceback, which torch puts around an error of another process."""
    text = str(error).replace("\\n", "\n")  # an error like KeyError shows its message as a literal
    remote = re.search(r"On WorkerInfo\(.*?\):\n(.*?)\nTraceback \(most recent call last\)", text, re.DOTALL)
    return remote[1] if remote else f"{type(error).__name__}: {error}"
