"""A gradient that follows the loss scale is wrong: it is found by comparing two backwards."""

import pytest
import torch

from mpcompile import MPCompileError
from mpcompile.scaling.fit_scale import FACTOR, check_two_scales

GRADIENTS = {
    "real": torch.tensor([1.0, -2.0]),
    "imaginary": torch.tensor([1j, -2j]),
    "conjugate": torch.tensor([1j, 2 + 1j]).conj(),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_that_follows_the_scale(kind: str) -> None:
    gradient = GRADIENTS[kind]
    check_two_scales([gradient], [gradient], ())
    check_two_scales([gradient * FACTOR], [gradient], (0,))  # it is to leave scaled
    for higher, lower in ((gradient * FACTOR, gradient), (gradient, gradient * FACTOR)):
        with pytest.raises(MPCompileError, match="depends on the loss scale"):
            check_two_scales([higher], [lower], ())
