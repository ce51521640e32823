"""docs/guides/converting.md is true: every layout and choice is in it, and every command is one."""

import re
import shlex
from pathlib import Path

from convert.convert_to_d2 import build_parser
from convert.families.base import PLAIN, PLAIN_DETECTRON2
from convert.layouts import LAYOUTS

PAGE = (
    Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "converting.md"
).read_text()


def test_every_layout_is_on_the_page() -> None:
    for name in (*(layout.name for layout in LAYOUTS), PLAIN, PLAIN_DETECTRON2):
        assert f"`{name}`" in PAGE, name


def test_every_choice_of_network_is_on_the_page() -> None:
    for layout in LAYOUTS:
        for choice in layout.networks:
            assert choice == "single" or re.search(rf"\b{choice}\b", PAGE), (layout.name, choice)


def test_every_command_parses() -> None:
    commands = re.findall(r"moco-transfer convert ([^`\n#]+)", PAGE)
    assert len(commands) > 35
    for command in commands:
        args = build_parser().parse_args(shlex.split(command))
        assert args.inspect or args.output, command
