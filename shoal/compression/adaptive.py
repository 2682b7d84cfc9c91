"""A codec for each tensor, chosen by its size, its role or its key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from shoal.compression.codec import Codec, Compression, PartsAndResults
from shoal.compression.info import CompressionInfo, TensorRole
from shoal.compression.none import NoCompression


class AdaptiveCompression(Compression):
    """A choice among compressions, which may be adaptive themselves. It encodes nothing by itself: `plan_codecs` gives
    the codecs of a layout, and `choose_compression` the codec of a tensor. Its `spec` is a JSON array of the name and
    the options; compressions among the options are written as their specs."""

    __slots__ = ()

    name: ClassVar[str]
    """The first item of `spec`. Never changes once released."""


def _check(given: Mapping[str, object]) -> None:
    for name, one in given.items():
        if not isinstance(one, Compression):
            raise ValueError(f"{name}={one!r:.60}: give a compression, such as shoal.compression.Float16Compression()")
        if isinstance(one, PartsAndResults):
            raise ValueError(
                f"{name} is made by Compression.of, which goes around: "
                "Compression.of(parts=…, results=…) of two adaptive compressions"
            )


@dataclass(frozen=True, slots=True)
class SizeAdaptiveCompression(AdaptiveCompression):
    """One compression for small tensors and another for large ones.

    Args:
        threshold: a tensor with at least so many elements is large. The whole tensor counts, however it is cut.
        less: for tensors with fewer elements.
        greater_equal: for tensors with as many or more.
    """

    name: ClassVar[str] = "size_adaptive"
    threshold: int
    less: Compression
    greater_equal: Compression

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold={self.threshold}: give a number of elements")
        _check({"less": self.less, "greater_equal": self.greater_equal})

    @property
    def spec(self) -> str:
        """``["size_adaptive", threshold, less, greater_equal]``"""
        return json.dumps([self.name, self.threshold, self.less.spec, self.greater_equal.spec])

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """By ``info.numel``."""
        return (self.greater_equal if info.numel >= self.threshold else self.less).choose_compression(info)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdaptiveCompression(AdaptiveCompression):
    """A compression for each role.

    Args:
        activation: for activations; None: as `default`.
        parameter: for parameters; None: as `default`.
        gradient: for gradients; None: as `default`.
        optimizer: for the optimizer's statistics; None: as `default`.
        default: for all others.
    """

    name: ClassVar[str] = "role_adaptive"
    activation: Compression | None = None
    parameter: Compression | None = None
    gradient: Compression | None = None
    optimizer: Compression | None = None
    default: Compression = field(default_factory=NoCompression)

    def __post_init__(self) -> None:
        given = {role: getattr(self, role) for role in ("activation", "parameter", "gradient", "optimizer")}
        _check({"default": self.default} | {role: one for role, one in given.items() if one is not None})

    @property
    def spec(self) -> str:
        """``["role_adaptive", activation, parameter, gradient, optimizer, default]``, null where none is given."""
        given = (self.activation, self.parameter, self.gradient, self.optimizer, self.default)
        return json.dumps([self.name, *(one and one.spec for one in given)])

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """By ``info.role``."""
        by_role = {
            TensorRole.ACTIVATION: self.activation,
            TensorRole.PARAMETER: self.parameter,
            TensorRole.GRADIENT: self.gradient,
            TensorRole.OPTIMIZER: self.optimizer,
        }
        return (by_role.get(info.role) or self.default).choose_compression(info)


@dataclass(frozen=True, slots=True)
class PerTensorCompression(AdaptiveCompression):
    """A compression for each tensor. One that has none is an error when the plan is made.

    Args:
        tensor_compressions: by key, or in the order of the tensors, whose keys are then their positions.
    """

    name: ClassVar[str] = "per_tensor"
    tensor_compressions: Sequence[Compression] | Mapping[str | int, Compression]

    def __post_init__(self) -> None:
        given = self.tensor_compressions
        by_key = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
        _check({f"tensor_compressions[{key!r}]": one for key, one in by_key.items()})
        object.__setattr__(self, "tensor_compressions", by_key)

    def __hash__(self) -> int:
        return hash(self.spec)

    @property
    def _by_key(self) -> Mapping[str | int, Compression]:
        assert isinstance(self.tensor_compressions, Mapping)
        return self.tensor_compressions

    @property
    def spec(self) -> str:
        """``["per_tensor", [[key, compression], …]]``, sorted by key, numbers before names."""
        pairs = sorted(self._by_key.items(), key=lambda pair: (isinstance(pair[0], str), pair[0]))
        return json.dumps([self.name, [[key, one.spec] for key, one in pairs]])

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """By ``info.key``."""
        if info.key not in self._by_key:
            raise ValueError(f"no compression is given for tensor {info.key!r}, only for {len(self._by_key)} others")
        return self._by_key[info.key].choose_compression(info)
