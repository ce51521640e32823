"""Rows of refused inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Edit = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """Command with its refusal.

    Attributes:
        command: Command line.
        what: Error in the input, which names the row.
        words: Regular expression of the message; `{tmp}` is the row's folder.
        code: Exit code: 2 for errors of the user, 3 for files and data, 5 for a folder in use.
        edit: Function that changes the files in the row's folder before the command runs.
        files: Names of further files to make, which the command does not name.
        env: Additional environment variables.
        without: Packages that cannot be imported.
        needs: Packages without which the row is skipped.
        leaves: Regular expressions of files that the command may leave, as documented.
    """

    command: str
    what: str
    words: str
    code: int = 2
    edit: Edit | None = None
    files: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


def rows(
    command: str,
    *cases: tuple[Any, str],
    on: Callable[[Any], Edit] | None = None,
    about: str = "",
    **fields: Any,
) -> list[Row]:
    """Return rows of one command.

    Args:
        command: Command line.
        *cases: Error in the input, and a pattern of the message. A text is appended to the
            command or replaces `{}` in it; anything else edits the files.
        on: Function that makes the edit of a case; by default the case is the edit.
        about: Common start of the patterns.
        **fields: Further fields of each row.
    """
    made = []
    for what, words in cases:
        whole, edit, pattern = command, fields.get("edit"), about + words
        if on is not None or not isinstance(what, str):
            edit, name = on(what) if on else what, pattern
        else:
            whole = command.replace("{}", what) if "{}" in command else f"{command} {what}"
            name = what or words
        made.append(Row(whole, name, pattern, **{**fields, "edit": edit}))
    return made
