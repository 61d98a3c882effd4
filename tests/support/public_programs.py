"""Ten public training scripts, each written again and small: the models' idioms and the loop's.

A script says how its models, batches and optimizers are made, and what one step of its loop does.
The step is plain PyTorch: whoever runs it hands it models that are compiled or not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import public_clip
import public_dit
import public_images
import public_language
import public_mamba
import public_quantize
import public_words
from public_loops import Clip, Models, Optimizers, Step
from torch import Tensor


@dataclass(frozen=True)
class Script:
    """One script.

    Attributes:
        models: makes the models, with random weights.
        batch: draws what one step is given.
        step: (models, optimizers, clip) -> the step. It takes the batch and the state that the
            loop carries on, and returns the loss and that state.
        optimizers: (models, a factor for the learning rates) -> the optimizers; a script without
            one updates its parameters itself, at a rate of its own.
        clip: the norm to which the script clips gradients.
        state: what the loop starts with.
        draws: how many batches errors are taken of. After a ReLU most of an error comes from the
            few units that round to its other side: one batch has ten times another one's.
    """

    models: Callable[[], Models]
    batch: Callable[[], tuple[Tensor, ...]]
    step: Callable[[Models, Optimizers, Clip], Step]
    optimizers: Callable[[Models, float], Optimizers]
    clip: float | None = None
    state: Callable[[Models], tuple[Any, ...]] = lambda models: ()
    draws: int = 7


SCRIPTS = {
    "nanogpt": Script(
        public_language.gpt, public_language.batch, public_language.step,
        public_language.adamw_groups, clip=1.0,
    ),
    "mnist": Script(
        public_images.mnist, public_images.mnist_batch, public_images.mnist_step,
        public_images.adadelta,
    ),
    "dcgan": Script(
        public_images.dcgan, public_images.dcgan_batch, public_images.dcgan_step,
        public_images.adams,
    ),
    "vae": Script(
        public_images.vae, public_images.vae_batch, public_images.vae_step, public_images.adam,
    ),
    "word_lstm": Script(
        public_words.lstm, public_words.batch, public_words.lstm_step, public_words.by_hand,
        clip=0.25, state=public_words.first_hidden,
    ),
    "word_transformer": Script(
        public_words.transformer, public_words.batch, public_words.transformer_step,
        public_words.adamw, clip=0.25, draws=41,
    ),
    "vector_quantize": Script(
        public_quantize.autoencoder, public_quantize.batch, public_quantize.step,
        public_quantize.adamw,
    ),
    "clip": Script(
        public_clip.clip, public_clip.batch, public_clip.step, public_clip.adamw,
    ),
    "dit": Script(
        public_dit.dit, public_dit.batch, public_dit.step, public_dit.adamw,
    ),
    "mamba": Script(
        public_mamba.mamba, public_mamba.batch, public_mamba.step, public_mamba.adamw,
        clip=1.0,
    ),
}  # fmt: skip
