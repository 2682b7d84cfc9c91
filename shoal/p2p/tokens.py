"""By which the connections of a lane are known: told over the link, good once, and not for long. No clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

TOKEN_BYTES: Final = 32
TOKEN_SECONDS: Final = 10.0
FIRST_BYTE: Final = b"\0"  # with which nothing of TLS begins: links come to the same port

T = TypeVar("T")


class Tokens(Generic[T]):
    """What each token that this side gave is good for.

    Args:
        draw: gives so many random bytes.
    """

    def __init__(self, draw: Callable[[int], bytes]) -> None:
        self._draw = draw
        self._grants: dict[bytes, tuple[float, T]] = {}

    def issue(self, grant: T, now: float) -> bytes:
        """A token for `grant`. Those that are too old are forgotten."""
        self._grants = {token: (expires, held) for token, (expires, held) in self._grants.items() if now < expires}
        token = FIRST_BYTE + self._draw(TOKEN_BYTES - 1)
        self._grants[token] = now + TOKEN_SECONDS, grant
        return token

    def redeem(self, token: bytes, now: float) -> T | None:
        """What it is good for; None if it is unknown, too old, or used."""
        expires, grant = self._grants.pop(token, (now, None))
        return grant if now < expires else None
