"""What a record may hold as a number."""

import pytest

from detection.metrics import for_record, headline

GOOD = {"bbox/AP": 12.3456789, "bbox/AP50": 30.0, "bbox/AP75": 0.0}


def test_numbers_pass_and_nan_becomes_null_with_a_note():
    assert for_record(GOOD) == ({"bbox/AP": 12.345679, "bbox/AP50": 30.0, "bbox/AP75": 0.0}, [])
    stored, notes = for_record({**GOOD, "bbox/AP-cat": float("nan")})
    assert stored["bbox/AP-cat"] is None
    assert notes == ["not a number, so null: bbox/AP-cat"]


@pytest.mark.parametrize("bad", [{"bbox/AP": 0.1234e3 + 1}, {"bbox/AP75": -1.0}])
def test_numbers_out_of_range_are_a_fault(bad):
    with pytest.raises(ValueError, match=r"expected 0\.\.100"):
        for_record({**GOOD, **bad})


def test_a_missing_headline_is_a_fault():
    with pytest.raises(ValueError, match="reported no bbox/AP50, bbox/AP75"):
        for_record({"bbox/AP": 1.0})


def test_headline():
    assert headline({**GOOD, "bbox/AP75": None}) == "AP 12.35  AP50 30.00  AP75 -"
