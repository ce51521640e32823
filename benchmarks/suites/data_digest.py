"""Digests of custom datasets, which do not depend on the place of the files.

The digest of a folder covers the relative names of all files, the bytes of annotations and lists
(`*.xml`, `*.txt`, `*.json`), and the sizes of the others. At most `MAX_FILES` of either kind are
inspected, evenly spread over the sorted names, so that ImageNet's 1.3 million files take seconds.
Hidden files are ignored, and so are the outputs of suites and trainings inside the folder. An image
that is replaced by another of the same name and size is not noticed. The digest of a file in COCO's
format covers the file and the folder of images, that of a data.yaml the file and its folder.
"""

import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.report.records import SUITE_NAME, TASK_KEYS
from benchmarks.suites.checks import with_datasets_folder
from benchmarks.suites.suite import Suite, all_keys
from moco.common.errors import DataError, UserError
from moco.common.files import files_below, sha256_file
from moco.common.run import LOCK_NAME, RECORD_NAME

# Key of a file in COCO's format → key of the folder of its images, which may be left out.
ROOTS = {f"DATASETS.COCO_{role}_JSON": f"DATASETS.COCO_{role}_ROOT" for role in ("TRAIN", "TEST")}
# Files of the outputs of suites and trainings, which may be started from the folder of the data.
OUTPUTS = (SUITE_NAME, RECORD_NAME, LOCK_NAME)
READ = (".xml", ".txt", ".json")
MAX_FILES = 20_000


def data_digests(suite: Suite, before: Mapping[str, str] | None) -> dict[str, str]:
    """Return task → digest of custom data; empty if the task has none.

    Args:
        suite: Suite with the overrides of the command line.
        before: Digests from an earlier call on the suite's folder, used for data that is not on
            this machine.
    """
    known = before or {}
    digest_of = functools.cache(folder_digest)  # tasks share folders
    keys = {task.name: all_keys(task) for task in suite.tasks}
    return {name: data_digest(own, digest_of) or known.get(name, "") for name, own in keys.items()}


def data_digest(keys: Mapping[str, Any], digest_of: Callable[[str], str] | None = None) -> str:
    """Hash the files and folders that keys name; return "" if there are none or one is missing.

    Args:
        keys: Values of a task's keys.
        digest_of: `folder_digest`, possibly cached.
    """
    content = [
        f"{key} {(digest_of or folder_digest)(path) if os.path.isdir(path) else sha256_file(path)}"
        for key, path in sorted(data_paths(keys).items())
    ]
    return hashlib.sha256("\n".join(content).encode()).hexdigest() if content else ""


def data_paths(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return key → file or folder of custom data; empty if there are none or one is missing."""
    from detection.datasets.coco import find_images  # not for the suites of known datasets

    set_to = {k: str(keys[k]) for k, key in TASK_KEYS.items() if key.data and keys.get(k)}
    paths = {key: os.path.expanduser(with_datasets_folder(path)) for key, path in set_to.items()}
    if not all(map(os.path.exists, paths.values())):
        return {}
    if file := paths.get("DATASETS.YOLO_YAML"):
        paths["folder of DATASETS.YOLO_YAML"] = os.path.dirname(file) or "."
    for key, root in ROOTS.items():
        if key in paths and root not in paths:
            with suppress(DataError):  # the checks before the runs report it
                paths[root] = find_images(paths[key], key.split("_")[1])
    return paths


def check_outside(file: Path, suite: Suite) -> None:
    """Check that an output file is in no folder of custom data, as it would change the digest.

    Raises:
        UserError: If the file is in such a folder.
    """
    for task in suite.tasks:
        for path in data_paths(all_keys(task)).values():
            if file.resolve().is_relative_to(Path(path).resolve()):
                raise UserError(
                    f"{file}: is inside the dataset {path}, and its runs are named after the "
                    "files in it; choose a path outside of it"
                )


def folder_digest(folder: str) -> str:
    """Compute the digest of a folder, as the docstring of the module defines it."""
    names = sorted(files_below(folder, OUTPUTS))
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape"))
    for is_read in (True, False):
        kind = [name for name in names if name.lower().endswith(READ) == is_read]
        for name in kind[:: max(math.ceil(len(kind) / MAX_FILES), 1)]:
            path = os.path.join(folder, name)
            try:
                content = sha256_file(path) if is_read else os.stat(path).st_size
            except OSError:  # the checks before the runs report it
                content = "unreadable"
            digest.update(f"\n{content}".encode())
    return digest.hexdigest()
