"""Number formats and colors."""

import pytest

from benchmarks.report import style, table
from benchmarks.report.table import Cell, Gap


def test_cells():
    found = [((10.04,), 1), ((10.0, 12.0), 2), ((10.0, 12.0), 3)]
    texts = [table.format_cell(Cell(values), n) for values, n in found]
    assert texts == ["10.0", "11.0 ± 1.4", "11.0 ± 1.4 (n = 2 of 3)"]
    assert table.format_cell(None, 3) == "–"


@pytest.mark.parametrize(
    ("value", "text", "strong"),
    [
        (0.44, "+0.4", False),
        (0.4999, "+0.5", True),
        (-0.04, "+0.0", False),
        (-3.04, "−3.0", False),
        (12.0, "+12.0", True),
    ],
)
def test_gaps_are_strong_from_half_a_point_as_printed(value, text, strong):
    assert (style.format_gap(value), style.is_strong(value)) == (text, strong)


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        (Gap(1.04, 1.1, None, None, None, "n = 1"), "+1.1 (no test: n = 1)"),
        (Gap(1.0, 1.0, -0.26, 2.26, 0.0834), "+1.0 [−0.3, 2.3], p = 0.083"),
        (Gap(0.01, 0.0, -0.02, 0.04, 0.4), "+0.0 [0.0, 0.0], p = 0.400"),
        (Gap(9.0, 9.0, 8.0, 10.0, 1e-9), "+9.0 [8.0, 10.0], p < 0.001"),
    ],
)
def test_evidence(gap, text):
    assert table.evidence(gap).text == text
    assert table.evidence(None).text == "–"


def test_random_is_gray_and_the_others_differ():
    found = style.colors(["moco", "random", "x"])
    assert found["random"] == style.GRAY and len(set(found.values())) == 3
