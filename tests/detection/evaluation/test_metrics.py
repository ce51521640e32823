"""Numbers that a record may store, and how they are shown."""

import pytest

from detection.evaluation.metrics import canonical, for_record, headline, headline_names, titles

GOOD = {"bbox/AP": 12.3456789, "bbox/AP50": 30.0, "bbox/AP75": 0.0}
MASKS = {"segm/AP": 35.4, "segm/AP50": 56.5, "segm/AP75": 38.1}


def test_numbers_pass_and_nan_becomes_null_with_a_note():
    assert for_record(GOOD) == ({"bbox/AP": 12.345679, "bbox/AP50": 30.0, "bbox/AP75": 0.0}, [])
    stored, notes = for_record({**GOOD, "bbox/AP-cat": float("nan")})
    assert stored["bbox/AP-cat"] is None
    assert notes == ["not a number, so null: bbox/AP-cat"]


def test_an_average_may_end_a_rounding_error_beyond_100():
    assert for_record({**GOOD, "bbox/AP": 100.00000000000003})[0]["bbox/AP"] == 100.0


@pytest.mark.parametrize("value", [-0.61, 101.5])
def test_logme_is_any_number_and_no_column_of_the_trained_model(value):
    metrics = {**GOOD, "logme": value}
    assert canonical(metrics) == metrics
    assert for_record(metrics)[0]["logme"] == value
    assert headline_names(metrics) == headline_names(GOOD) and headline(metrics) == headline(GOOD)


@pytest.mark.parametrize(
    "bad", [{"bbox/AP": 0.1234e3 + 1}, {"bbox/AP75": -1.0}, {"sem_seg/mIoU": 101.0}]
)
def test_numbers_out_of_range_are_a_fault(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        for_record({**GOOD, **bad})


def test_a_missing_headline_is_a_fault():
    with pytest.raises(ValueError, match="bbox/AP50, bbox/AP75"):
        for_record({"bbox/AP": 1.0})
    with pytest.raises(ValueError, match="segm/AP, segm/AP50, sem_seg/mIoU"):
        for_record(GOOD, ("bbox", "segm", "sem_seg"))
    with pytest.raises(ValueError, match="keypoints/AP75"):
        for_record({"keypoints/AP": 1.0, "keypoints/AP50": 1.0}, ["keypoints"])


def test_every_kind_can_be_the_only_one():
    for kind, name in {"segm": "AP", "keypoints": "AP", "densepose": "AP"}.items():
        metrics = {f"{kind}/{n}": 1.0 for n in (name, "AP50", "AP75")}
        assert for_record(metrics, [kind]) == (metrics, [])
    assert for_record({"sem_seg/mIoU": 7.0}, ["sem_seg"]) == ({"sem_seg/mIoU": 7.0}, [])
    streets = {"segm/AP": 1.0, "segm/AP50": 2.0}  # Cityscapes has no AP75
    assert for_record(streets, ["segm"]) == (streets, [])


def test_headline():
    assert headline({**GOOD, "bbox/AP75": None}) == "AP 12.35  AP50 30.00  AP75 -"
    assert headline({"sem_seg/mIoU": 74.4, "sem_seg/pACC": 90.0}) == "mIoU 74.40"
    assert headline({**MASKS, **GOOD, "segm/APs": 3.0}) == (
        "bbox AP 12.35 AP50 30.00 AP75 0.00  segm AP 35.40 AP50 56.50 AP75 38.10"
    )
    assert headline({"segm/AP": 31.0, "segm/AP50": 57.0}) == "segm AP 31.00 AP50 57.00"


def test_names_shown_are_in_the_papers_order():
    assert headline_names([*MASKS, "bbox/AP-cat"]) == tuple(GOOD) + tuple(MASKS)
    assert headline_names(["segm/AP50"]) == ("segm/AP", "segm/AP50")
    assert headline_names(["accuracy"]) == ()


def test_titles_name_the_kind_where_it_is_not_plain():
    assert titles(list(GOOD)) == ("AP", "AP50", "AP75")
    assert titles([*GOOD, *MASKS])[::3] == ("AP^bb", "AP^mk")
    assert titles(["segm/AP", "segm/AP50"]) == ("AP^mk", "AP50^mk")
    assert titles(["bbox/AP", "keypoints/AP", "densepose/AP75"]) == ("AP^bb", "AP^kp", "AP75^dp")
    assert titles(["sem_seg/mIoU"]) == titles(["bbox/AP", "sem_seg/mIoU"])[1:] == ("mIoU",)
