"""Fine-tune a language model by LoRA (the package peft) with the Trainer of Transformers, alone or with others.

    shoal node                              # prints an address by which peers find each other
    python lora.py /ip4/.../p2p/...         # each peer, on this machine or another

Only the adapters are trained, so only they travel: here 2 % of the model. The model that they adapt must be the same at
all peers, since nobody compares it. It stands in for one from a hub: random, from a seed. The three lines that
name `shoal` are all that an ordinary script does not have.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shoal

CONTEXT, WIDTH = 32, 64


def read_texts() -> list[dict[str, torch.Tensor]]:
    """Python's asyncio package in pieces of CONTEXT bytes, with themselves as labels."""
    files = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)]


def main() -> None:
    """Trains 30 epochs of the run, whoever takes part."""
    torch.manual_seed(0)  # the same model in every peer
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2
        )
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=30,
        learning_rate=1e-2,
        logging_steps=5,
        save_steps=15,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=read_texts())
    dht = shoal.DHT(sys.argv[1:], start=True)
    shoal.integrations.transformers.swarm(trainer, dht=dht, run_id="lora", target_batch_size=64)
    trainer.train()


if __name__ == "__main__":
    main()
