"""Train a small GPT-2 with Hugging Face's Trainer, in FP32 or in mixed precision.

    python examples/hf_trainer.py            # in mixed precision
    python examples/hf_trainer.py --plain    # transformers alone, in FP32

Random weights, made-up data, nothing is downloaded. It needs
`pip install "mpcompile[huggingface]"`.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mpcompile.integrations.huggingface import MPCompileTrainer

WORDS, LENGTH, STEPS = 32, 16, 40


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of words, each word a fixed distance after the one before."""
    generator = torch.Generator().manual_seed(seed)
    first, distance = torch.randint(WORDS, (2, count, 1), generator=generator)
    ids = (first + (1 + distance % 3) * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in ids]


def train(*, plain: bool, seed: int = 0, **options: Any) -> float:
    """Train, and return the mean loss of the last 10 steps. `options` go to `mpcompile()`."""
    set_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, gradient_accumulation_steps=2,
            learning_rate=1e-2, max_grad_norm=1.0, seed=seed, logging_steps=10, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        given = {"model": model, "args": args, "train_dataset": sequences(1280, 1)}
        if plain:
            trainer = Trainer(**given)
        else:  # the changed line
            trainer = MPCompileTrainer(**given, mpcompile=options, compile_optimizers=True)
        trainer.train()
    losses: list[float] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without mpcompile, in FP32")
    parser.add_argument("--level", default="O2", help="O1 or O2 (default)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    loss = train(plain=given.plain, seed=given.seed, level=given.level)
    print(f"loss at the end: {loss:.4f}")


if __name__ == "__main__":
    main()
