"""Windows of an image: where they start, and the average of their scores."""

import pytest
import torch

from detection.engine.evaluate import predict_in_windows, window_starts


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (400, 341, [0]),
        (512, 341, [0]),
        (683, 341, [0, 171]),
        (1024, 341, [0, 341, 512]),
        (1535, 341, [0, 341, 682, 1023]),
        (683, 0, [0, 171]),
        (1024, 0, [0, 512]),
        (1100, 0, [0, 294, 588]),
    ],
)
def test_where_windows_start(size, stride, expected):
    """With a stride as mmsegmentation's `slide`; without one evenly, as few as possible."""
    assert window_starts(size, 512, stride) == expected


def mmsegmentations(scores, image, side, stride):
    """Sum crops and divide by their counts, as `slide_inference` of mmsegmentation does."""
    height, width = image.shape[-2:]
    rows = max(height - side + stride - 1, 0) // stride + 1
    columns = max(width - side + stride - 1, 0) // stride + 1
    total, counts = torch.zeros(2, height, width), torch.zeros(height, width)
    for row in range(rows):
        for column in range(columns):
            y2 = min(row * stride + side, height)
            x2 = min(column * stride + side, width)
            y1, x1 = max(y2 - side, 0), max(x2 - side, 0)
            total[:, y1:y2, x1:x2] += scores(image[:, y1:y2, x1:x2])
            counts[y1:y2, x1:x2] += 1
    return total / counts


@pytest.mark.parametrize("size", [(40, 40), (40, 67), (90, 33), (20, 50)])
def test_equals_mmsegmentations(size):
    """The scores depend on the window, so that it matters which ones overlap."""
    image = torch.arange(3 * size[0] * size[1]).reshape(3, *size) % 251

    def scores(pixels):
        x = pixels.float()
        return torch.stack([x[0] - x[0].mean(), x[1] * x[2].max()])

    def predict(samples):
        assert all(s["image"].shape[-2:] == (s["height"], s["width"]) for s in samples)
        return [{"sem_seg": scores(sample["image"])} for sample in samples]

    sample = {"image": image, "file_name": "a.jpg"}
    found = predict_in_windows(predict, sample, 40, 27)["sem_seg"]
    torch.testing.assert_close(found, mmsegmentations(scores, image, 40, 27))
    larger = predict_in_windows(predict, {**sample, "height": 75, "width": 80}, 40, 27)
    assert larger["sem_seg"].shape == (2, 75, 80)
