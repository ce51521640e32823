"""How pre-training and fine-tuning scale with GPUs: counted collectives, and a model on paper.

W processes, n images of each, N = W * n. A collective's bytes are those of its result. The time of
one is NCCL's own estimate of it (src/graph/tuning.cc, ncclTopoTuneModel): a fixed part, a latency
of each hop of the ring or tree, which is another between machines than inside one, and the bytes
that a process receives over the bandwidth.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from torch import nn

from benchmarks.speed.collectives import (
    BROADCAST,
    GATHER,
    SKIPPED,
    SUM,
    Collective,
    Counted,
    count,
    fit_times,
)
from benchmarks.speed.detection import CONFIGS, generated_datasets, task_config
from benchmarks.speed.measure import Setting
from benchmarks.speed.results import Result, Run, Table
from benchmarks.suites.suite_file import load_suite
from benchmarks.suites.synthetic import write_images
from detection.config.task import default_task
from moco.common.cfgnode import load_cfg
from moco.common.distributed import usable_cores
from moco.modeling.encoder import EncoderSpec, build_encoder

FLOAT, DOUBLE, MIB = 4, 8, 1 << 20
BUCKETS = (1 * MIB, 25 * MIB)  # DistributedDataParallel's first one, and the others
LOSSES = 4  # of a Faster R-CNN
DIM, K, IMAGE = 128, 65536, 3 * 224 * 224  # the paper's recipe
PROCESSES = (1, 2, 4)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PLANS = ((1, 1), (2, 5), (5, 5), (20, 5))  # inits, seeds


SOURCES: dict[str, list[Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
ASSUMED = {name: value for name, (value, *_) in SOURCES.items()}


class Link(NamedTuple):
    """What connects processes.

    Attributes:
        bytes_per_second: that a process receives inside a machine; far_bytes_per_second: that all
            of a machine's processes together receive from other machines.
        seconds: fixed part, of a hop inside a machine, of one between two.
        tree_seconds: the same of a tree, which all-reduce takes where it is faster; None: never.
        tree_share: of the bandwidth.
        per_machine: processes; cores: that they share, as in a process group on one CPU.
    """

    bytes_per_second: float
    far_bytes_per_second: float = math.inf
    seconds: Sequence[float] = ASSUMED["ring"]
    tree_seconds: Sequence[float] | None = ASSUMED["tree"]
    tree_share: float = ASSUMED["tree share"]
    per_machine: int = 8
    cores: float = math.inf

    def time(self, one: Collective, W: int) -> float:
        """Seconds of a collective; the ring's or the tree's, whichever is faster."""
        if W == 1:
            return 0.0
        machines = math.ceil(W / self.per_machine)
        bandwidth = min(
            self.bytes_per_second, self.far_bytes_per_second if machines > 1 else math.inf
        )
        rounds = 2 if one.kind == SUM else 1
        fixed, near, far = self.seconds
        far_hops = rounds * (machines - 1)
        latency = fixed + (rounds * (W - 1) - far_hops) * near + far_hops * far
        seconds = latency + received(one, W) / bandwidth
        if one.kind == SUM and self.tree_seconds is not None:
            fixed, near, far = self.tree_seconds
            hops = (W / machines - 1) * near + math.log2(machines) * far
            seconds = min(seconds, fixed + 2 * hops + 2 * one.nbytes / bandwidth / self.tree_share)
        return seconds * max(1.0, W / self.cores)


def received(one: Collective, W: int) -> float:
    """Bytes that reach a process in a ring."""
    parts = {SUM: 2 * (W - 1) / W, GATHER: (W - 1) / W, BROADCAST: float(W > 1)}
    return parts[one.kind] * one.nbytes


class Step(NamedTuple):
    """The collectives of a step: gradients, which the backward pass hides, and the others."""

    gradients: list[Collective]
    others: list[Collective]

    @property
    def all(self) -> list[Collective]:
        return [*self.gradients, *self.others]

    def seconds(self, compute: float, link: Link, W: int) -> float:
        """Of a step whose processes compute for `compute` seconds."""
        gradients, others = (sum(link.time(one, W) for one in part) for part in self)
        return compute + max(0.0, gradients - ASSUMED["backward share"] * compute) + others

    def received(self, W: int) -> float:
        return sum(received(one, W) for one in self.all)


def exchanged_gradients(model: nn.Module) -> list[Collective]:
    """One all-reduce for each bucket, which are filled from the last parameter on."""
    sizes, limits = [0], iter(BUCKETS)
    limit = next(limits)
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        sizes[-1] += parameter.numel() * FLOAT
        if sizes[-1] >= limit:
            limit = next(limits, BUCKETS[-1])
            sizes.append(0)
    return [Collective(SUM, size) for size in sizes if size]


def pretraining_step(encoder: nn.Module, W: int, n: int, dim: int = DIM) -> Step:
    """Momentum queue, keys shuffled by index: gradients, keys, and loss, accuracy, stop signal."""
    if W == 1:
        return Step([], [])
    keys = Collective(GATHER, W * n * dim * FLOAT)
    return Step(exchanged_gradients(encoder), [keys, Collective(SUM, 3 * FLOAT)])


def official_step(encoder: nn.Module, W: int, n: int) -> Step:
    """The official code's: images to all, keys twice, and the queue before each forward pass.

    Without its permutation and BN's buffers, which are small.
    """
    gradients, others = pretraining_step(encoder, W, n)
    images = Collective(GATHER, W * n * IMAGE * FLOAT)
    queue = Collective(BROADCAST, K * DIM * FLOAT)
    return Step(gradients, [*others[:1] * 2, images, queue] if W > 1 else [])


def finetuning_step(model: nn.Module, W: int, losses: int = LOSSES) -> Step:
    """Gradients, the losses, and of each BN the processes' means and mean squares.

    These are gathered and added (fvcore.nn.distributed); their gradients are all-reduced. One byte
    says whether every process could read its images.
    """
    if W == 1:
        return Step([], [])
    moments = [2 * m.num_features * FLOAT for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    others = [Collective(GATHER, W * nbytes) for nbytes in moments]
    others += [Collective(SUM, nbytes) for nbytes in [*moments, losses * DOUBLE, 1]]
    return Step(exchanged_gradients(model), others)


class Cluster(NamedTuple):
    """Machines of eight GPUs.

    Attributes:
        images_per_second: of pre-training on a GPU.
        finetuning_seconds: of 2 images, VOC R50-C4; None where no source has it.
    """

    name: str
    link: Link
    images_per_second: float
    finetuning_seconds: float | None = None


V100 = Cluster(
    "V100, InfiniBand",
    Link(ASSUMED["V100 link"], ASSUMED["V100 network"]),
    ASSUMED["V100 pre-training"],
    ASSUMED["V100 fine-tuning"],
)
ETHERNET = V100._replace(
    name="V100, Ethernet",
    link=Link(ASSUMED["V100 link"], ASSUMED["Ethernet"], ASSUMED["Ethernet ring"]),
)
A100 = Cluster(
    "A100, InfiniBand",
    Link(ASSUMED["A100 link"], ASSUMED["A100 network"]),
    ASSUMED["A100 pre-training"],
)
CLUSTERS = (V100, ETHERNET, A100)


@cache
def resnet50() -> nn.Module:
    """The encoder of MoCo v2."""
    return build_encoder(EncoderSpec("resnet50"), DIM, mlp=True)


def pretraining_runs(
    setting: Setting, processes: Sequence[int] = PROCESSES
) -> dict[int, tuple[Counted, Step]]:
    """Counted and on paper, by W: ResNet-18, 4 images of 32 px per process."""
    write_images(setting.scratch / "images", 64, seed=0)
    n, size = 4, {"MODEL.ARCH": "resnet18", "AUG.CROP_PX": 32, "DATA.NUM_WORKERS": 0}
    encoder = build_encoder(EncoderSpec("resnet18"), DIM, mlp=True)
    found = {}
    for W in processes:
        keys = size | {"DATA.ROOT": setting.scratch / "images", "SOLVER.BATCH_SIZE": W * n}
        keys |= {
            "SOLVER.REFERENCE_BATCH_SIZE": W * n,
            "MOCO.BN_SPLITS": W,
            "DEVICE": "cpu",
            "NUM_THREADS": 1,
        }
        words = [str(part) for pair in keys.items() for part in pair]
        config = str(CONFIGS / "pretrain/small_r18.yaml")
        counted = count("pretrain", W, _folder(setting), [config, *words], _steps(setting))
        found[W] = counted, pretraining_step(encoder, W, n)
    return found


def finetuning_runs(setting: Setting) -> dict[int, tuple[Counted, Step]]:
    """Counted and on paper, by W: the small task, an image of 96 px per process."""
    found = {}
    with generated_datasets(setting):
        for W in PROCESSES:
            keys = {"MODEL.DEVICE": "cpu", "MODEL.WEIGHTS": "random", "SOLVER.IMS_PER_BATCH": W}
            keys |= {"INPUT.MIN_SIZE_TRAIN": "(96,)", "SEED": 0, "SOLVER.PRECISION": "fp32"}
            words = [str(part) for pair in keys.items() for part in pair]
            config = str(CONFIGS / "voc/faster_rcnn_R_18_C4_small.yaml")
            counted = count("finetune", W, _folder(setting), [config, *words], _steps(setting))
            found[W] = (
                counted,
                finetuning_step(_detector(setting, "voc/faster_rcnn_R_18_C4_small"), W),
            )
    return found


def counted(setting: Setting) -> list[Result]:
    """Collectives of real steps against the formula, and their time against the local link."""
    times = fit_times(2, _folder(setting), SKIPPED + _steps(setting))
    link, rows = local_link(times), []
    said = f"{link.seconds[1] * 1e6:.0f} us a hop, {link.bytes_per_second / 1e9:.2f} GB/s"
    for kind, runs in (("pretraining", pretraining_runs), ("finetuning", finetuning_runs)):
        for W, (found, step) in runs(setting).items():
            same = totals(found.collectives) == totals(step.all)
            if W == 1:
                assert same, f"{kind}: one process makes collectives: {found.collectives}"
                continue
            on_paper, real = (
                sum(received(one, W) for one in which) / MIB
                for which in (step.all, found.collectives)
            )
            sizes = f"{W} processes, {len(found.collectives)} collectives"
            rows.append(Result(f"collectives {kind}", on_paper, real, sizes, differs=not same))
            predicted = sum(link.time(one, W) for one in step.all)
            sizes = f"{W} processes; {said}"
            rows.append(Result(f"communication {kind}", predicted, sum(found.seconds), sizes))
    return rows


def totals(collectives: Sequence[Collective]) -> dict[str, tuple[int, int]]:
    """By kind how many there are, and their bytes.

    Where one bucket of gradients ends and the next begins depends on the order in which the
    backward pass comes to them, which is not on paper.
    """
    kinds = {one.kind for one in collectives}
    of_kind = {kind: [one.nbytes for one in collectives if one.kind == kind] for kind in kinds}
    return {kind: (len(each), sum(each)) for kind, each in of_kind.items()}


def local_link(times: dict[int, float]) -> Link:
    """The link between 2 processes here, from the seconds of an all-reduce by its bytes.

    Least squares of the relative error of 2 hops + bytes / bandwidth.
    """
    sizes, seconds = (np.array(each, dtype=float) for each in (list(times), list(times.values())))
    factors = np.stack([np.full_like(sizes, 2.0), sizes], axis=1) / seconds[:, None]
    hop, per_byte = np.linalg.lstsq(factors, np.ones_like(sizes), rcond=None)[0]
    hop, per_byte = max(hop, 0.0), max(per_byte, 1e-12)
    return Link(1 / per_byte, math.inf, (0.0, hop, hop), None, cores=usable_cores())


def estimates(setting: Setting) -> list[Result | Table]:
    """1 to 512 GPUs, and what runs cost."""
    rows = []
    for n in (64, 16):
        shares = [
            100
            * n
            / A100.images_per_second
            / step.seconds(n / A100.images_per_second, A100.link, 64)
            for step in (pretraining_step(resnet50(), 64, n), official_step(resnet50(), 64, n))
        ]
        own, official = shares
        rows.append(Result(f"estimate {n}", own, official, sizes=A100.name))
    step = official_step(resnet50(), 64, 16).seconds(16 / V100.images_per_second, V100.link, 64)
    rows.append(Result("estimate ig1b", 1.25e6 * step / 3600, 6 * 24, sizes=V100.name))
    with generated_datasets(setting):
        detector = _detector(setting, "voc/faster_rcnn_R_50_C4_9k")
    assumed = [
        (name, f"{value:g}" if isinstance(value, float) else f"{value}", *rest)
        for name, (value, *rest) in SOURCES.items()
    ]
    parameters = Table("What is assumed", ("parameter", "value", "unit", "source"), assumed)
    return [*rows, parameters, _pretraining_table(), _finetuning_table(detector), *_costs()]


def _pretraining_table() -> Table:
    n, rows = 32, []
    for W in GPUS:
        step, row = pretraining_step(resnet50(), W, n), [f"{W}"]
        row.append(f"{step.received(W) / MIB:.4g}")
        for cluster in CLUSTERS:
            compute = n / cluster.images_per_second
            seconds = step.seconds(compute, cluster.link, W)
            official = official_step(resnet50(), W, n).seconds(compute, cluster.link, W)
            row += [
                f"{seconds * 1e3:.1f} ms",
                f"{bar(compute / seconds)} ({compute / official:.0%})",
            ]
        rows.append(tuple(row))
    heads = [head for c in CLUSTERS for head in (c.name, "efficiency (official exchange)")]
    title = f"Pre-training, ResNet-50 at 224 px, {n} images per GPU: a step"
    return Table(title, ("GPUs", "MiB received by each", *heads), tuple(rows))


def _finetuning_table(detector: nn.Module) -> Table:
    rows = []
    for W in GPUS:
        step, row = finetuning_step(detector, W), [f"{W}", f"{2 * W}"]
        row.append(f"{step.received(W) / MIB:.4g}")
        for cluster in (V100, ETHERNET):
            assert cluster.finetuning_seconds is not None
            seconds = step.seconds(cluster.finetuning_seconds, cluster.link, W)
            row += [f"{seconds * 1e3:.1f} ms", bar(cluster.finetuning_seconds / seconds)]
        rows.append(tuple(row))
    heads = [head for c in (V100, ETHERNET) for head in (c.name, "efficiency")]
    title = "Fine-tuning, VOC R50-C4 with synchronized BN, 2 images per GPU: an iteration"
    return Table(title, ("GPUs", "batch", "MiB received by each", *heads), tuple(rows))


def _costs() -> list[Table]:
    """Hours of pre-training by images and GPUs, of fine-tuning by inits and seeds."""
    n, rows = 32, []
    for name, seen in (("0.13 M x 200 epochs", 0.13e6 * 200), ("1.28 M x 200", 1.28e6 * 200),
                       ("1.28 M x 800", 1.28e6 * 800), ("14 M x 200", 14e6 * 200),
                       ("1 B x 1.4", 1.4e9)):  # fmt: skip
        row = [name]
        for cluster in (V100, A100):
            for W in (1, 8, 64, 512):
                step = pretraining_step(resnet50(), W, n)
                seconds = step.seconds(n / cluster.images_per_second, cluster.link, W)
                row.append(short(seen / (W * n) * seconds / 3600))
        rows.append(tuple(row))
    heads = [f"{W} {c.name.partition(',')[0]}" for c in (V100, A100) for W in (1, 8, 64, 512)]
    pretraining = Table("Hours of pre-training", ("images", *heads), tuple(rows))
    return [pretraining, _suite_hours()]


def _suite_hours() -> Table:
    """One process group of 8 V100; seconds of an iteration as the suites' files state them."""
    rows = []
    for name in ("voc", "coco", "lvis", "paper"):
        suite = load_suite(CONFIGS / f"suites/{name}.yaml")
        tasks = [task for task in suite.tasks if "embedded" in task.engines]
        hours = [
            load_cfg(default_task(), task.config, []).SOLVER.MAX_ITER
            * task.seconds_per_iteration
            / 3600
            for task in tasks
            if task.seconds_per_iteration
        ]
        cells = [short(math.fsum(hours) * inits * seeds) for inits, seeds in PLANS]
        rows.append((name, f"{len(hours)} of {len(tasks)}", *cells))
    heads = [
        f"{inits} init{'s'[: inits > 1]} x {seeds} seed{'s'[: seeds > 1]}" for inits, seeds in PLANS
    ]
    title = "Hours of fine-tuning on 8 V100, of the tasks whose speed is known"
    return Table(title, ("suite", "tasks", *heads), tuple(rows))


def short(hours: float) -> str:
    """With at least two digits."""
    return f"{hours:.2g}" if hours < 100 else f"{hours:,.0f}"


def bar(share: float, width: int = 10) -> str:
    """A share, 0..1, as a bar and a number."""
    full = round(share * width)
    return f"{'█' * full}{'░' * (width - full)} {share:.0%}"


def _steps(setting: Setting) -> int:
    return SKIPPED + (2 if setting.quick else 3 * setting.rounds)


def _folder(setting: Setting) -> Path:
    folder = setting.scratch / f"count{len(list(setting.scratch.glob('count*')))}"
    folder.mkdir()
    return folder


def _detector(setting: Setting, config: str) -> nn.Module:
    from detection.embedded.build import build_model

    return build_model(task_config(setting, "embedded", {"config": config, "MODEL.DEVICE": "cpu"}))


GOALS: dict[str, Run | None] = {"collectives": counted, "estimate": estimates}
