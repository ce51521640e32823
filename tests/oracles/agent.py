"""Two processes with torchrun's variables, forked: `tests.oracles.agent MODULE WORDS`.

Where what the processes do is tested and not torchrun, it saves their imports. As torchrun, it
forwards SIGTERM to both, and fails if one of them does.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys

from tests.oracles.commands import build_in
from tests.oracles.processes import variables_of


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork").Process
    processes = [fork(target=_work, args=(rank, port, sys.argv[1:])) for rank in range(2)]
    for process in processes:
        process.start()
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes])
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def _work(rank: int, port: int, words: list[str]) -> None:
    os.environ |= variables_of(rank, 2, port)
    build_in("child")
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
