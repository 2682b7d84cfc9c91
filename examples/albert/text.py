"""From a folder of files to the token windows that ALBERT learns to fill in; the tokenizer is trained on the spot."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

SUFFIXES = (".py", ".txt", ".md", ".rst")
PAD, UNKNOWN, START, END, MASK = "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"
LONGEST_FILE = 1 << 22  # bytes; longer ones are data rather than text


def read_files(folder: Path | None) -> list[str]:
    """The texts below a folder, in the order of their names; by default the standard library, its documentation
    (`pydoc_data`) included. Tests and installed packages are left out.

    Raises:
        ValueError: if there is none.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    left_out = {"site-packages", "test", "tests", "idle_test"}
    chosen = [path for path in found if not left_out & set(path.relative_to(root).parts)]
    texts = [path.read_text(errors="replace") for path in chosen if path.stat().st_size <= LONGEST_FILE]
    if not texts:
        raise ValueError(f"{root} has no file that ends in {', '.join(SUFFIXES)}: name another folder with --data")
    return texts


def train_tokenizer(texts: list[str], vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of these texts, with ALBERT's special tokens. Equal texts give equal tokenizers.

    Args:
        texts: to learn from.
        vocab_size: how many tokens there are, special ones included.
        longest: tokens that the model takes at once.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, UNKNOWN, START, END, MASK],
        limit_alphabet=500,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=longest,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=START,
        sep_token=END,
        mask_token=MASK,
    )


def windows(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> Tensor:
    """All texts one after the other, cut into windows: int64 [windows, length], each in [CLS] … [SEP].

    Raises:
        ValueError: if all texts together do not fill one.
    """
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    tokens = torch.tensor([token for text in encoded for token in text.ids])
    inside = length - 2
    count = len(tokens) // inside
    if not count:
        raise ValueError(f"{len(tokens)} tokens of text do not fill a window of {inside}: give more with --data")
    body = tokens[: count * inside].view(count, inside)
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id]).expand(count, 2)
    return torch.cat([ends[:, :1], body, ends[:, 1:]], dim=1)


def mask(tokenizer: PreTrainedTokenizerFast, batch: Tensor, share: float = 0.15) -> tuple[Tensor, Tensor]:
    """What is shown and what is to be found. A share of the tokens is asked for: 80 % of them are masked, 10 % replaced
    by any other token and 10 % left as they are (Devlin et al., 2018, https://arxiv.org/abs/1810.04805).

    Args:
        tokenizer: whose special tokens are never asked for.
        batch: int64 [batch, length].
        share: of the tokens that are asked for.

    Returns:
        two like `batch`: inputs, and labels, which are -100 where nothing is asked for.
    """
    special = torch.tensor(tokenizer.all_special_ids)
    asked = (torch.rand(batch.shape) < share) & ~torch.isin(batch, special)
    fate = torch.rand(batch.shape)
    inputs = torch.where(asked & (fate < 0.8), tokenizer.mask_token_id, batch)
    inputs = torch.where(asked & (fate >= 0.9), torch.randint_like(batch, len(tokenizer)), inputs)
    return inputs, torch.where(asked, batch, -100)
