"""Compressions that choose a codec for each tensor, by its size, its role or its key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from shoal.compression.codec import Codec, Compression, PartsAndResults
from shoal.compression.info import CompressionInfo, TensorRole
from shoal.compression.none import NoCompression


class AdaptiveCompression(Compression):
    """A choice among compressions, which may be adaptive themselves.

    It does not encode. `choose_compression` gives the codec of a tensor, and `plan_codecs` the codecs of a layout. Its
    `spec` is a JSON array of the name and the options; compressions among the options are written as their specs.
    """

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
        threshold: a tensor with at least this many elements is large. The size of the whole tensor counts, into
            whatever chunks it is cut.
        less: the compression of tensors with fewer elements.
        greater_equal: the compression of tensors with as many or more.

    Raises:
        ValueError: if the threshold is negative, or an argument is no compression or made by `Compression.of`.
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
        """The codec for a tensor, chosen by ``info.numel``."""
        return (self.greater_equal if info.numel >= self.threshold else self.less).choose_compression(info)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdaptiveCompression(AdaptiveCompression):
    """A compression for each role.

    Args:
        activation: the compression of activations; None (the default) to use `default`.
        parameter: the compression of parameters; None (the default) to use `default`.
        gradient: the compression of gradients; None (the default) to use `default`.
        optimizer: the compression of the optimizer's statistics; None (the default) to use `default`.
        default: the compression of all other tensors. Default: `NoCompression()`.

    Raises:
        ValueError: if an argument is no compression or made by `Compression.of`.
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
        """``["role_adaptive", activation, parameter, gradient, optimizer, default]``, with null for None."""
        given = (self.activation, self.parameter, self.gradient, self.optimizer, self.default)
        return json.dumps([self.name, *(one and one.spec for one in given)])

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """The codec for a tensor, chosen by ``info.role``."""
        by_role = {
            TensorRole.ACTIVATION: self.activation,
            TensorRole.PARAMETER: self.parameter,
            TensorRole.GRADIENT: self.gradient,
            TensorRole.OPTIMIZER: self.optimizer,
        }
        return (by_role.get(info.role) or self.default).choose_compression(info)


@dataclass(frozen=True, slots=True)
class PerTensorCompression(AdaptiveCompression):
    """A compression for each tensor. A tensor without one is an error when the plan is made.

    Args:
        tensor_compressions: the compressions by key, or in the order of the tensors, whose keys are then their
            positions.

    Raises:
        ValueError: if one of them is no compression or made by `Compression.of`.
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
        """The codec for a tensor, chosen by ``info.key``.

        Raises:
            ValueError: if no compression is given for this key.
        """
        if info.key not in self._by_key:
            raise ValueError(f"no compression is given for tensor {info.key!r}, only for {len(self._by_key)} others")
        return self._by_key[info.key].choose_compression(info)
