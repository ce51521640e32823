"""What of a dataset is there, complete, wrong: the readers' own checks, split by split.

The readers are those of training, so what passes here is read there. `--verify` also decodes
every image and looks at every label, which training does not.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fvcore.common.config import CfgNode

from detection.datasets import cityscapes, coco, lvis, sem_seg, voc
from detection.datasets.base import Record, Source, Split
from detection.datasets.layout import DATASETS_VARIABLE, checked_image
from detection.datasets.official import image_count, object_count
from moco.common.errors import DataError, UserError
from moco.common.progress import Progress

KINDS = ("voc", "coco", "lvis", "cityscapes")
_MODULES = {"voc": (voc, sem_seg), "coco": (coco,), "lvis": (lvis,), "cityscapes": (cityscapes,)}

OK, PART, NOTE, ABSENT, WRONG = "ok", "part", "note", "absent", "WRONG"

_TREES = {
    "voc": """\
VOC2007/  VOC2012/                     (trainval and test of 2007 in one folder)
  Annotations/000001.xml ...
  ImageSets/Main/{trainval,test}.txt
  ImageSets/Segmentation/{train,val,train_aug}.txt
  JPEGImages/000001.jpg ...
  SegmentationClass/2007_000032.png ...
  SegmentationClassAug/2007_000032.png ...       (train_aug of 2012)""",
    "coco": """\
coco/
  annotations/instances_{train,val}2017.json
  annotations/person_keypoints_{train,val}2017.json
  annotations/densepose_{train,valminusminival,minival}2014.json
  {train,val}2017/000000000009.jpg ...
  {train,val}2014/COCO_train2014_000000000009.jpg ...    (DensePose)""",
    "lvis": """\
lvis/
  lvis_v0.5_{train,val}.json     (1230 classes)
  lvis_v1_{train,val}.json       (1203 classes)
coco/
  {train,val}2017/000000000009.jpg ...""",
    "cityscapes": """\
cityscapes/
  leftImg8bit/{train,val}/<city>/*_leftImg8bit.png
  gtFine/{train,val}/<city>/*_gtFine_polygons.json
                            *_gtFine_{instanceIds,labelIds}.png
                            *_gtFine_labelTrainIds.png     (semantic segmentation)""",
}

_WHERE = {
    "voc": "from http://host.robots.ox.ac.uk/pascal/VOC/ get VOCtrainval_06-Nov-2007.tar, "
    "VOCtest_06-Nov-2007.tar, VOCtrainval_11-May-2012.tar, and unpack each with: "
    "tar -xf FILE --strip-components=1 -C {root}",
    "coco": "from https://cocodataset.org/#download get train2017.zip, val2017.zip and "
    "annotations_trainval2017.zip, and unpack each with: unzip FILE -d {root}/coco",
    "lvis": "from https://www.lvisdataset.org/dataset get the annotations of v0.5, and unpack each "
    "with: unzip FILE -d {root}/lvis (the images are COCO's: see doctor coco)",
    "cityscapes": "from https://www.cityscapes-dataset.com/downloads/ get "
    "leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip, and unpack each with: "
    "unzip FILE -d {root}/cityscapes",
}

# Tasks by kind, the first whose splits are all there is proposed: file → splits.
TASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "voc": {
        "configs/voc/faster_rcnn_R_50_C4_24k.yaml": (
            "voc_2007_trainval",
            "voc_2012_trainval",
            "voc_2007_test",
        ),
        "configs/voc/faster_rcnn_R_50_C4_9k.yaml": ("voc_2007_trainval", "voc_2007_test"),
        "configs/voc/fcn16s_R_50_30k.yaml": ("voc_2012_sem_seg_train_aug", "voc_2012_sem_seg_val"),
    },
    "coco": {
        "configs/coco/mask_rcnn_R_50_FPN_1x.yaml": ("coco_2017_train", "coco_2017_val"),
        "configs/coco/keypoint_rcnn_R_50_FPN_2x.yaml": (
            "keypoints_coco_2017_train",
            "keypoints_coco_2017_val",
        ),
        "configs/coco/densepose_rcnn_R_50_FPN_s1x.yaml": (
            "densepose_coco_2014_train",
            "densepose_coco_2014_valminusminival",
            "densepose_coco_2014_minival",
        ),
    },
    "lvis": {
        "configs/lvis/mask_rcnn_R_50_FPN_1x.yaml": ("lvis_v0.5_train", "lvis_v0.5_val"),
    },
    "cityscapes": {
        "configs/cityscapes/mask_rcnn_R_50_FPN_24k.yaml": (
            "cityscapes_fine_instance_seg_train",
            "cityscapes_fine_instance_seg_val",
        ),
        "configs/cityscapes/fcn16s_R_50_90k.yaml": (
            "cityscapes_fine_sem_seg_train",
            "cityscapes_fine_sem_seg_val",
        ),
    },
}


@dataclass(frozen=True)
class Finding:
    """About one split, or about the folder as a whole; `state` is one of the five above."""

    name: str
    state: str
    text: str


def kind_of(name: str) -> str | None:
    """The kind that Detectron2's name of a dataset belongs to; None for other names."""
    cfg = CfgNode({"DATASETS": CfgNode()})
    return next(
        (kind for kind in KINDS if any(name in module.sources(cfg) for module in _MODULES[kind])),
        None,
    )


def examine(kind: str, root: Path, *, verify: bool = False) -> list[Finding]:
    """Read everything of a kind that lies under `root`.

    Args:
        kind: one of `KINDS`.
        root: what $DETECTRON2_DATASETS would be.
        verify: decode every image and look at every label.
    """
    cfg = CfgNode({"DATASETS": CfgNode()})
    seen: set[str] = set()  # images that were decoded
    findings = []
    with _datasets_at(root):
        sources: dict[str, Source] = {}
        for module in _MODULES[kind]:
            sources |= module.sources(cfg)
        for name, source in sources.items():
            findings.append(examine_source(name, source, seen if verify else None))
        findings += _FOLDERS[kind](root, {f.name: f.state for f in findings})
    return findings


def report(kind: str, root: Path, findings: Sequence[Finding]) -> str:
    """For people: the expected tree, what was found, the next command."""
    lines = [f"expected in {root}:"]
    lines += ["  " + line for line in _TREES[kind].splitlines()]
    lines += ["", "found:"]
    width = max(len(finding.name) for finding in findings)
    absent = [finding.name for finding in findings if finding.state == ABSENT]
    lines += [
        f"  {finding.state:<5}  {finding.name:<{width}}  {finding.text}"
        for finding in findings
        if finding.state != ABSENT or finding.text
    ]
    plain = [f.name for f in findings if f.state == ABSENT and not f.text]
    if plain:
        lines.append(f"  absent {', '.join(plain)}")
    if len(absent) == len(findings):
        lines.append("  nothing")
    lines += ["", "next: " + _next(kind, root, findings)]
    return "\n".join(lines)


def all_right(findings: Sequence[Finding]) -> bool:
    """Something is there, and nothing is wrong with it; it may be a part of what is published."""
    states = {finding.state for finding in findings}
    return WRONG not in states and bool(states & {OK, PART})


def examine_source(name: str, source: Source, seen: set[str] | None) -> Finding:
    """Read a split. `seen`: decode its images, but for those in it; None: decode none."""
    if not source.present():
        return Finding(name, ABSENT, _hint(source))
    try:
        split = source.read()
        if seen is not None:
            _verify(split, seen)
    except DataError as error:
        return Finding(name, WRONG, f"{error}{_advice(source, str(error))}")
    except UserError as error:  # a package that is not installed: not the data's fault
        return Finding(name, ABSENT, f"not examined: {error}")
    return Finding(name, *_counts(split))


def _counts(split: Split) -> tuple[str, str]:
    """(state, text) of a split that was read."""
    images, official = len(split.records), image_count(split.name)
    objects = sum(len(record.get("annotations", ())) for record in split.records)
    text = f"{images} images"
    if split.evaluator_type != "sem_seg":
        text += f", {objects} objects"
    state = OK
    if official == images:
        text += " (official count)"
    elif official:
        state = PART
        text += f" (official count: {official} images"
        text += f", {object_count(split.name)} objects)" if object_count(split.name) else ")"
    return state, "; ".join((text, *split.notes))


def _verify(split: Split, seen: set[str]) -> None:
    """Decode every image that was not, and look at every label.

    Raises:
        DataError: how many are damaged or of another size than annotated, and the first.
    """
    records = [record for record in split.records if record["file_name"] not in seen]
    seen.update(record["file_name"] for record in records)
    damaged = []
    with (
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
        Progress(len(records), f"verify {split.name}", unit="img") as progress,
    ):
        for fault in pool.map(_fault, records):
            progress.update()
            if fault:
                damaged.append(fault)
    if damaged:
        others = f" (and {len(damaged) - 1} more images)" if len(damaged) > 1 else ""
        raise DataError(damaged[0] + others)
    if split.evaluator_type == "sem_seg":
        labels = len(split.classes), split.metadata["ignore_label"]
        sem_seg.check_labels(split.records, *labels, everything=True)


def _fault(record: Record) -> str:
    try:
        checked_image(record["file_name"], (record["width"], record["height"]))
    except DataError as error:
        return str(error)
    return ""


def _hint(source: Source) -> str:
    """What a split that is not there needs, where that is not obvious."""
    if isinstance(source, cityscapes.CityscapesSource) and source.kind == "sem_seg":
        instances = cityscapes.CityscapesSource("", "instance_seg", source.split, source.root)
        if instances.present():
            return f"no *_labelTrainIds.png; {source.how_to_make_labels()}"
    return ""


def _advice(source: Source, error: str) -> str:
    """What probably happened, where a message alone does not say it."""
    if source.name == "voc_2007_test" and ".xml: missing" in error:
        return (
            "; the annotations of the 2007 test set are in VOCtest_06-Nov-2007.tar, unpacked into "
            "the same folder as VOCtrainval"
        )
    return ""


def _voc_folders(root: Path, states: Mapping[str, str]) -> list[Finding]:
    """How the lists of one year fit together."""
    findings = []
    if (root / "VOCdevkit").is_dir() and not any(root.glob("VOC20*")):
        text = f"is one folder too many; use --root {root / 'VOCdevkit'}, or move its folders up"
        findings.append(Finding("VOCdevkit/", WRONG, text))
    for year in ("2007", "2012"):
        folder = root / f"VOC{year}"
        if not folder.is_dir():
            continue
        main = folder / "ImageSets" / "Main"
        lists = {}
        for split in ("train", "val", "trainval", "test"):
            try:
                lists[split] = set(voc.read_ids(main / f"{split}.txt"))
            except (DataError, OSError):
                continue
        name = folder.name + "/"
        if not lists:
            segmentation = folder / "ImageSets" / "Segmentation"
            if not any(segmentation.glob("*.txt")):
                text = "is there, but ImageSets/Main and ImageSets/Segmentation have no lists"
                findings.append(Finding(name, WRONG, text))
            continue
        if "trainval" in lists and "test" in lists:
            both = lists["trainval"] & lists["test"]
            if both:
                text = f"{len(both)} images are in trainval.txt and in test.txt ({min(both)})"
                findings.append(Finding(name, WRONG, text))
            else:
                text = "trainval and test lie in one folder and share no image, as they should"
                findings.append(Finding(name, OK, text))
        halves = [lists[half] for half in ("train", "val") if half in lists]
        if len(halves) == 2 and "trainval" in lists and set.union(*halves) != lists["trainval"]:
            text = "trainval.txt is not train.txt and val.txt together"
            findings.append(Finding(name, WRONG, text))
    return findings


def _coco_folders(root: Path, states: Mapping[str, str]) -> list[Finding]:
    findings = []
    for year in ("2017", "2014"):
        for fold in ("train", "val"):
            images = root / "coco" / f"{fold}{year}"
            used = any(
                states.get(name) != ABSENT
                for name, (_, folder, _) in coco.BUILTIN.items()
                if folder == f"coco/{images.name}"
            )
            if images.is_dir() and not used:
                text = f"is there, but no annotations/*_{images.name}.json"
                findings.append(Finding(f"coco/{images.name}/", WRONG, text))
    return findings


def _lvis_folders(root: Path, states: Mapping[str, str]) -> list[Finding]:
    folder = root / "lvis"
    if folder.is_dir() and all(state == ABSENT for state in states.values()):
        return [Finding("lvis/", WRONG, "is there, but has none of the files")]
    return []


def _cityscapes_folders(root: Path, states: Mapping[str, str]) -> list[Finding]:
    findings = []
    for split in ("train", "val"):
        images = root / "cityscapes" / "leftImg8bit" / split
        truth = root / "cityscapes" / "gtFine" / split
        if images.is_dir() and not truth.is_dir():
            text = f"is there, but gtFine/{split}/ is not"
            findings.append(Finding(f"leftImg8bit/{split}/", WRONG, text))
    return findings


_FOLDERS = {
    "voc": _voc_folders,
    "coco": _coco_folders,
    "lvis": _lvis_folders,
    "cityscapes": _cityscapes_folders,
}


def _next(kind: str, root: Path, findings: Sequence[Finding]) -> str:
    again = f"python -m detection.datasets doctor {kind} --root {root}"
    if any(finding.state == WRONG for finding in findings):
        return f"mend what is WRONG, then again: {again}"
    usable = {finding.name for finding in findings if finding.state in (OK, PART)}
    for config, splits in TASKS[kind].items():
        if usable.issuperset(splits):
            return (
                f"{DATASETS_VARIABLE}={root} python detection/train_net.py --config-file {config} "
                "--check-only MODEL.WEIGHTS random"
            )
    return f"{_WHERE[kind].format(root=root)}; then again: {again}"


@contextmanager
def _datasets_at(root: Path) -> Iterator[None]:
    """$DETECTRON2_DATASETS as given, for the readers and for what their messages say."""
    before = os.environ.get(DATASETS_VARIABLE)
    os.environ[DATASETS_VARIABLE] = str(root)
    try:
        yield
    finally:
        if before is None:
            del os.environ[DATASETS_VARIABLE]
        else:
            os.environ[DATASETS_VARIABLE] = before
