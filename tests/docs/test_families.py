"""docs/reference/families.md: its rows are those of the registry, and can be measured again."""

from pathlib import Path

import pytest

from tests.docs.families import OWN, PAGE, measure, schemes
from tests.oracles.sources import SOURCES

LINES = PAGE.read_text(encoding="utf-8").splitlines()


def test_every_scheme_has_its_rows() -> None:
    assert set(SOURCES) == set(schemes())
    found = [tuple(line.split(" | ")[:2]) for line in LINES if line.count("|") == 7][2:]
    expected = [
        (f"| {family}", OWN.get(scheme, scheme))
        for (family, scheme), sources in SOURCES.items()
        for _ in sources
    ]
    assert found == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", SOURCES, ids=" ".join)
def test_rows_measured_again(key: tuple[str, str], tmp_path: Path) -> None:
    row = measure(*key, SOURCES[key][-1], tmp_path)
    assert any(line.startswith(row.start()) for line in LINES)
    assert row.difference <= 2e-5
