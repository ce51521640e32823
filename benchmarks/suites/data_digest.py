"""Digests of custom datasets: equal files are the same data wherever they are.

The digest of a folder is of the relative names of all files, of the bytes of annotations and lists
(`*.xml`, `*.txt`, `*.json`), and of the sizes of the others. Of either kind at most `MAX_FILES` are
looked into, evenly spread over the sorted names, so that ImageNet's 1.3 million files take seconds.
Hidden files do not count. An image that is replaced by another of the same name and size is not
noticed. Of a file in COCO's format it is that of its bytes and of its images' folder.
"""

import functools
import hashlib
import math
import os
from collections.abc import Mapping
from contextlib import suppress

from benchmarks.suites.checks import with_datasets_folder
from benchmarks.suites.suite import Suite, SuiteTask, all_keys
from moco.common.errors import DataError
from moco.common.files import files_below, sha256_file

# Keys of folders and files that a task's data is read from, where it is not a known dataset. Of a
# file in COCO's format without a folder of images it is the one where they are found.
ROOTS = {f"DATASETS.COCO_{role}_JSON": f"DATASETS.COCO_{role}_ROOT" for role in ("TRAIN", "TEST")}
FOLDERS = ("DATASETS.VOC_DIR", "DATA.ROOT", *ROOTS.values())
FILES = (*ROOTS, "DATASETS.PART_INDEX")
READ = (".xml", ".txt", ".json")
MAX_FILES = 20_000


def data_digests(suite: Suite, before: Mapping[str, str] | None) -> dict[str, str]:
    """Task → digest of its own data; empty for a task without any.

    Args:
        before: what an earlier call on the suite's folder found. It counts for data that is not on
            this machine.
    """
    known = before or {}
    return {task.name: task_digest(task) or known.get(task.name, "") for task in suite.tasks}


def task_digest(task: SuiteTask) -> str:
    """Hash all that a task's keys name; empty if there is nothing, or not on this machine."""
    from detection.datasets.coco import images_of  # not for the suites of known datasets

    keys = all_keys(task)
    given = {k: with_datasets_folder(str(keys[k])) for k in (*FOLDERS, *FILES) if keys.get(k)}
    paths = {key: os.path.expanduser(path) for key, path in given.items()}
    there = {k: (os.path.isdir if k in FOLDERS else os.path.isfile)(p) for k, p in paths.items()}
    if not all(there.values()) or not there:
        return ""
    for key, root in ROOTS.items():
        if key in paths and root not in paths:
            with suppress(DataError):  # said by the checks before the runs
                paths[root] = images_of(paths[key], key.split("_")[1])
    content = [
        f"{key} {folder_digest(path) if key in FOLDERS else sha256_file(path)}"
        for key, path in sorted(paths.items())
    ]
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
