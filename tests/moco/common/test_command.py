"""Words of the commands in messages, which a shell reads back."""

import subprocess

import pytest

from moco.common.command import quote
from moco.common.errors import printable

WORDS = [
    "plain",
    "",
    "a b",
    "a;b#c&d|e>f",
    "$(touch x) `id` $HOME",
    'it\'s "a" \\n',
    "two\nlines\tof 'one'\\",
    "\u202eright\xa0to left",
    "latin-1: \udce9",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_shell_reads_back_what_was_quoted(word):
    text = quote(word, word)
    assert printable(text) == text and text.isprintable(), "a message would change it"
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert done.stdout == (word.encode(errors="surrogateescape") + b"\0") * 2
