"""The signed statements of a run's owner, each as one line of text: `shoal-<kind>-1:<base64>`."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Generic, TypeVar

import msgspec

from shoal.membership.run import ClosedRun
from shoal.p2p.identity import KEY_BYTES, SIGNATURE_BYTES, Identity

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
RunId = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Number = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
Seconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # since 1970, as `get_dht_time`


class Statement(msgspec.Struct, frozen=True, array_like=True):
    """A statement of an owner about its run. The signature covers its kind too, so no kind can be taken for another."""

    run_id: RunId


S = TypeVar("S", bound=Statement)


class StatementKind(Generic[S]):
    """One kind of statement, with its text form.

    Args:
        word: the name of the kind.
        type: the type of the statements.
        max_bytes: the largest size of a statement of this kind, signature included.
    """

    def __init__(self, word: str, type: type[S], max_bytes: int) -> None:
        self.word, self.max_bytes = word, max_bytes
        self.prefix = f"shoal-{word}-1:"
        self.max_text = len(self.prefix) + -(-max_bytes // 3) * 4
        self._decoder = msgspec.msgpack.Decoder(type)  # made at import, on one thread

    def sign(self, owner: Identity, statement: S) -> str:
        """The statement as a line of text, signed by the owner. Raises ValueError if it breaks a bound."""
        body = msgspec.msgpack.encode(statement)
        if len(body) + SIGNATURE_BYTES > self.max_bytes:
            raise ValueError(f"{self.word}: it takes {len(body)} bytes, more than {self.max_bytes - SIGNATURE_BYTES}")
        text = self.prefix + base64.urlsafe_b64encode(body + owner.sign(self._signed(body))).decode().rstrip("=")
        run = ClosedRun.of(statement.run_id)
        if run is None or run.owner != owner.peer_id:
            raise ValueError(f"{statement.run_id!r} is not a run of this owner")
        self.read(text, run)  # this checks every bound before anybody else reads the text
        return text

    def read(self, text: str, run: ClosedRun) -> S:
        """The statement in `text`, which the owner of `run` must have signed for that run.

        Raises:
            ValueError: if the text is no such statement. The message says what is wrong.
        """
        statement, body, signature = self._open(text)
        if statement.run_id != run.run_id:
            raise ValueError(f"this {self.word} is of the run {statement.run_id!r}, not of {run.run_id!r}")
        if not run.owner.verify(self._signed(body), signature):
            raise ValueError(f"this {self.word} was not signed by the owner of {run.run_id!r}")
        return statement

    def read_any(self, text: str) -> S:
        """The statement in `text`, signed by the owner of the run that it names. Raises ValueError as `read`."""
        run = ClosedRun.of(self._open(text)[0].run_id)
        if run is None:
            raise ValueError(f"this {self.word} is of an open run, which has no owner")
        return self.read(text, run)

    def is_one(self, text: str) -> bool:
        """Whether `text` begins like a statement of this kind."""
        return text.strip().startswith(self.prefix)

    def _open(self, text: str) -> tuple[S, bytes, bytes]:
        line = text.strip()
        if not line.startswith(self.prefix) or len(line) > self.max_text:
            raise ValueError(f"this is no {self.word}: it is one line that begins with {self.prefix!r}")
        encoded = line.removeprefix(self.prefix)
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
            statement = self._decoder.decode(body)
        except (binascii.Error, ValueError, RecursionError) as error:
            raise ValueError(f"this {self.word} can't be read: {error}") from error
        if msgspec.msgpack.encode(statement) != body:
            raise ValueError(f"this {self.word} can't be read: it is not in its shortest form")
        return statement, body, signature

    def _signed(self, body: bytes) -> bytes:
        return f"shoal {self.word} 1\0".encode() + body
