"""Error feedback: a peer adds the errors that a lossy codec made in its parts to its next parts.

Let d be a peer's input, e its residual, Q(x) the value of x after encoding and decoding, w the peer's weight, and W the
sum of all weights. A round computes

    c = d + beta e                         the part; the reducer receives Q(c)
    mean = sum of (w / W) Q(c)             the reducer's own part is exact: c, since it is not sent
    result = Q'(mean)

When the round is committed, e becomes c - Q(c). For a chunk that this peer has reduced, e becomes
(W / w) (mean - result) instead. So the error of a result comes back too, in the next part of the peer that made it.
With beta = 1, the sum of all results differs from the sum of the exact means only by the weighted mean of the current
residuals, however many rounds there were. If weights change between rounds, an error comes back with the next weight: a
peer that has a small weight once and a larger one afterwards would overshoot. So W / w is limited to 4 times the number
of contributions. A peer with less than a quarter of the mean weight makes up for only a share of its results' errors.

Source: Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
Compression" (arXiv 1905.05957), algorithm 1. There one server keeps the errors of all results. Here each reducer keeps
the errors of its chunks in its own residual, so that another peer can reduce these chunks in the next round.

[Note: which error a chunk leaves]
A residual changes only in `Errors.settle`, after COMMIT. Until then this peer keeps each version of a chunk that it has
sent or reduced, with the error that this version would leave. There may be several versions. If a reducer is lost, a
chunk is sent twice. And if this peer has reduced a chunk, another peer's version of it may be committed. The committed
digest decides: if it is the digest of this peer's version, this peer's part was exact; otherwise the part was the one
that this peer has sent, and it sends the same part to all. A reducer waits for the parts of all members except those
that it is parted from. So if this peer has sent its part only to peers that it is parted from, the part may be missing
in the result, and its residual stays. A peer that misses COMMIT and fetches the result settles as if it had received
COMMIT, since its samples count as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.flat import is_finite
from shoal.swarm.protocol.book import Book

MOST_SHARES: Final = 4  # the limit of W / w, as a multiple of the number of contributions


@dataclass(frozen=True, slots=True)
class Residual:
    """The errors of one flat buffer that later parts have yet to make up for.

    Attributes:
        values: 1-D float32 CPU tensor, one value for each element of the buffer; zeros at first.
        beta: the share of the values that is added to the next part, over 0 and at most 1.
    """

    values: Tensor
    beta: float


class Errors:
    """The errors that the chunks of one round leave if it is committed. They take up to 4 bytes per element until then.

    Args:
        residuals: the residual of each flat buffer; None for a buffer without error feedback.
        book: the book of the round.

    Attributes:
        round: the name of the round.
    """

    def __init__(self, residuals: Sequence[Residual | None], book: Book) -> None:
        self._residuals, self._book, self.round = residuals, book, book.begin.round
        self._sent: dict[int, tuple[Tensor, dict[bytes, None]]] = {}  # by chunk: the error, and the receivers
        self._reduced: dict[int, tuple[Tensor, bytes]] = {}  # by chunk: the error, and the digest of the result

    def keeps(self, chunk: int) -> bool:
        """Whether that chunk has error feedback."""
        return self._residuals[self._book.chunks[chunk].buffer] is not None

    def corrected(self, chunk: int, values: Tensor) -> Tensor:
        """The part c of a chunk whose input has these values. Returns a new float32 tensor (float64 for float64
        values)."""
        residual, own = self._of(chunk)
        return torch.add(values, own, alpha=residual.beta)

    def sent(self, chunk: int, error: Tensor, reducer: bytes) -> None:
        """This peer has sent its part of a chunk to that reducer. The encoded part has this error."""
        _, to = self._sent.get(chunk, (error, {}))
        self._sent[chunk] = error, {**to, reducer: None}

    def reduced(self, chunk: int, error: Tensor, digest: bytes, own: float, weights: Sequence[float]) -> None:
        """This peer has reduced a chunk. The result has this error and that digest. `weights` are the weights of all
        contributions, and `own`, this peer's weight, is among them."""
        self._reduced[chunk] = error.mul_(min(sum(weights) / own, MOST_SHARES * len(weights))), digest

    def take_over(self, earlier: Errors) -> None:
        """Take over what `earlier`, the errors of the same round, has noted as sent and reduced."""
        self._sent, self._reduced = earlier._sent, earlier._reduced
        self._book.parted |= earlier._book.parted

    def settle(self) -> None:
        """The round was committed, and its result is used: its errors become the residuals, and are released. Calling
        this again does nothing."""
        book = self._book
        for chunk, digest in enumerate(book.digests):
            if not self.keeps(chunk):
                continue
            error: Tensor | None = None
            if chunk in self._reduced and self._reduced[chunk][1] == digest:
                error = self._reduced[chunk][0]
            elif chunk in self._sent and not all(reducer in book.parted for reducer in self._sent[chunk][1]):
                error = self._sent[chunk][0]
            if error is not None and is_finite(error):  # the reducer has left out a part with NaN or infinity
                self._of(chunk)[1].copy_(error)
        self._sent.clear()
        self._reduced.clear()

    def _of(self, chunk: int) -> tuple[Residual, Tensor]:
        """The residual of the chunk's buffer, and its values in that chunk."""
        span = self._book.chunks[chunk]
        residual = self._residuals[span.buffer]
        assert residual is not None
        return residual, residual.values[span.start : span.stop]
