"""One compression of each kind, for the tests of rounds and downloads."""

from __future__ import annotations

from typing import Final

from shoal.compression import (
    BlockwiseQuantization,
    Compression,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)

BY_SIZE: Final = SizeAdaptiveCompression(1000, Float16Compression(), Uniform8BitQuantization())

COMPRESSIONS: Final[dict[str, Compression]] = {
    "none": NoCompression(),
    "float16": Float16Compression(),
    "scaled": ScaledFloat16Compression(),
    "uniform": Uniform8BitQuantization(),
    "quantile": Quantile8BitQuantization(),
    "blockwise": BlockwiseQuantization(),
    "by size": BY_SIZE,
    "by role": RoleAdaptiveCompression(
        gradient=BY_SIZE, optimizer=BlockwiseQuantization(), default=Quantile8BitQuantization()
    ),
    "by tensor": PerTensorCompression(
        [BlockwiseQuantization(), NoCompression(), BY_SIZE, Quantile8BitQuantization(), Float16Compression()]
    ),
}
LOSSY: Final = [name for name in COMPRESSIONS if name != "none"]
ROLES: Final = [TensorRole.GRADIENT, TensorRole.GRADIENT, TensorRole.OPTIMIZER, TensorRole.PARAMETER]
"""Of the first tensors, where a test needs some."""
