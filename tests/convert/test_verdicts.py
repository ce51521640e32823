"""Golden verdicts of the converter on every generated file."""

from pathlib import Path

import pytest
import yaml

from convert.projects import PROJECTS
from tests.golden.regenerate_convert import GOLDEN, GROUPS, verdicts

# Its two networks see L and ab, so neither is one of RGB: both are refused.
NOT_CONVERTED = {"HobbitLong/PyContrast (CMC)"}
# Networks of full size, or many: more than two seconds.
SLOW = {
    "self-supervised",
    "plain",
    "transformers",
    "packages",
    "damaged ResNets",
    "damaged records",
    "timm's networks",
    "own",
    "unclear",
    "other files",
    "damaged others",
    "Detectron2",
    "Swin",
}


@pytest.mark.parametrize(
    "group",
    [pytest.param(g, marks=pytest.mark.slow) if g in SLOW else g for g in GROUPS],
)
@pytest.mark.filterwarnings("ignore")
def test_every_verdict(group: str, tmp_path: Path) -> None:
    """Files of packages that are not installed are left out."""
    expected = yaml.safe_load(GOLDEN.read_text())[group]
    made = verdicts(group, tmp_path)
    assert made == {name: expected[name] for name in made}
    assert made or group in ("packages", "timm's networks")
    assert not (tmp_path / "marker").exists(), "a payload ran"


def test_every_project_is_converted() -> None:
    """Each verdict on a network includes the proof of its features."""
    verdicts = [v for group in yaml.safe_load(GOLDEN.read_text()).values() for v in group.values()]
    sources = {verdict["contract"]["source"] for verdict in verdicts if "contract" in verdict}
    assert {project.name for project in PROJECTS} - sources == NOT_CONVERTED
