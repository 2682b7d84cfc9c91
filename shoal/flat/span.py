"""A span: the half-open range of elements of a flat buffer on which all distributed operations work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The elements ``start <= i < stop`` of a flat buffer.

    ``len(span)`` is the number of elements, so an empty span is false. Spans are ordered by start, then by stop.

    Attributes:
        start: the first element.
        stop: one past the last element.

    Raises:
        ValueError: unless ``0 <= start <= stop``.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a span needs 0 <= start <= stop, got start={self.start}, stop={self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The same range as a ``slice``, for indexing a 1-D tensor."""
        return slice(self.start, self.stop)

    def intersect(self, other: Span) -> Span:
        """The elements that are in both spans; an empty span if there are none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def split(self, n_elements: int) -> list[Span]:
        """Cuts the span into consecutive spans of ``n_elements`` each. The last one may be shorter. An empty span gives
        an empty list.

        Raises:
            ValueError: if ``n_elements`` is below 1.
        """
        if n_elements < 1:
            raise ValueError(f"a span is split into pieces of at least 1 element, got n_elements={n_elements}")
        return [Span(start, min(start + n_elements, self.stop)) for start in range(self.start, self.stop, n_elements)]
