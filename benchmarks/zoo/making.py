"""How the zoo's models are made: a class and a config of Hugging Face's, odd sizes, random weights.

Hidden size 36 in three heads of 12, vocabulary 101, 13 tokens: multiples of neither 8 nor 16, as
the odd sizes of real models. Nothing is downloaded. Every dropout is off, so that two calls compute
the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH, ROWS = 101, 13, 2

_SPREAD = 0.02

Inputs = dict[str, Tensor]

TEXT: Mapping[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 50, "max_position_embeddings": 32,
}  # fmt: skip
"""What most language models call their sizes."""
VISION: Mapping[str, Any] = {
    "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 50,
    "image_size": 33, "patch_size": 11,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        kind: as "decoder", "vision", "state space".
        build: makes the model, with weights drawn from torch's default generator.
        draw: makes what it is called with, from a generator of its own.
        loss: of the model and what `draw` made: a scalar.
    """

    kind: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Inputs]
    loss: Callable[[nn.Module, Inputs], Tensor]


def hugging_face(
    kind: str, name: str, config: str, draw: Callable[[torch.Generator], Inputs], **sizes: Any
) -> Entry:
    """`name` and `config` are classes of transformers; the model computes its loss itself."""

    def build() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**sizes)
        _without_dropout(settings)
        return random_everywhere(getattr(transformers, name)(settings))

    return Entry(kind, build, draw, _own_loss)


def to_be_compared(model: nn.Module) -> nn.Module:
    """The same model with no dropout, which a few have unless told otherwise, and random numbers
    everywhere.
    """
    for module in model.modules():
        for rate in ("drop_rate", "drop_path_rate"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return random_everywhere(model)


def random_everywhere(model: nn.Module) -> nn.Module:
    """The same model, in training mode, after every parameter of equal elements got random ones.

    Such as a class token of zeros, which a norm would divide by the root of its epsilon: all its
    gradient would be that division's rounding.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=_SPREAD)
    return model.train()


def _own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def _without_dropout(config: Any) -> None:
    """Every rate of a config, and of the configs within it, is 0; so are the rates of layers that
    are left out.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or name.endswith("_prob")):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _without_dropout(value)


def _ids(generator: torch.Generator) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)


def language(generator: torch.Generator) -> Inputs:
    """Tokens, which are their own labels."""
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids}


def translation(generator: torch.Generator) -> Inputs:
    """Tokens, and as many others to translate them to."""
    return {"input_ids": _ids(generator), "labels": _ids(generator)}


def image(size: int = 33) -> Callable[[torch.Generator], Inputs]:
    """Images of `size` x `size`, of two classes."""

    def draw(generator: torch.Generator) -> Inputs:
        pixels = torch.randn(ROWS, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}

    return draw


def waveform(length: int = 801) -> Callable[[torch.Generator], Inputs]:
    """Sound of two classes."""

    def draw(generator: torch.Generator) -> Inputs:
        values = torch.randn(ROWS, length, generator=generator)
        return {"input_values": values, "labels": torch.tensor([0, 1])}

    return draw
