"""What the examples share: real text (the King James Version, as the demo reads it), a tokenizer trained on it, a small GPT-2
from its configuration, and what is said at the end. Nothing here needs a network."""

from __future__ import annotations

import argparse
import gc
from typing import Any

import misa
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from demo.data import read_text


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget", help="bytes on the device that the training may hold (\"64MiB\"); without it, plain training")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="sequences a step")
    parser.add_argument("--length", type=int, default=32, help="tokens a sequence")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--out", default="out/examples", help="where loggers write")
    return parser.parse_args()


class Text(torch.utils.data.Dataset):
    """The text as rows of tokens, in the form Hugging Face models take."""

    def __init__(self, options: argparse.Namespace) -> None:
        # A part is plenty for a small model.
        text = read_text()[: max(200_000, 20 * options.steps * options.rows * options.length)]
        tokenizer = Tokenizer(models.BPE(unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(
            text.splitlines(), trainers.BpeTrainer(vocab_size=options.vocabulary, show_progress=False,
                                                   initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        tokens = torch.tensor(tokenizer.encode(text).ids)
        self.rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model(options: argparse.Namespace) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=options.vocabulary, n_embd=options.width, n_layer=options.layers, n_head=max(1, options.width // 32),
        n_positions=options.length, bos_token_id=0, eos_token_id=0))


def begin() -> None:
    """One thread: results are the same bits at one number of threads only."""
    torch.set_num_threads(1)
    gc.collect()
    misa.memory.reset_peak()


def tell(model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    peak = misa.memory.peak_bytes()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"peak_bytes {peak}")
    print(f"state_sha256 {misa.state_sha256(model, optimizer)}")
