"""Error feedback: what the parts of a peer lose by a lossy codec is added to its next parts.

With d what a peer contributes, e its residual, Q(x) what is decoded of x, and w of W its weight, a round computes

    c = d + beta e                         the part; Q(c) is what arrives
    mean = sum of (w / W) Q(c)             of the reducer's own part, c itself: it is not sent
    result = Q'(mean)

and when it is committed, e becomes c - Q(c), or for a chunk that this peer has reduced itself (W / w) (mean - result):
so the error of a result comes back too, in the next part of the peer that made it. With beta = 1 the sum of all results
differs from the sum of the exact means by the weighted mean of the residuals that are left, however many rounds there
were. Where weights change between rounds, an error comes back with the next weight. A peer that brings little once, and
more afterwards, would overshoot. So W / w is at most 4 times the number of contributions: who brings less than a
quarter of the mean weight makes up for a part of its results' errors only.

Source: Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
Compression" (arXiv 1905.05957), algorithm 1. There one server has the error of all results; here each reducer carries
that of its chunks in the residual that it has anyway, so that another peer can reduce them in the next round.

[Note: which error a chunk leaves]
Nothing of a residual changes before `Errors.settle`, after COMMIT. Until then each version of a chunk that this peer
had a part in is kept with the error that it would leave. A chunk may be sent twice, where a reducer was lost; this
peer may have reduced it itself, and the version of another may be committed. What decides is the committed digest: if
it is that of what this peer has reduced, its part was exact; otherwise its part was what it has sent, and it has sent
the same to all. A reducer has the parts of all members before it reduces a chunk, but for those it is parted from. So
of a chunk that was sent only to such, the part may have been left out: its residual stays. A peer that misses COMMIT
and fetches the result owes what it had sent until then, as if it had heard COMMIT: its samples count as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.flat import is_finite
from shoal.swarm.protocol.book import Book

MOST_SHARES: Final = 4  # of the errors of results, by the number of contributions


@dataclass(frozen=True, slots=True)
class Residual:
    """What was lost of the parts of one flat buffer, and has not come back.

    Attributes:
        values: 1-D, float32, on the host, one for each element of the buffer; zeros at first.
        beta: how much of it the next part makes up for, over 0 and at most 1.
    """

    values: Tensor
    beta: float


class Errors:
    """The errors that the chunks of one round leave if it is committed. They take up to 4 bytes an element until then.

    Args:
        residuals: of each flat buffer; None for a buffer without error feedback.
        book: of the round.
    """

    def __init__(self, residuals: Sequence[Residual | None], book: Book) -> None:
        self._residuals, self._book = residuals, book
        self._sent: dict[int, tuple[Tensor, dict[bytes, None]]] = {}  # and to whom
        self._reduced: dict[int, tuple[Tensor, bytes]] = {}  # and the digest of the result

    def keeps(self, chunk: int) -> bool:
        """Whether that chunk has error feedback."""
        return self._residuals[self._book.chunks[chunk].buffer] is not None

    def corrected(self, chunk: int, values: Tensor) -> Tensor:
        """The part c of a chunk of which the input has these values: in memory of its own, as float32 (float64 of
        float64)."""
        residual, own = self._of(chunk)
        return torch.add(values, own, alpha=residual.beta)

    def sent(self, chunk: int, error: Tensor, reducer: bytes) -> None:
        """The part of a chunk was sent to that reducer, with this error."""
        _, to = self._sent.get(chunk, (error, {}))
        self._sent[chunk] = error, {**to, reducer: None}

    def reduced(self, chunk: int, error: Tensor, digest: bytes, own: float, weights: Sequence[float]) -> None:
        """This peer has reduced a chunk. The result has this error and that digest; `weights` are those of what it is
        the mean of, and among them is this peer's own."""
        self._reduced[chunk] = error.mul_(min(sum(weights) / own, MOST_SHARES * len(weights))), digest

    def take_over(self, earlier: Errors) -> None:
        """This is the round of `earlier` once more: what was sent and reduced there counts."""
        self._sent, self._reduced = earlier._sent, earlier._reduced
        self._book.parted |= earlier._book.parted

    def settle(self) -> None:
        """The round was committed: its errors are the residuals."""
        book = self._book
        for chunk, digest in enumerate(book.digests):
            if not self.keeps(chunk):
                continue
            error: Tensor | None = None
            if chunk in self._reduced and self._reduced[chunk][1] == digest:
                error = self._reduced[chunk][0]
            elif chunk in self._sent and not all(reducer in book.parted for reducer in self._sent[chunk][1]):
                error = self._sent[chunk][0]
            if error is not None and is_finite(error):  # a part with NaN or infinity was left out
                self._of(chunk)[1].copy_(error)

    def _of(self, chunk: int) -> tuple[Residual, Tensor]:
        """The residual of a chunk's buffer, and its values of that chunk."""
        span = self._book.chunks[chunk]
        residual = self._residuals[span.buffer]
        assert residual is not None
        return residual, residual.values[span.start : span.stop]


def check_error_feedback(beta: float | None) -> float | None:
    """Returns `beta`.

    Raises:
        ValueError: if it is not None and no share of a residual.
    """
    if beta is not None and (isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta <= 1):
        raise ValueError(f"error_feedback={beta!r}: give a number over 0 and at most 1, or None for none")
    return beta
