"""Command line of kNN classification of frozen features (moco/engine/knn.py).

    python -m benchmarks knn --checkpoint output/pretrain/checkpoint_0199.pth.tar --data ROOT

ROOT holds train/<class>/* and val/<class>/*, or CIFAR-10's own files.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a script, Python looks for modules in this folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common.command import command_parser, converter
from moco.common.errors import DataError, UserError, echo, format_value
from moco.common.pretrained import check_weights
from moco.data.images import check_root, describe_images, read_labeled_sets
from moco.modeling.archs import STEMS

if TYPE_CHECKING:
    from moco.common.run import RunRecord
    from moco.engine.evaluation import CenterCrop
    from moco.engine.knn import KnnResult
    from moco.engine.weights import InitialWeights, Reader

MAX_RECORDED_PX = 4096
CROP_PX = 224  # for a file without the crop size of the training


def build_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = command_parser(
        "knn",
        "kNN classification with a checkpoint's features.",
    )
    add = parser.add_argument
    weights = (
        f"weights that {converter()} recognizes: a file, name or address (see "
        "moco-transfer weights --help)"
    )
    add("--checkpoint", required=True, metavar="FILE", help=weights)
    data = "folder with train/<class>/* and val/<class>/*, or CIFAR-10's files"
    add("--data", required=True, metavar="ROOT", help=data)
    add("--k", type=int, default=200, help="neighbors (default: %(default)s)")
    add("--t", type=float, default=0.1, help="temperature (default: %(default)s)")
    add("--resize-px", type=int, default=0, help="shorter side (default: the run's, or 256/224)")
    add("--crop-px", type=int, default=0, help="center crop (default: the run's)")
    for name, what in {"mean": "mean", "std": "standard deviation"}.items():
        pixels = f"{what} of red, green, blue, 0..255 (default: the file's)"
        add(f"--{name}", nargs=3, type=float, metavar="X", help=pixels)
    stem = "kind of a 3x3 stem, whose stride is not in the file"
    add("--stem", default="", choices=STEMS, help=stem)
    add("--device", default="auto", help="auto, cpu, cuda (default: %(default)s)")
    add("-j", "--workers", type=int, default=0, help="data-loader workers")
    add("--output", metavar="DIR", help="folder for run.json, which moco-transfer table reads")
    add("--overwrite", action="store_true", help="replace the contents of DIR")
    init = "name of the weights in a table (default: the file's)"
    add("--init", default="", metavar="NAME", help=init)
    return parser


def main(argv: Sequence[str], read: "Reader") -> None:
    """Run the command `moco-transfer knn`."""
    args = build_parser().parse_args(argv)
    if args.k < 1 or not args.t > 0:
        raise UserError(f"--k {args.k} --t {args.t}: expected k >= 1 and t > 0")
    check_weights(args.checkpoint)
    check_root(args.data, labeled=True)
    echo(f"kNN: {args.checkpoint} on {args.data}")

    from moco.common.run import RunFolder, write_record
    from moco.engine.device import pick_device
    from moco.engine.evaluation import CenterCrop
    from moco.engine.knn import evaluate
    from moco.modeling.encoder import load_backbone

    weights = read(args.checkpoint, stem=args.stem, init=args.init, mean=args.mean, std=args.std)
    echo(*(f"note: {note}" for note in weights.notes))
    assert weights.state is not None
    backbone = load_backbone(weights.spec, weights.state)
    # The defaults are the settings of the run's kNN monitor; files of other projects have none.
    keys = {"KNN.CROP_PX": 0, "KNN.RESIZE_PX": 0, "AUG.CROP_PX": CROP_PX}
    knn_crop, knn_resize, training_crop = (
        _pixels(args.checkpoint, key, weights.config.get(key, otherwise))
        for key, otherwise in keys.items()
    )
    crop_px, resize_px = args.crop_px or knn_crop, 0 if args.crop_px else knn_resize
    resize_px = args.resize_px or resize_px
    crop = CenterCrop.sized(crop_px, resize_px, training_crop, weights.mean, weights.std)
    weights.spec.check_image(crop.crop_px, "--crop-px")
    data = read_labeled_sets(args.data)
    image_notes = [*describe_images(data.train), *describe_images(data.val)]
    echo(*(f"note: {note}" for note in image_notes))
    notes = [*weights.notes, *image_notes]
    device, start = pick_device(args.device), time.monotonic()
    with RunFolder(args.output, overwrite=args.overwrite) if args.output else nullcontext() as run:
        result = evaluate(backbone, data, crop, args.k, args.t, device, args.workers)
        if run:
            record = _record(result, crop, weights, notes, time.monotonic() - start)
            echo(f"record: {write_record(run.path, record)}")
        print(result)


def _pixels(checkpoint: str, key: str, value: Any) -> int:
    """Return a size from a checkpoint's configuration.

    Raises:
        DataError: If the value is not a valid size.
    """
    if type(value) is not int or not 0 <= value <= MAX_RECORDED_PX:
        raise DataError(
            f"{checkpoint}: its config has {key} {format_value(value)}, expected an integer of "
            f"0..{MAX_RECORDED_PX}; the checkpoint is damaged"
        )
    return value


def _record(
    result: "KnnResult",
    crop: "CenterCrop",
    weights: "InitialWeights",
    notes: list[str],
    seconds: float,
) -> "RunRecord":
    """Build the run record; the seed is that of the pre-training, because kNN has none."""
    from moco.common.cfgnode import cfg_sha256
    from moco.common.run import RunRecord, provenance

    protocol = {key: value for key, value in asdict(result).items() if key != "top1"}
    protocol |= {"network": weights.spec.name, "resize_px": crop.resize_px, "crop_px": crop.crop_px}
    return RunRecord(
        kind="knn",
        status="done",
        task=f"knn_{weights.spec.name}",
        engine="moco",
        init=weights.init,
        weights_sha256=weights.sha256,
        weights_source=weights.source,
        seed=weights.seed,
        config_sha256=cfg_sha256(protocol),
        config=protocol,
        provenance=provenance(),
        iterations=0,
        seconds=seconds,
        metrics={"knn/top1": result.top1},
        notes=notes,
    )


if __name__ == "__main__":
    from benchmarks.__main__ import cli

    cli("knn")
