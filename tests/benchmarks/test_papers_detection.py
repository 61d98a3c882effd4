"""The detection rows: boxes, scenes, the multibox loss, torchvision's detectors; some steps."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from benchmarks.papers import boxes
from benchmarks.papers.task import QUALITY, Task, train
from benchmarks.papers.tasks.detection import Detector, multibox_loss, prior_boxes
from benchmarks.papers.tasks.detection_data import (
    SHAPES,
    SIDE,
    Scenes,
    batches,
    precision,
    rate,
    scenes,
)
from benchmarks.papers.tasks.detection_torchvision import FASTER_RCNN, SSD300, ssd, targets

CPU = torch.device("cpu")
FP16_O2 = next(way for way in QUALITY if way.name == "FP16 O2")


def found(*rows: tuple[float, ...], label: int = 0) -> boxes.Found:
    """Of (left, top, right, bottom, score)."""
    numbers = torch.tensor(rows).view(-1, 5)
    return boxes.Found(numbers[:, :4], torch.full((len(rows),), label), numbers[:, 4])


def some_boxes(count: int, seed: int) -> Tensor:
    """Corners (count, 4), each with an area."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(count, 2, generator=generator)
    return torch.cat([low, low + 0.05 + torch.rand(count, 2, generator=generator)], dim=1)


def test_iou() -> None:
    a = torch.tensor([[0.0, 0, 2, 2]])
    b = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 1, 2], [2, 0, 4, 2], [5, 5, 5, 5]])
    # The same; a quarter of each; the half of one; a common edge; no area.
    torch.testing.assert_close(boxes.iou(a, b), torch.tensor([[1, 1 / 7, 1 / 2, 0, 0]]))
    nothing = torch.zeros(1, 4)
    assert boxes.iou(nothing, nothing).item() == 0


def test_corners_and_centred_are_inverse() -> None:
    drawn = some_boxes(20, seed=0)
    torch.testing.assert_close(boxes.corners(boxes.centred(drawn)), drawn)
    assert boxes.centred(torch.tensor([1.0, 2, 5, 4])).tolist() == [3, 3, 4, 2]


def test_encoding() -> None:
    prior = torch.tensor([[0.5, 0.5, 0.2, 0.4]])
    box = torch.tensor([[0.52, 0.5, 0.2 * math.e, 0.4]])
    # A tenth of the width to the right, over 0.1; ln(e) = 1, over 0.2.
    torch.testing.assert_close(boxes.encode(box, prior), torch.tensor([[1.0, 0, 5, 0]]))
    priors = prior_boxes()
    drawn = boxes.centred(some_boxes(len(priors), seed=1))
    decoded = boxes.decode(boxes.encode(drawn, priors), priors)
    torch.testing.assert_close(decoded, drawn)


def test_matching() -> None:
    objects = torch.tensor([[[0.0, 0, 4, 4], [10, 10, 11, 11], [0, 0, 4, 4]]])
    present = torch.tensor([[True, True, False]])
    priors = torch.tensor(
        [[0.0, 0, 4, 3], [0, 0, 4, 4], [0, 0, 4, 1], [9, 9, 13, 13], [20, 20, 24, 24]]
    )
    # IoU with the first object: 3/4, 1, 1/4. The second one's best prior overlaps it by 1/16 and
    # is its own; the third is not there.
    assert boxes.match(objects, present, priors).tolist() == [[0, 0, -1, 1, -1]]


def test_the_best_prior_of_an_object_is_its_own_though_it_overlaps_another_one_more() -> None:
    objects = torch.tensor([[[0.0, 0, 4, 4], [0, 0, 4, 2]]])
    priors = torch.tensor([[0.0, 0, 4, 4], [10, 10, 12, 12]])
    matched = boxes.match(objects, torch.ones(1, 2, dtype=torch.bool), priors)
    assert matched.tolist() == [[1, -1]]


def test_suppression() -> None:
    rows = torch.tensor(
        [
            [0.0, 0, 10, 10],
            [0, 0, 10, 9],  # 0.9 with the first: goes
            [0, 5, 10, 14],  # 50/140 with the first: stays, though 40/140 with the second
            [20, 20, 30, 30],
            [0, 6, 10, 14],  # 8/9 with the third: goes
        ]
    )
    keeps = [True, False, True, True, False]
    assert boxes.suppress(rows).tolist() == keeps
    assert boxes.suppress(torch.stack([rows, rows])).tolist() == [keeps, keeps]


def test_a_suppressed_box_suppresses_nothing() -> None:
    rows = torch.tensor([[0.0, 0, 10, 10], [3, 0, 13, 10], [6, 0, 16, 10]])
    # 7/13 next to each other, 4/16 between the first and the third.
    assert boxes.suppress(rows).tolist() == [True, False, True]


def test_average_precision() -> None:
    hits = torch.tensor([True, False, True, False])
    # Precision is 1 up to a recall of 1/3, then 2/3 up to 2/3; the third object is never found.
    assert boxes.average_precision(hits, 3) == pytest.approx((1 + 2 / 3) / 3)
    # A dip is raised to what a higher recall reaches: 1/2, 2/3, both 2/3.
    assert boxes.average_precision(torch.tensor([False, True, True]), 2) == pytest.approx(2 / 3)
    assert boxes.average_precision(hits[:0], 3) == 0


def test_mean_average_precision() -> None:
    there = [found((0, 0, 10, 10, 1)), found((0, 0, 10, 10, 1), (20, 20, 30, 30, 1))]
    perfect = [there[1], there[0]]
    assert boxes.mean_average_precision(there, there, [0]) == pytest.approx(1)
    # In the first image both look at one object and the worse box is wrong; in the second one of
    # two is found. By scores: right (0.9), wrong (0.8), right (0.7), of three.
    guesses = [found((0, 0, 10, 8, 0.9), (0, 0, 10, 10, 0.8)), found((20, 20, 30, 30, 0.7))]
    assert boxes.mean_average_precision(guesses, there, [0]) == pytest.approx((1 + 2 / 3) / 3)
    # One of another label finds nothing, and halves the mean.
    other = [found((0, 0, 10, 10, 1), label=1), found(label=1)]
    assert boxes.mean_average_precision(other, there, [0]) == 0
    assert boxes.mean_average_precision(there, there, [0, 1]) == pytest.approx(1 / 2)
    # 40 of 160 are shared: below an IoU of 0.5.
    assert boxes.mean_average_precision([found((0, 6, 10, 16, 1)), found()], there, [0]) == 0
    assert boxes.mean_average_precision(perfect, there, [0]) < 1


def test_prior_boxes() -> None:
    priors = prior_boxes()
    assert priors.shape == (16 * 16 * 4 + 8 * 8 * 6 + 4 * 4 * 6 + 2 * 2 * 4 + 1 * 2, 4)
    # The first two stand at the first of 16x16 places, 10 pixels wide and sqrt(10 * 19).
    assert priors[0].tolist() == pytest.approx([1 / 32, 1 / 32, 10 / SIDE, 10 / SIDE])
    assert priors[1, 2:].tolist() == pytest.approx([math.sqrt(190) / SIDE] * 2)
    # The second place is to the right of the first.
    assert priors[4, :2].tolist() == pytest.approx([3 / 32, 1 / 32])
    # All shapes of one size have the same area.
    areas = priors[1024:1030, 2:].prod(1)[[0, 2, 3, 4, 5]]
    torch.testing.assert_close(areas, torch.full((5,), (19 / SIDE) ** 2))


def test_answers_are_in_the_order_of_the_priors() -> None:
    """A change of one pixel reaches answers whose priors stand near it, of the first map."""
    net, images = Detector(), torch.zeros(1, 3, SIDE, SIDE)
    changed = images.clone()
    changed[0, :, 2, 58] = 1
    with torch.no_grad():
        moved = (net(changed)[1] - net(images)[1]).abs().amax((0, 2))[:1024] > 0
    middles = prior_boxes()[:1024][moved, :2] * SIDE
    assert len(middles)
    assert middles[:, 0].min() > 58 - 24
    assert middles[:, 1].max() < 2 + 24


def test_multibox_loss_by_hand() -> None:
    classes = torch.tensor([[1, 0, 0, 0, 0, 0]])
    logits = torch.zeros(1, 6, 3)
    logits[0, :, 0] = torch.tensor([0.0, -3, 5, -1, -2, 4])
    places = torch.zeros(1, 6, 4)
    places[0, 0] = torch.tensor([0.5, 2.0, 0, 0])
    places[0, 1] = 100  # matches nothing: leaves no trace
    aims = torch.zeros(1, 6, 4)
    smooth_l1 = 0.5**2 / 2 + (2 - 0.5)
    # The matched prior, and the three hardest of five others: those of -3, -2, -1.
    entropy = math.log(3) + sum(math.log(2 + math.exp(x)) - x for x in (-3, -2, -1))
    loss = multibox_loss(places, logits, aims, classes)
    assert loss.item() == pytest.approx(smooth_l1 + entropy)


def test_multibox_loss_of_nothing_matched_is_0() -> None:
    nothing = torch.zeros(2, 6, dtype=torch.int64)
    answers, logits = torch.ones(2, 6, 4), torch.ones(2, 6, 3)
    assert multibox_loss(answers, logits, torch.zeros(2, 6, 4), nothing) == 0


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_scenes() -> None:
    data = scenes(60, seed=3)
    present = data.labels >= 0
    assert data.images.shape == (60, 3, SIDE, SIDE)
    assert data.images.isfinite().all()
    assert present.any(1).all()
    assert set(data.labels[present].tolist()) == set(range(len(SHAPES)))
    inner = data.boxes[present]
    assert inner.min() >= 0
    assert inner.max() <= 1
    sizes = (boxes.centred(inner)[:, 2:].prod(1)).sqrt() * SIDE
    assert sizes.min() >= 13.99
    assert sizes.max() <= 40.01
    overlap = boxes.iou(data.boxes, data.boxes)
    assert (overlap - torch.diag_embed(torch.diagonal(overlap, dim1=1, dim2=2))).max() <= 0.151
    again = scenes.__wrapped__(60, seed=3)
    assert torch.equal(again.images, data.images)
    assert torch.equal(again.boxes, data.boxes)
    other = scenes(60, seed=4)
    assert not (other.boxes[:, None, 0] == data.boxes[None, :, 0]).all(-1).any()


def test_a_shape_fills_its_box() -> None:
    """The pixels that differ from those of an empty scene reach each side of the box."""
    from benchmarks.papers.tasks.detection_data import _inside

    box = torch.tensor([[10.0, 20, 40, 36]]).expand(len(SHAPES), 4)
    for inside in _inside(box, torch.arange(len(SHAPES))):
        rows, columns = inside.nonzero().unbind(1)
        reached = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert max(abs(int(a) - b) for a, b in zip(reached, (10, 20, 40, 36), strict=True)) <= 1
    areas = [_inside(box[:1], torch.tensor([i])).sum().item() for i in range(len(SHAPES))]
    expected = [480 * math.pi / 4, 480, 480 / 2, 480 * (1 - 0.65**2)]
    assert areas == pytest.approx(expected, rel=0.1)


# -- what all detectors share ----------------------------------------------------------------------


def there_in(data: Scenes) -> list[boxes.Found]:
    """What is in each scene, found with certainty."""
    return [
        boxes.Found(box[label >= 0], label[label >= 0], torch.ones(int((label >= 0).sum())))
        for box, label in zip(data.boxes, data.labels, strict=True)
    ]


def test_precision_is_in_percent() -> None:
    data = scenes(20, seed=5)
    found = there_in(data)
    assert precision(found, data) == pytest.approx(100)
    assert precision(found[1:] + found[:1], data) < 50  # each one's in the scene before it


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_batches_are_of_one_seed_and_mirrored_with_their_boxes() -> None:
    first, again, other = ([*itertools.islice(batches(seed, 8, CPU), 3)] for seed in (0, 0, 1))
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].images, other[0].images)
    data = scenes(1500, seed=1)
    plain, mirrored = 0, 0
    for images, corners in ((b.images, b.boxes) for b in first):
        for image, box in zip(images, corners, strict=True):
            flipped = image.flip(2)
            (kept,) = (data.images == image).flatten(1).all(1).nonzero().T
            (turned,) = (data.images == flipped).flatten(1).all(1).nonzero().T
            plain, mirrored = plain + len(kept), mirrored + len(turned)
            (scene,) = torch.cat([kept, turned])
            left, top, right, bottom = data.boxes[scene].unbind(-1)
            turned_back = torch.stack([1 - right, top, 1 - left, bottom], -1)
            assert torch.equal(box, turned_back if len(turned) else data.boxes[scene])
    assert plain + mirrored == 24
    assert min(plain, mirrored) > 0


def test_the_learning_rate() -> None:
    """A third of the way up, on top, then a tenth and a hundredth of it."""
    rates = [rate(step, steps=60, warm_up=6) for step in (1, 5, 39, 40, 49, 50, 59)]
    assert rates == pytest.approx([1 / 3, 1, 1, 0.1, 0.1, 0.01, 0.01])


# -- torchvision's detectors -----------------------------------------------------------------------


def test_each_image_has_four_boxes_in_pixels() -> None:
    data = Scenes(
        torch.zeros(1, 3, SIDE, SIDE),
        torch.tensor([[[0.0, 0, 0, 0], [0.25, 0.5, 0.5, 1], [0, 0, 0.5, 0.5], [0, 0, 0, 0]]]),
        torch.tensor([[-1, 3, 0, -1]]),
    )
    (target,) = targets(data)
    first, second = [16, 32, 32, 64], [0, 0, 32, 32]
    assert target["boxes"].tolist() == [first, first, second, first]
    assert target["labels"].tolist() == [4, 4, 1, 4]  # 0 is the ground


def test_a_box_that_is_there_twice_changes_no_loss_of_an_ssd() -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    net = ssd()
    data = scenes(8, seed=6)
    once = [{"boxes": found.boxes * SIDE, "labels": found.labels + 1} for found in there_in(data)]
    assert {len(one["labels"]) for one in once} > {1}
    expected, losses = (net([*data.images], wanted) for wanted in (once, targets(data)))
    torch.testing.assert_close(losses, expected)


@pytest.mark.filterwarnings("ignore")  # torch warns, while Dynamo traces torchvision
@pytest.mark.parametrize("task", [SSD300, FASTER_RCNN], ids=lambda task: task.name)
def test_torchvisions_detectors_train_as_in_fp32(task: Task) -> None:
    """Six steps of each; losses of the first are equal but for FP16's rounding."""
    pytest.importorskip("torchvision")
    full, low = (train(task, way, 0, "eager", CPU, steps=6) for way in (QUALITY[0], FP16_O2))
    assert low.curve[0] == pytest.approx(full.curve[0], rel=2e-3)
    assert low.curve == pytest.approx(full.curve, rel=0.1)
    assert 0 <= low.metrics["mAP, %"] <= 100
    assert low.metrics["held-out loss"] == pytest.approx(full.metrics["held-out loss"], rel=0.2)
    assert low.scales[0][1] == 0  # no step was skipped
