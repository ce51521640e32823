"""Check of this machine, or of a dataset before training.

moco-transfer doctor       show versions, devices, engines, datasets, disk space, what tasks lack
moco-transfer doctor voc   examine a dataset, as `moco-transfer datasets doctor voc` does
"""

import argparse
import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from detection.datasets.__main__ import add_doctor_arguments, examine
from moco import __version__
from moco.common import shipped
from moco.common.command import command_parser, program
from moco.common.errors import UserError, echo, run_cli
from moco.common.files import expand_home

if TYPE_CHECKING:
    from detection.datasets.base import Source

DETECTION = ("voc", "coco", "lvis", "cityscapes", "ade20k")  # folders of configs/
# Folder of configs/ → folder of images that its suite uses, in the folder of all datasets.
CLASSIFICATION = {"imagenet": "imagenet", "inaturalist": "inaturalist2018"}
# Prefix of the name of a test split, package that the metric or reader needs, extra with it.
PACKAGES = (
    ("lvis_", "hotcoco", "metrics"),
    ("cityscapes_fine_instance_seg_", "cityscapesscripts", "cityscapes"),
    ("cityscapes_fine_instance_seg_", "shapely", "cityscapes"),
)
WIDTH = 100


def machine(root: Path, root_argument: str = "") -> Iterator[str]:
    """Yield the lines about this machine.

    Args:
        root: Folder of all datasets.
        root_argument: The folder as the user gave it, for the commands that are shown.
    """
    yield from _software()
    yield from _devices()
    yield from _engines()
    yield from _disk(root)
    yield from _datasets(root)
    yield from _tasks(root, root_argument)


def _software() -> Iterator[str]:
    from moco.common.run import provenance

    found = provenance()
    where = found["git"] or shipped.ROOT
    yield f"moco-transfer {__version__} ({where})"
    versions = ", ".join(f"{name} {version or '-'}" for name, version in found["versions"].items())
    yield f"versions: {versions}"
    yield f"CPU: {found['hardware']['cpu']}"


def _devices() -> Iterator[str]:
    import torch

    from moco.common.distributed import usable_cores

    yield f"cores of this process: {usable_cores()}"
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        yield f"GPU {i}: {about.name}, {about.total_memory / 1e9:.1f} GB"
    if not torch.cuda.is_available():
        why = "torch finds none" if torch.version.cuda else "this torch is built without CUDA"
        yield f"GPU: {why}; the quickstart and the tasks called small are for a CPU"


def _engines() -> Iterator[str]:
    from detection.train_net import choose_engine

    name, reason = choose_engine("auto")
    yield f"engine of --engine auto: {name} ({reason})"
    if name != "embedded":
        yield "engine of --engine embedded: installed with this project"


def _disk(root: Path) -> Iterator[str]:
    from moco.common.download import cache_folder
    from moco.common.files import existing_folder

    places = {"this folder": Path(), "datasets": root, "downloaded weights": cache_folder()}
    for what, path in places.items():
        near = existing_folder(path)
        free = shutil.disk_usage(near).free / 1e9
        yield f"disk: {free:.1f} GB free for {what} ({path.absolute()})"


def _datasets(root: Path) -> Iterator[str]:
    from detection.datasets.download import datasets

    states: dict[str, list[str]] = {"present": [], "in part": [], "absent": []}
    for dataset in datasets().values():
        present = [archive.present(root) for archive in dataset.archives]
        state = "present" if all(present) else "in part" if any(present) else "absent"
        states[state].append(dataset.name)
    yield f"datasets in {root}:"
    for state, names in states.items():
        yield from _wrapped(f"  {state}: {', '.join(names) or 'none'}", "    ")


def _tasks(root: Path, root_argument: str) -> Iterator[str]:
    from detection.datasets import formats

    every = [source for each in formats().values() for source in each.sources(str(root))]
    sources = {source.name: source for source in every}
    groups: dict[tuple[str, ...], list[str]] = {(): []}
    for name in shipped.names():
        folder = name.partition("/")[0]
        if folder in DETECTION:
            lacks = tuple(_lacks(shipped.CONFIGS / f"{name}.yaml", sources, root_argument))
        elif folder in CLASSIFICATION:
            images = root / CLASSIFICATION[folder]
            lacks = () if images.is_dir() else (f"{images} (or another folder in DATA.ROOT)",)
        else:
            continue
        groups.setdefault(lacks, []).append(name)
    yield "tasks that lack nothing (their data was not read; doctor NAME does that):"
    yield from _wrapped(f"  {', '.join(groups.pop(())) or 'none'}", "  ")
    for lacks, names in groups.items():
        yield f"tasks that lack {'; and '.join(lacks)}:"
        yield from _wrapped(f"  {', '.join(names)}", "  ")
    evaluate = program("evaluate")
    yield f"A dataset of your own needs none of these: {evaluate} --data DIR --init mine=FILE"


def _lacks(file: Path, sources: "Mapping[str, Source]", root_argument: str) -> Iterator[str]:
    """Yield what a detection task lacks on this machine, with the commands to install it."""
    from detection.config.task import default_task
    from detection.datasets.base import require_package
    from detection.datasets.download import fetch_command
    from moco.common.cfgnode import flatten, load_cfg, read_yaml

    keys = flatten(read_yaml(file))
    needed = keys.keys() & {"DATASETS.TRAIN", "DATASETS.TEST", "INPUT.LSJ.ENABLED"}
    # Only Detectron2 knows the other keys of DensePose.
    cfg = load_cfg(default_task(), None, [str(part) for k in needed for part in (k, keys[k])])
    splits = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    if own := [split for split in splits if split not in sources]:
        yield f"a dataset with the splits {', '.join(own)}, as the quickstart makes it"
    if absent := [name for name in splits if name in sources and not sources[name].present()]:
        fetch = fetch_command(*absent, root=root_argument)
        yield f"{', '.join(absent)} ({fetch})" if fetch else ", ".join(absent)
    packages = [each[1:] for each in PACKAGES if splits[-1].startswith(each[0])]
    packages += [("shapely", "lsj")] if cfg.INPUT.LSJ.ENABLED else []
    for package, extra in packages:
        try:
            require_package(package, extra, "")
        except UserError as error:
            yield str(error).strip()
    if "MODEL.DENSEPOSE_ON" in keys and importlib.util.find_spec("densepose") is None:
        yield "Detectron2's project DensePose (docs/install.md)"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `moco-transfer doctor`."""
    parser = command_parser(
        "doctor",
        "Without a dataset: show versions, devices, engines, datasets, free disk "
        "space, and what is missing for which task. With one, as `datasets doctor`: show what "
        "exists, is complete, is wrong; exit code 3: something is wrong, or nothing exists.",
    )
    add_doctor_arguments(parser, required=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print facts about this machine, or examine a dataset; return the exit code."""
    from detection.datasets.files import datasets_root

    args = build_parser().parse_args(argv)
    named = {name for name, value in vars(args).items() if value not in (None, False)}
    if named - {"root", "verify", "debug"}:
        return examine(args)
    if args.verify:
        raise UserError("--verify: name the dataset to verify, e.g. doctor voc --verify")
    root = args.root or ""
    for line in machine(expand_home(root or datasets_root()), root):
        echo(line)
    return 0


if __name__ == "__main__":
    run_cli(main)
