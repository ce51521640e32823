"""Runs of the paper's tasks on Detectron2: processes, checks, evaluation, files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import nn

from detection.config.task import load_task
from detection.engine import launch, trainer
from detection.engine.job import Job
from detection.engine.weights import EngineResult
from detection.train_net import main
from moco.common import distributed
from moco.common.files import load_torch
from moco.common.run import RunRecord, read_record
from moco.engine.stop import StopRequest
from tests.detection.conftest import ROOT
from tests.oracles.small_tasks import ENGINES, assert_same_run, logged, options
from tests.oracles.tiny_coco import KINDS, write_coco

pytestmark = [pytest.mark.detectron2, pytest.mark.slow, pytest.mark.usefixtures("detectron2")]

IN_PROCESS = launch._in_process
MASKS, LABELS, POINTS = (
    "coco/mask_rcnn_R_50_FPN_1x",
    "voc/fcn16s_R_50_30k",
    "coco/keypoint_rcnn_R_50_FPN_2x",
)


@pytest.fixture(scope="module", autouse=True)
def data(layouts_root):
    """Tiny datasets under all dataset names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETECTRON2_DATASETS", str(layouts_root / "of_all_others"))
        yield


@pytest.fixture(scope="module")
def arguments(narrow_r50_file):
    """Return the arguments of a task, cut down to seconds."""

    def build(task: str, folder: Path, *opts: object, flags: tuple[str, ...] = ()) -> list[str]:
        values = options(task) | {"MODEL.WEIGHTS": narrow_r50_file, "OUTPUT_DIR": folder}
        argv = ["--config-file", str(ROOT / "configs" / f"{task}.yaml"), *flags]
        return argv + [str(x) for pair in values.items() for x in pair] + [str(x) for x in opts]

    return build


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """Folder and record of a run of two iterations by task; each runs once."""
    runs: dict[str, tuple[Path, RunRecord]] = {}

    def get(task: str) -> tuple[Path, RunRecord]:
        if task not in runs:
            folder = tmp_path_factory.mktemp("finished") / "run"
            assert main(arguments(task, folder, "SOLVER.CHECKPOINT_PERIOD", 1)) == 0
            runs[task] = folder, read_record(folder / "run.json")
        return runs[task]

    return get


def leaving_its_state(job: Job, stop: StopRequest) -> EngineResult:
    """Do the work of a rank, and save its final model."""
    from detection.d2 import engine

    models, build = [], engine.build_model

    def built(cfg: CfgNode) -> nn.Module:
        models.append(build(cfg))
        return models[0]

    engine.build_model = built
    result = trainer.work(job, stop)
    file = Path(job.cfg.OUTPUT_DIR) / f"rank{distributed.rank()}.pth"
    torch.save(models[0].state_dict(), file)
    return result


def recording_process(*args) -> None:
    """Run a process of `launch` whose rank saves its final model."""
    launch.work = leaving_its_state
    IN_PROCESS(*args)


@pytest.mark.parametrize("task", [MASKS, LABELS])
def test_two_processes(task, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "_in_process", recording_process)
    folder = tmp_path / "run"
    scaling = ("SOLVER.REFERENCE_WORLD_SIZE", 1, "SOLVER.MAX_ITER", 4, "SOLVER.STEPS", "(2,)")
    # Images of several sizes: the ranks then weigh their statistics differently.
    sizes = ("INPUT.MIN_SIZE_TRAIN", "(48, 96, 144)", "TEST.PRECISE_BN.NUM_ITER", 4)
    assert main(arguments(task, folder, *scaling, *sizes, flags=("--num-gpus", "2"))) == 0
    record = read_record(folder / "run.json")
    # Twice the batch and the rate, half the iterations; said and recorded.
    assert (record.status, record.iterations) == ("done", 2)
    base = {MASKS: 0.02, LABELS: 0.003}[task]
    assert record.config["SOLVER.IMS_PER_BATCH"] == 4
    assert record.config["SOLVER.BASE_LR"] == 2 * base
    assert list(record.config["SOLVER.STEPS"]) == [1]
    assert record.config["SOLVER.REFERENCE_WORLD_SIZE"] == 2
    out = capsys.readouterr().out
    for note in (
        f"scaled from 1 to 2 processes: batch 2 -> 4, learning rate {base:g} -> {2 * base:g}, "
        "iterations 4 -> 2",
        "not equivalent after scaling: BN sees 4 images at once instead of 2",
    ):
        assert f"note: {note}" in out
        assert sum(line.startswith(note) for line in record.notes) == 1
    # Both ranks ended with one model, BN statistics included, and that is the one in the file.
    final = load_torch(folder / "model_final.pth")["model"]
    start = load_torch(load_task(str(folder / "config.yaml"), [], "detectron2").cfg.MODEL.WEIGHTS)
    for rank in (0, 1):
        state = load_torch(folder / f"rank{rank}.pth")
        assert set(state) == set(final)
        assert [name for name in final if not torch.equal(state[name], final[name])] == []
    (stem,) = [name for name in final if name.endswith("stem.conv1.norm.running_mean")]
    assert not torch.equal(final[stem], start["model"]["stem.conv1.norm.running_mean"])
    # Every image was evaluated once: one process finds the same.
    predictions = {p.name: p.read_bytes() for p in (folder / "inference").rglob("*.*")}
    again = tmp_path / "again"
    where = ("MODEL.WEIGHTS", str(folder / "model_final.pth"), "OUTPUT_DIR", str(again))
    argv = ["--config-file", str(folder / "config.yaml"), "--eval-only", *where]
    assert main(argv) == 0
    alone = read_record(again / "inference" / "run.json")
    assert alone.metrics == record.metrics
    assert not any("scaled" in note for note in alone.notes)
    assert alone.task == record.task
    different = {key for key, value in record.config.items() if alone.config[key] != value}
    assert different == {"MODEL.WEIGHTS", "OUTPUT_DIR"}
    for name, content in predictions.items():
        assert (again / "inference" / name).read_bytes() == content, name
    if task == MASKS:
        found = json.loads(predictions["coco_2017_val.json"])
        assert len({row["image_id"] for row in found}) == 2


def test_a_check_says_everything_and_writes_nothing(arguments, finished, tmp_path, capsys):
    argv = arguments(MASKS, tmp_path / "run", "SOLVER.CHECKPOINT_PERIOD", 1)
    assert main(["--check-only", *argv]) == 0
    out = capsys.readouterr().out.splitlines()[1:]
    assert out[0].startswith("engine: detectron2 (version ")
    assert [line.split(":")[0] for line in out[1:5]] == ["task", "data", "weights", "schedule"]
    label = "deviates from the paper (Table 5a)"
    deviations = [line.strip() for line in out if line.startswith("  ")]
    assert "SOLVER.MAX_ITER: got 2, the paper has 90000" in "\n".join(deviations)
    assert f"recipe: {label}, {len(deviations)} deviations:" in out
    assert out[-1] == f"checked, nothing was trained or written; recipe: {label}"
    assert list(tmp_path.iterdir()) == []
    # The same in the record of the run.
    _, record = finished(MASKS)
    recipe = {"recipe": "Table 5a", "label": label, "deviations": deviations}
    assert record.recipe == recipe


@pytest.mark.parametrize(
    ("task", "how"),
    [
        *((MASKS, how) for how in ("task file", "its config", "model alone", "resume")),
        *((task, "model alone") for task in (LABELS, POINTS)),
    ],
)
def test_evaluation_gives_the_numbers_of_the_training(task, how, finished, arguments, tmp_path):
    folder, record = finished(task)
    again = tmp_path / "again"
    model = ("MODEL.WEIGHTS", str(folder / "model_final.pth"))
    where = ("OUTPUT_DIR", str(again))
    kept = {p: p.read_bytes() for p in (folder / "run.json", folder / "config.yaml")}
    predictions = {p.name: p.read_bytes() for p in (folder / "inference").glob("*_val.json")}
    assert task == LABELS or predictions
    if how == "task file":
        argv = arguments(task, again, *model, flags=("--eval-only",))
    elif how == "its config":
        argv = ["--eval-only", "--config-file", str(folder / "config.yaml"), *model, *where]
    elif how == "model alone":
        again, argv = folder, ["--eval-only", *model]
    else:
        again, argv = folder, ["--eval-only", "--resume", "OUTPUT_DIR", str(folder)]
    for name in predictions:
        (again / "inference" / name).unlink(missing_ok=True)
    assert main(argv) == 0
    result = read_record(again / "inference" / "run.json")
    assert result.metrics == record.metrics
    assert (result.task, result.iterations, result.coverage) == (record.task, 0, None)
    # Untrained detectors have an AP of 0 all alike, so the predictions tell.
    for name, content in predictions.items():
        assert (again / "inference" / name).read_bytes() == content
    assert kept == {path: path.read_bytes() for path in kept}


def images(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (width, height) of a folder's images by name without suffix."""
    return {path.stem: Image.open(path).size for path in folder.iterdir()}


@pytest.mark.parametrize(("task", "number", "plotted"), [(MASKS, 1, 1), (LABELS, 9, 2)])
def test_predictions_are_plotted(task, number, plotted, finished, tmp_path):
    folder, _ = finished(task)
    where = ("MODEL.WEIGHTS", str(folder / "model_final.pth"), "OUTPUT_DIR", str(tmp_path))
    assert main(["--eval-only", "--visualize", str(number), *where]) == 0
    out = tmp_path / "inference" / "visualize"
    records = load_task(str(folder / "config.yaml"), [], "detectron2").test.records
    originals = {Path(r["file_name"]).stem: r["file_name"] for r in records}
    sizes = images(out)
    assert len(sizes) == plotted and set(sizes) <= set(originals)
    for name, (width, height) in sizes.items():
        with Image.open(originals[name]) as image:
            original = image.convert("RGB")
        assert width == original.width
        assert height == original.height if task == MASKS else height >= original.height
        with Image.open(out / f"{name}.jpg") as image:
            seen = np.asarray(image.convert("RGB"))[: original.height].astype(int)
        assert (np.abs(seen - np.asarray(original)) > 40).any()  # something is plotted


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> list[str]:
    """Options of a COCO-JSON dataset of three classes, with crowds and XYWH boxes."""
    root = write_coco(tmp_path_factory.mktemp("own"), {"train2017": 6, "val2017": 3}, seed=4)
    opts = []
    for role, name in (("TRAIN", "train2017"), ("TEST", "val2017")):
        path = root / "coco" / "annotations" / f"instances_{name}.json"
        content = json.loads(path.read_text())
        content["categories"] = [c for c in content["categories"] if c["id"] in KINDS]
        assert any(a["iscrowd"] for a in content["annotations"])
        # Fractions of pixels, as real annotations have.
        for annotation in content["annotations"]:
            x, y, w, h = annotation["bbox"]
            annotation["bbox"] = [x + 0.37, y + 0.21, w - 0.53, h - 0.41]
        path.write_text(json.dumps(content))
        opts += [f"DATASETS.COCO_{role}_JSON", str(path)]
        opts += [f"DATASETS.COCO_{role}_ROOT", str(root / "coco" / name)]
    return opts


def test_own_coco_data_trains_alike_on_both_engines(
    own, small_config, small_options, r18_file, tmp_path
):
    where = small_options.index("DATASETS.VOC_DIR")
    options = [*small_options[:where], *small_options[where + 2 :], *own]
    options += ["MODEL.WEIGHTS", str(r18_file), "DATALOADER.NUM_WORKERS", "0"]
    options += ["TEST.PRECISE_BN.ENABLED", "False", "MODEL.MASK_ON", "True"]
    for engine in ENGINES:
        argv = ["--config-file", small_config, "--engine", engine, *options]
        assert main([*argv, "OUTPUT_DIR", str(tmp_path / engine)]) == 0
    assert_same_run(*(tmp_path / engine for engine in ENGINES))
    theirs, ours = (logged(tmp_path / engine) for engine in ENGINES)
    for name in ("total_loss", "loss_cls", "loss_box_reg", "loss_mask", "loss_rpn_cls", "lr"):
        assert theirs[name] == ours[name], name
    record = read_record(tmp_path / "embedded" / "run.json")
    assert record.config["MODEL.ROI_HEADS.NUM_CLASSES"] == 3
    assert record.recipe is not None and record.recipe["label"] == "not a task of the paper"
    kinds = ("bbox/AP-person", "bbox/AP-car", "bbox/AP-dog", "segm/AP-dog")
    assert set(record.metrics) >= {"bbox/AP", "segm/AP", *kinds}
