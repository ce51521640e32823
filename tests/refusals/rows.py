"""A row of what is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Edit = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """A command and its refusal.

    Attributes:
        what: of the input is wrong: the row's name.
        words: that the message has, a regular expression; `{tmp}` is the row's folder.
        code: of the exit: 2 for what was asked, 3 for files and data, 5 for a folder in use.
        edit: changes the files in the row's folder before the command runs.
        files: more names of files to make, which the command does not name.
        env: further variables.
        without: packages that cannot be imported.
        needs: packages without which the row is left out.
        leaves: files that the command leaves nevertheless, as documented; regular expressions.
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
    """Rows of one command.

    Args:
        cases: what is wrong and the words of the message. A text is appended to the command, or
            replaces `{}` in it; anything else edits the files.
        on: makes the edit of what is wrong; else it is one.
        about: words of each message that come before.
    """
    made = []
    for what, words in cases:
        whole, edit, said = command, fields.get("edit"), about + words
        if on is not None or not isinstance(what, str):
            edit, name = on(what) if on else what, said
        else:
            whole = command.replace("{}", what) if "{}" in command else f"{command} {what}"
            name = what or words
        made.append(Row(whole, name, said, **{**fields, "edit": edit}))
    return made
