"""What the frameworks train in tests: tiny random models and data that every process can make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH = 16, 8


def texts(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random texts of one length, with their labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def language_model(seed: int = 0) -> Any:
    """A causal language model of Transformers with random weights and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def inputs(count: int, seed: int = 0) -> Tensor:
    """Random rows of 8 numbers."""
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
