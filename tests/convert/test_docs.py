"""docs/guides/converting.md is true: every layout and choice is in it, and every command is one."""

import re
import shlex
from pathlib import Path

from convert.convert_to_d2 import build_parser
from convert.families.base import PLAIN, PLAIN_DETECTRON2
from convert.projects import PROJECTS

PAGE = (
    Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "converting.md"
).read_text()


def test_every_layout_is_on_the_page() -> None:
    for name in (*(project.name for project in PROJECTS), PLAIN, PLAIN_DETECTRON2):
        assert f"`{name}`" in PAGE, name


def test_every_choice_of_network_is_on_the_page() -> None:
    for project in PROJECTS:
        for role in {role for roles in project.roles for role in roles} - {"single"}:
            assert re.search(rf"\b{role}\b", PAGE), (project.name, role)


def test_every_command_parses() -> None:
    commands = re.findall(r"moco-transfer convert ([^`\n#]+)", PAGE)
    assert len(commands) > 35
    for command in commands:
        assert build_parser().parse_args(shlex.split(command)).output, command
