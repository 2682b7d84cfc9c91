"""How peers compare frozen parameters, such as the base model under adapters, of which each peer has its own copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.averaging.options import described
from shoal.optim.loads import hash_of
from shoal.swarm.protocol.tensors import Tensors

SAMPLE_BYTES = 4096
"""How much of each tensor is compared, spread evenly over it. This tells apart copies that were fine-tuned, pruned or
drawn from other seeds."""

KIND = "frozen parameters (see the option frozen_parameters)"


def described_frozen(parameters: Sequence[Tensor], names: Sequence[str], *, whole: bool) -> Tensors:
    """The dtype, shape and hash of each tensor, as peers describe them to each other. Quantized tensors are left out.

    Args:
        parameters: the frozen parameters.
        names: their names, if there are any.
        whole: hash all of each tensor; if False, 4 KiB of it.
    """
    chosen = [number for number, parameter in enumerate(parameters) if not _is_quantized(parameter)]
    tensors = [parameters[number] for number in chosen]
    shapes = described(KIND, tensors).shapes
    found = [f"{shape} of hash {_hash(each, whole)}" for shape, each in zip(shapes, tensors, strict=True)]
    return Tensors(KIND, found, [names[number] for number in chosen] if names else [])


def _is_quantized(parameter: Tensor) -> bool:
    """Whether the values are codes, which depend on the package and the device that made them."""
    return not parameter.is_floating_point() or type(parameter.data) not in (Tensor, nn.Parameter)


@torch.no_grad()
def _hash(parameter: Tensor, whole: bool) -> str:
    elements = parameter.detach().reshape(-1)
    count = SAMPLE_BYTES // parameter.element_size()
    if not whole and elements.numel() > count:
        places = torch.arange(count, device=elements.device) * (elements.numel() - 1) // (count - 1)
        elements = elements[places]
    return hash_of([elements]).hex()[:16]
