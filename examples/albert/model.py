"""ALBERT (Lan et al., 2019, https://arxiv.org/abs/1909.11942) and LAMB (You et al., 2019,
https://arxiv.org/abs/1904.00962), each from the library that people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorch_optimizer import Lamb
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import AlbertConfig, AlbertForMaskedLM, get_linear_schedule_with_warmup

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "embedding_size": 64,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "base": {
        "embedding_size": 128,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "large": {
        "embedding_size": 128,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}


def make_model(size: str, vocab_size: int, longest: int, tokens: dict[str, int]) -> AlbertForMaskedLM:
    """An ALBERT with the same first parameters on every peer.

    Args:
        size: of `SIZES`.
        vocab_size: of the tokenizer.
        longest: tokens that it takes at once.
        tokens: `pad_token_id` and so on.
    """
    torch.manual_seed(0)
    config = AlbertConfig(vocab_size=vocab_size, max_position_embeddings=longest, **SIZES[size], **tokens)
    model = AlbertForMaskedLM(config)
    torch.seed()
    return model


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Biases and normalisations do not decay."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def lamb(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes LAMB. It clips nothing by itself: `max_grad_norm=0`."""
    return lambda params: Lamb(params, lr=lr, betas=(0.9, 0.999), eps=1e-6, max_grad_norm=0.0)


def warm_up(epochs: int, total: int) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """Makes a scheduler: linearly up in so many epochs, and linearly down until `total`."""
    return lambda optimizer: get_linear_schedule_with_warmup(optimizer, epochs, total)
