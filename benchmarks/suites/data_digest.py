"""What is in a folder of data, as a digest: equal folders are the same data wherever they are.

The digest is of the relative names of all files, of the bytes of annotations and lists (`*.xml`,
`*.txt`, `*.json`), and of the sizes of the others. Of either kind at most `MAX_FILES` are looked
into, evenly spread over the sorted names, so that ImageNet's 1.3 million files take seconds. Hidden
files do not count. An image that is replaced by another of the same name and size is not noticed.
"""

import functools
import hashlib
import math
import os
from collections.abc import Mapping

from benchmarks.suites.checks import with_datasets_folder
from benchmarks.suites.suite import Suite, SuiteTask, all_keys
from moco.common.files import files_below, sha256_file

# Keys of folders that a task is trained and tested on, where it is not one of the known datasets.
FOLDERS = ("DATASETS.VOC_DIR", "DATA.ROOT")
READ = (".xml", ".txt", ".json")
MAX_FILES = 20_000


def data_digests(suite: Suite, before: Mapping[str, str] | None) -> dict[str, str]:
    """Task → digest of its folders of data; empty for a task without one.

    Args:
        before: what an earlier call on the suite's folder found. It counts for data that is not on
            this machine, and for data that an earlier version of this project did not look at.
    """
    found = {}
    for task in suite.tasks:
        known = None if before is None else before.get(task.name)
        found[task.name] = "" if known == "" else task_digest(task) or known or ""
    return found


def task_digest(task: SuiteTask) -> str:
    """Of all folders that a task's keys name; empty if there is none, or not on this machine."""
    keys = all_keys(task)
    given = {key: with_datasets_folder(str(keys[key])) for key in FOLDERS if keys.get(key)}
    folders = {key: os.path.expanduser(folder) for key, folder in given.items()}
    if not folders or not all(os.path.exists(folder) for folder in folders.values()):
        return ""
    content = [f"{key} {folder_digest(folder)}" for key, folder in sorted(folders.items())]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


@functools.cache
def folder_digest(folder: str) -> str:
    """The digest of one folder; see the head of this file."""
    names = sorted(files_below(folder))
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape"))
    for is_read in (True, False):
        kind = [name for name in names if name.lower().endswith(READ) == is_read]
        for name in kind[:: max(math.ceil(len(kind) / MAX_FILES), 1)]:
            path = os.path.join(folder, name)
            try:
                content = sha256_file(path) if is_read else os.stat(path).st_size
            except OSError:  # named by the checks before the runs
                content = "unreadable"
            digest.update(f"\n{content}".encode())
    return digest.hexdigest()
