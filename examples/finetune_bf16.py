"""Fine-tune a model whose weights are BF16: all of them, and adapters (LoRA) on a frozen base.

    python examples/finetune_bf16.py               # a table: loss, bytes for each parameter
    python examples/finetune_bf16.py --steps 400

A small GPT of Hugging Face's is trained on one rule, stored in BF16 as a checkpoint is, and then
fine-tuned to another rule at a small learning rate, in these ways:

    bf16, plain         AdamW on BF16 weights: small updates round to nothing
    by hand             BF16 weights, and FP32 masters in a list of the loop's own
    mpcompile           BF16 weights, `mpcompile(model)` and `MPOptimizer`
    Trainer, bf16=True  FP32 weights under autocast, by Hugging Face's Trainer
    LoRA                the last two with adapters of peft's, at a larger learning rate

Random weights, made-up data, nothing is downloaded. It needs
`pip install "mpcompile[huggingface]" peft`.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import peft
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from mpcompile import MPOptimizer, mpcompile

WORDS, LENGTH, BATCH = 32, 16, 16
LR, LORA_LR = 3e-5, 3e-3
BF16 = torch.bfloat16


class Result(NamedTuple):
    """What a way of training came to: the loss on rows not trained on, and the bytes of weights,
    gradients and optimizer state for each parameter of the model.
    """

    loss: float
    bytes: float


def rows(count: int, distance: int, seed: int) -> torch.Tensor:
    """(count, LENGTH) sequences of words, each `distance` further than the one before."""
    first = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (first + distance * torch.arange(LENGTH)) % WORDS


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def pretrained(steps: int = 150) -> nn.Module:
    """A model that knows that each word is three further than the one before."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **off))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        loss_of(model, rows(BATCH, 3, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adapted(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM",
                             fan_in_fan_out=True)  # fmt: skip
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def held(model: nn.Module, optimizer: Any, others: Iterable[torch.Tensor] = ()) -> float:
    """Bytes for each parameter, while gradients exist."""
    params = list(model.parameters())
    state = [v for entries in optimizer.state.values() for v in entries.values()]
    tensors = [*params, *(p.grad for p in params if p.grad is not None), *others, *state]
    found = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}
    return sum(found.values()) / sum(p.numel() for p in params)


def evaluated(model: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, rows(64, 5, -1)).item()


def in_a_loop(model: nn.Module, optimizer: Any, steps: int) -> Result:
    size = 0.0
    for step in range(steps):
        loss_of(model, rows(BATCH, 5, step)).backward()
        optimizer.step()
        size = held(model, optimizer)
        optimizer.zero_grad()
    return Result(evaluated(model), size)


def plain_bf16(model: nn.Module, steps: int, lr: float, **_: Any) -> Result:
    model.to(BF16)
    return in_a_loop(model, torch.optim.AdamW(model.parameters(), lr=lr), steps)


def masters_by_hand(model: nn.Module, steps: int, lr: float, **_: Any) -> Result:
    params = list(model.to(BF16).parameters())
    masters = [p.detach().float() for p in params]
    optimizer, size = torch.optim.AdamW(masters, lr=lr), 0.0
    for step in range(steps):
        loss_of(model, rows(BATCH, 5, step)).backward()
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float() if p.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
        wide = [m.grad for m in masters if m.grad is not None]
        size = held(model, optimizer, [*masters, *wide])
        model.zero_grad()
    return Result(evaluated(model), size)


def with_mpcompile(model: nn.Module, steps: int, lr: float, **options: Any) -> Result:
    model = mpcompile(model.to(BF16), **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = MPOptimizer(torch.optim.AdamW(trained, lr=lr), emit=options.get("emit", "inductor"))
    return in_a_loop(model, optimizer, steps)


class _Measure(TrainerCallback):
    size = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.size = held(known["model"], known["optimizer"])


def with_trainer(model: nn.Module, steps: int, lr: float, **_: Any) -> Result:
    data = [{"input_ids": row, "labels": row}
            for step in range(steps) for row in rows(BATCH, 5, step)]  # fmt: skip
    measure = _Measure()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, bf16=True, use_cpu=not torch.cuda.is_available(), max_steps=steps,
            learning_rate=lr, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=0.0,
            per_device_train_batch_size=BATCH, save_strategy="no", report_to=[], disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        Trainer(model=model, args=args, train_dataset=data, callbacks=[measure]).train()
    return Result(evaluated(model.cpu()), measure.size)


def compare(steps: int, **options: Any) -> dict[str, Result]:
    """Train in each way; `options` go to `mpcompile()`."""
    start = pretrained().to(BF16).float()  # numbers that BF16 holds, so all begin alike
    ways: dict[str, Callable[..., Result]] = {
        "bf16, plain": plain_bf16, "by hand": masters_by_hand, "mpcompile": with_mpcompile,
        "Trainer, bf16=True": with_trainer,
    }  # fmt: skip
    found = {name: way(copy.deepcopy(start), steps, LR, **options) for name, way in ways.items()}
    for name, way in {"mpcompile": with_mpcompile, "Trainer, bf16=True": with_trainer}.items():
        model = adapted(copy.deepcopy(start))
        found[f"LoRA, {name}"] = way(model, steps, LORA_LR, **options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--emit", default="inductor")
    asked = parser.parse_args()
    print(f"{'':26} {'loss':>8} {'bytes for each parameter':>26}")
    for name, result in compare(asked.steps, emit=asked.emit).items():
        print(f"{name:26} {result.loss:8.4f} {result.bytes:26.2f}")


if __name__ == "__main__":
    main()
