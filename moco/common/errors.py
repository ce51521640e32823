"""Errors for the person at the keyboard: one line that says what, where, and how to fix it.

A `UserError` is raised wherever input from outside (a path, a key, a file) cannot be used. It
carries the process's exit code; programming errors stay ordinary exceptions.
"""

import multiprocessing
import os
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Sequence
from typing import NoReturn

MAX_UNEXPECTED = 500  # characters of an error that is not ours; some hold a whole program


def shown(value: object, limit: int = 80) -> str:
    """An untrusted value for a message: escaped and short; of a container the type alone."""
    if isinstance(value, str | bytes):
        return repr(value[:limit])
    if isinstance(value, bool | float | None) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"a {type(value).__name__}"


def first_few(texts: Sequence[str], limit: int = 6) -> str:
    """The first of many for a message, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def plural(number: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"


def printable(text: str) -> str:
    """Text with control characters, bidirectional marks and lone surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join(map(_printable, text))


def say(*lines: object) -> None:
    """Print lines that hold what others have named: no part of one can control the terminal."""
    for line in lines:
        print(printable(str(line)), flush=True)


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    return " " if unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()


class UserError(Exception):
    """Input that cannot be used. The message is one line: what, where, how to fix."""

    exit_code = 2


class DataError(UserError):
    """A file or dataset that is missing, damaged or not what its name says."""

    exit_code = 3


class NumericError(UserError):
    """A quantity that must be finite is not."""

    exit_code = 4


class LockedError(UserError):
    """The output folder is in use by another process."""

    exit_code = 5


class Preempted(UserError):
    """Training was asked to stop, saved its state, and can be run again with `--resume`."""

    exit_code = 85


def run_cli(main: Callable[[Sequence[str] | None], int | None]) -> NoReturn:
    """Run a command line's `main` and leave the process with its exit code.

    Any error becomes one line on stderr; `--debug` anywhere on the command line shows the
    traceback as well.
    """
    debug = "--debug" in sys.argv[1:]
    try:
        if sys.platform == "win32":
            raise UserError("Windows is not supported: use Linux, macOS, or Linux in WSL 2")
        code = main(None) or 0
        sys.stdout.flush()
    except UserError as error:
        code = _report(f"error: {error}", error, debug)
    except KeyboardInterrupt as error:
        code = _report("interrupted", error, debug, code=130)
    except BrokenPipeError:  # who reads the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except Exception as error:
        code = 1
        reason = str(error)[:MAX_UNEXPECTED]
        line = f"unexpected {type(error).__name__}: {reason} (run again with --debug for details)"
        if isinstance(error, OSError) and error.filename is not None:  # such as a name too long
            code = DataError.exit_code
            line = f"error: {str(error.filename)[:MAX_UNEXPECTED]}: {error.strerror}"
        code = _report(line, error, debug, code)
    sys.exit(code)


def kill_children() -> None:
    """End what multiprocessing has started, at the end of this process.

    Data-loader workers ignore SIGTERM: one that hangs, or that an error has left behind, would keep
    this process from ending.
    """
    if sys.platform != "win32":
        # Torch would answer SIGCHLD by raising another error.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def _report(line: str, error: BaseException, debug: bool, code: int = 0) -> int:
    if debug:
        traceback.print_exception(error)
    print(printable(" ".join(line.split())), file=sys.stderr, flush=True)
    kill_children()
    return code or getattr(error, "exit_code", 1)
