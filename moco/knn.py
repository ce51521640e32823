"""kNN classification of frozen features: how good they are, without training anything.

The protocol of InstDisc (arXiv 1805.01978, sec. 3.4), as in MoCo's CIFAR notebook: the k nearest
training images by cosine similarity s vote with weight exp(s / t).

    python -m moco.knn --checkpoint output/pretrain/checkpoint_0199.pth.tar --data ROOT

ROOT holds train/<class>/* and val/<class>/*, or CIFAR-10's own files.

N batch, D feature dimension, M number of training images.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moco.common.errors import DataError, UserError, run_cli, shown
from moco.common.files import PathLike, format_of
from moco.data.images import Images, check_present, labeled_sets

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from moco.common.run import RunRecord


WORKER_TIMEOUT_SECONDS = 600  # a data-loader worker that delivers nothing for so long hangs
MAX_RECORDED_PX = 4096
MAX_SIMILARITIES = 1 << 27  # worked out at a time: half a gigabyte


@dataclass(frozen=True)
class KnnInput:
    """How images are fed to the encoder.

    The shorter side is resized to `resize_px`, the center `crop_px` x `crop_px` is taken and
    normalized by `mean` and `std` (RGB, of 0..1).
    """

    resize_px: int
    crop_px: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.resize_px >= self.crop_px > 0:
            raise UserError(
                f"kNN: a crop of {self.crop_px} px does not fit an image resized to "
                f"{self.resize_px} px; set the resize at least as large"
            )


@dataclass(frozen=True)
class KnnResult:
    """Top-1 in 0..100, and what it was measured on; `k` after limiting it to the images."""

    top1: float
    k: int
    t: float
    num_train: int
    num_val: int
    num_classes: int

    def __str__(self) -> str:
        return (
            f"kNN top-1 {self.top1:.1f}% (k={self.k}, t={self.t}; {self.num_train} train, "
            f"{self.num_val} val images, {self.num_classes} classes, "
            f"chance {100 / self.num_classes:.1f}%)"
        )


def default_sizes(crop_px: int, resize_px: int, training_crop_px: int) -> tuple[int, int]:
    """`(resize_px, crop_px)` with 0 replaced: the training crop, and 256/224 of the crop."""
    crop = crop_px or training_crop_px
    return resize_px or round(crop * 256 / 224), crop


def knn_predict(
    train: "Tensor", labels: "Tensor", queries: "Tensor", k: int, t: float, num_classes: int
) -> "Tensor":
    """Predicted classes (N,) of `queries` (N, D), given `train` (M, D) and `labels` (M,).

    Rows are of unit length; 1 <= k <= M. Equal votes go to the lowest class.
    """
    import torch

    similarity, nearest = (queries @ train.T).topk(k, dim=1)  # (N, k)
    votes = torch.zeros(len(queries), num_classes, device=queries.device)
    votes.scatter_add_(1, labels[nearest], (similarity / t).exp())
    return votes.argmax(dim=1)


def evaluate(
    backbone: "nn.Module",
    root: PathLike,
    how: KnnInput,
    k: int,
    t: float,
    device: "torch.device",
    workers: int = 0,
    batch: int = 64,
) -> KnnResult:
    """kNN accuracy on `root/val` with the images of `root/train` as neighbors.

    Each process of a run encodes its part of the images; all get the result.

    Args:
        backbone: images (N, 3, H, W) → features (N, D); is moved to `device`.

    Raises:
        DataError: folders missing, different classes, images that cannot be decoded.
    """
    import torch

    data = labeled_sets(root)
    num_classes = len(data.classes)
    backbone = backbone.to(device).eval()
    train = _features(backbone, data.train, how, device, workers, batch)
    val = _features(backbone, data.val, how, device, workers, batch)
    labels = torch.tensor(data.train_labels, device=device)
    k = min(k, len(train))
    rows = max(1, MAX_SIMILARITIES // len(train))
    predictions = [
        knn_predict(train, labels, chunk, k, t, num_classes).cpu() for chunk in val.split(rows)
    ]
    right = torch.cat(predictions) == torch.tensor(data.val_labels)
    top1 = 100 * int(right.sum()) / len(right)
    return KnnResult(top1, k, t, len(train), len(val), num_classes)


def _features(
    backbone: "nn.Module",
    images: Images,
    how: KnnInput,
    device: "torch.device",
    workers: int,
    batch: int,
) -> "Tensor":
    """Features (M, D) of unit length, after global pooling; all processes call it together."""
    import torch
    import torch.nn.functional as F

    from moco.common.distributed import gather_rows, is_main, rank, world_size
    from moco.common.progress import Progress
    from moco.data.augment import normalize
    from moco.data.views import CenterCrops
    from moco.engine.stop import ignore_stop_signals
    from moco.engine.training import read_ahead

    M, W = len(images), world_size()
    # Image i is process i % W's; the last ones are encoded twice where M is no multiple of W.
    mine = [i % M for i in range(rank(), -(-M // W) * W, W)]
    crops = torch.utils.data.Subset(CenterCrops(images, how.resize_px, how.crop_px), mine)
    loader = torch.utils.data.DataLoader(
        crops,
        batch_size=batch,
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        timeout=WORKER_TIMEOUT_SECONDS if workers else 0,
    )
    features = []
    silent = not is_main()
    with torch.inference_mode(), Progress(len(mine), "kNN features", "img", silent=silent) as bar:
        try:
            for pixels in read_ahead(loader):  # (N, 3, P, P) uint8
                x = normalize(pixels.to(device).float() / 255, how.mean, how.std)
                features.append(F.normalize(backbone(x), dim=1))
                bar.update(len(pixels))
        except DataError as error:
            # From a data-loader worker the message is a traceback, which ends with the error's own.
            raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from error
    rows = torch.cat(features)
    if not bool(rows.isfinite().all()):
        raise DataError("kNN: features are not finite; the weights are damaged or diverged")
    gathered = gather_rows(rows).view(W, len(mine), -1)
    return gathered.transpose(0, 1).reshape(W * len(mine), -1)[:M]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m moco.knn", description="kNN classification with a checkpoint's features."
    )
    parser.add_argument("--checkpoint", required=True, metavar="FILE", help="checkpoint_*.pth.tar")
    parser.add_argument(
        "--data",
        required=True,
        metavar="ROOT",
        help="train/<class>/* and val/<class>/*, or CIFAR-10's own files",
    )
    parser.add_argument("--k", type=int, default=200, help="neighbors (default: %(default)s)")
    parser.add_argument("--t", type=float, default=0.1, help="temperature (default: %(default)s)")
    parser.add_argument(
        "--resize-px", type=int, default=0, help="shorter side (default: the run's, or 256/224)"
    )
    parser.add_argument("--crop-px", type=int, default=0, help="center crop (default: the run's)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: %(default)s)")
    parser.add_argument("-j", "--workers", type=int, default=0, help="data-loader workers")
    parser.add_argument(
        "--output", metavar="DIR", help="folder for run.json, which benchmarks.make_table reads"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what DIR holds")
    parser.add_argument(
        "--init", default="", metavar="NAME", help="of the weights in a table (default: the file's)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command `python -m moco.knn`."""
    args = build_parser().parse_args(argv)
    if args.k < 1 or not args.t > 0:
        raise UserError(f"--k {args.k} --t {args.t}: expected k >= 1 and t > 0")
    format_of(args.checkpoint)
    check_present(args.data, labeled=True)
    print(f"kNN: {args.checkpoint} on {args.data}", flush=True)

    from moco.classification.weights import own_network
    from moco.common.run import RunFolder, write_record
    from moco.engine.checkpoint import load_checkpoint
    from moco.pretraining.config import pick_device

    state = load_checkpoint(args.checkpoint)
    own = own_network(args.checkpoint, state)
    for warning in own.warnings:
        print(f"warning: {warning}", flush=True)
    keys = state["config"]  # without a flag, as the run's own monitor saw the images
    # A run older than these keys has none.
    recorded = {
        key: _pixels(args.checkpoint, key, keys.get(key, 0))
        for key in ("KNN.CROP_PX", "KNN.RESIZE_PX", "AUG.CROP_PX")
    }
    crop_px = args.crop_px or recorded["KNN.CROP_PX"]
    resize_px = args.resize_px or (0 if args.crop_px else recorded["KNN.RESIZE_PX"])
    resize, crop = default_sizes(crop_px, resize_px, recorded["AUG.CROP_PX"])
    how = KnnInput(resize, crop, own.mean, own.std)
    backbone = own.backbone
    device = pick_device(args.device)
    if args.output is None:
        print(evaluate(backbone, args.data, how, args.k, args.t, device, args.workers))
        return
    with RunFolder(args.output, overwrite=args.overwrite) as folder:
        start = time.monotonic()
        result = evaluate(backbone, args.data, how, args.k, args.t, device, args.workers)
        print(result)
        seconds = time.monotonic() - start
        record = _record(result, how, args.checkpoint, args.init, state, seconds)
        print(f"record: {write_record(folder.path, record)}")


def _pixels(checkpoint: PathLike, key: str, value: Any) -> int:
    """A size from a checkpoint's configuration; raises DataError for what is none."""
    if type(value) is not int or not 0 <= value <= MAX_RECORDED_PX:
        raise DataError(
            f"{checkpoint}: its config has {key} {shown(value)}, expected a whole number of "
            f"0..{MAX_RECORDED_PX}; the checkpoint is damaged"
        )
    return value


def _record(
    result: KnnResult,
    how: KnnInput,
    checkpoint: PathLike,
    init: str,
    state: Mapping[str, Any],
    seconds: float,
) -> "RunRecord":
    """For tables; the seed is that of the pre-training, there is no other."""
    from moco.classification.weights import init_name
    from moco.common.cfgnode import cfg_sha256
    from moco.common.files import sha256_file
    from moco.common.run import RunRecord, provenance
    from moco.modeling.encoder import EncoderSpec

    encoder = state["encoder"]
    spec = EncoderSpec(encoder["arch"], encoder["stem"], encoder["width"])
    protocol = {key: value for key, value in asdict(result).items() if key != "top1"}
    protocol |= {"network": spec.name, "resize_px": how.resize_px, "crop_px": how.crop_px}
    return RunRecord(
        kind="knn",
        status="done",
        task=f"knn_{spec.name}",
        engine="moco",
        init=init or init_name(Path(checkpoint)),
        weights_sha256=sha256_file(checkpoint),
        weights_source=str(state["format"]),
        seed=state["seed"],
        config_sha256=cfg_sha256(protocol),
        config=protocol,
        provenance=provenance(),
        iterations=0,
        seconds=seconds,
        metrics={"knn/top1": result.top1},
    )


if __name__ == "__main__":
    run_cli(main)
