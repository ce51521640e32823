"""Errors for users: one line that names the problem, where it is, and how to fix it.

A `UserError` is raised where external input (a path, a key, a file) cannot be used. It carries the
process's exit code; programming errors remain ordinary exceptions.
"""

import io
import multiprocessing
import os
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fvcore.common.registry import Registry

MAX_UNEXPECTED = 500  # characters of a third-party error; some contain a whole program


def format_value(value: object, limit: int = 80) -> str:
    """Format an untrusted value for a message: escaped and short; only the type of a container."""
    if isinstance(value, str | bytes):
        return repr(value[:limit])
    if isinstance(value, bool | float | None) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"a {type(value).__name__}"


def first_few(texts: Sequence[str], limit: int = 6) -> str:
    """Join the first texts for a message and count the rest: `a, b and 3 more`."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def format_values(value: object) -> str:
    """Format the values of a list; anything else as `format_value` does."""
    if not isinstance(value, list | tuple):
        return format_value(value)
    return f"[{first_few([*map(format_value, value)])}]"


def plural(number: int, noun: str) -> str:
    """Format a number and its noun: `1 image`, `2 images`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"


def printable(text: str) -> str:
    """Escape control characters, bidirectional marks and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(map(_printable, text))


def echo(*lines: object) -> None:
    """Print lines, escaping what untrusted parts such as file names could do to the terminal."""
    for line in lines:
        print(printable(str(line)), flush=True)


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    return " " if unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()


class UserError(Exception):
    """Unusable input. The message is one line: what is wrong, where, how to fix it.

    Attributes:
        option: Name of the option that would make the input usable, or "".
    """

    exit_code = 2

    def __init__(self, text: object = "", *, option: str = "") -> None:
        super().__init__(text)
        self.option = option


class DataError(UserError):
    """Missing or damaged file or dataset, or a file whose format is not that of its name."""

    exit_code = 3


class NumericError(UserError):
    """Non-finite value of a quantity that must be finite."""

    exit_code = 4


class LockedError(UserError):
    """Output folder in use by another process."""

    exit_code = 5


class Preempted(UserError):
    """Training stopped on request after saving its state; `--resume` continues it."""

    exit_code = 85


def run_cli(main: Callable[[Sequence[str] | None], int | None]) -> NoReturn:
    """Run a command's `main` and exit the process with its exit code.

    Any error becomes one line on stderr; `--debug` anywhere on the command line also prints the
    traceback.
    """
    debug = "--debug" in sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows `?` for `–`
    try:
        if sys.platform == "win32":
            raise UserError("Windows is not supported: use Linux, macOS, or Linux in WSL 2")
        code = main(None) or 0
        sys.stdout.flush()
    except UserError as error:
        code = _report(f"error: {error}", error, debug)
    except KeyboardInterrupt as error:
        code = _report("interrupted", error, debug, code=130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except Exception as error:
        code = 1
        reason = str(error)[:MAX_UNEXPECTED]
        line = f"unexpected {type(error).__name__}: {reason} (run again with --debug for details)"
        if (
            isinstance(error, OSError) and error.filename is not None
        ):  # e.g., a name that is too long
            code = DataError.exit_code
            line = f"error: {str(error.filename)[:MAX_UNEXPECTED]}: {error.strerror}"
        code = _report(line, error, debug, code)
    sys.exit(code)


def kill_children() -> None:
    """Kill the children of multiprocessing at the end of this process.

    Data-loader workers ignore SIGTERM: one that hangs, or is left over after an error, would keep
    this process alive.
    """
    if sys.platform != "win32":
        # torch's handler of SIGCHLD would raise another error.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def _report(line: str, error: BaseException, debug: bool, code: int = 0) -> int:
    if debug:
        traceback.print_exception(error)
    print(printable(" ".join(line.split())), file=sys.stderr, flush=True)
    kill_children()
    return code or getattr(error, "exit_code", 1)


def lookup(registry: "Registry", name: str, key: str) -> Any:
    """Return the object registered as `name`.

    Args:
        registry: Registry to search.
        name: Name chosen by the user.
        key: Key or flag that chose the name, for the message.

    Raises:
        UserError: If the name is not registered; the message lists the choices.
    """
    if name not in registry:
        choices = ", ".join(sorted(each for each, _ in registry))
        raise UserError(f"{key}: got {name!r}, expected one of {choices}")
    return registry.get(name)
