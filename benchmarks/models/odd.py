"""Networks whose sizes are no multiples of 8, as the originals' are."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Detector", "Recommender"]


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019) on (B, 13) numbers: two towers, and products of 27 features.

    The sparse features, of which a click log has 26, are hashes of the numbers.
    """

    def __init__(self, *, rows: int = 50, width: int = 64) -> None:
        super().__init__()
        self.rows = rows
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width)
        )
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(26))
        self.top = nn.Sequential(
            nn.Linear(width + 27 * 13, 479), nn.ReLU(), nn.Linear(479, 367), nn.ReLU(),
            nn.Linear(367, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, targets: Tensor) -> Tensor:
        x = self.bottom(numbers)
        hashes = (numbers.repeat(1, 2) * 1e3).long() % self.rows
        tables = zip(self.tables, hashes.unbind(1), strict=True)
        features = torch.stack([x, *(table(index) for table, index in tables)], 1)
        pairs = torch.bmm(features, features.transpose(1, 2))
        first, second = torch.tril_indices(27, 27, -1, device=x.device).unbind(0)
        out = self.top(torch.cat([x, pairs[:, first, second]], 1))
        return F.binary_cross_entropy_with_logits(out.squeeze(1), targets.float())


class Detector(nn.Module):
    """SSD's heads (Liu et al., 2016) on (B, 3, S, S) images: three maps, 4 or 6 anchors at each
    place, for each of them 81 classes and a box. Targets are classes, (B, `places(S)`).
    """

    ANCHORS = (4, 6, 4)

    def __init__(self, *, width: int = 64, classes: int = 81) -> None:
        super().__init__()
        self.sizes = classes, 4
        widths = (width, 2 * width, width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in itertools.pairwise(widths)
        )
        self.classes, self.boxes = (
            nn.ModuleList(
                nn.Conv2d(c, a * size, 3, padding=1)
                for c, a in zip(widths, self.ANCHORS, strict=True)
            )
            for size in self.sizes
        )

    @classmethod
    def places(cls, size: int) -> int:
        """How many anchors an image of this size has."""
        sides = (size, -(-size // 2), -(-size // 4))
        return sum(a * side**2 for a, side in zip(cls.ANCHORS, sides, strict=True))

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        maps = [F.relu(self.stem(images))]
        for layer in self.down:
            maps.append(F.relu(layer(maps[-1])))
        classes, boxes = (
            torch.cat(
                [
                    head(x).permute(0, 2, 3, 1).reshape(len(x), -1, size)
                    for head, x in zip(heads, maps, strict=True)
                ],
                dim=1,
            )
            for heads, size in zip((self.classes, self.boxes), self.sizes, strict=True)
        )
        return F.cross_entropy(classes.flatten(0, 1), targets.flatten()) + boxes.abs().mean()
