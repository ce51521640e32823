"""The command from a dataset's folder to a table: what it finds and chooses, and a whole run."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import evaluate, run_suite
from benchmarks.suites.executors import slurm
from benchmarks.suites.synthetic import write_scenes
from detection.config.resolve import resolve_names
from detection.config.task import default_task, load_task
from detection.datasets import custom_keys, find_custom, read_split
from moco.common.cfgnode import flatten, read_yaml, split_assignments
from moco.common.errors import DataError, UserError
from moco.common.files import sha256_file
from moco.common.run import read_record
from tests.benchmarks.suites.fake_slurm import FakeSlurm
from tests.benchmarks.suites.fake_trainer import FakePrograms
from tests.benchmarks.suites.lab import ROOT, Lab
from tests.oracles.resnets import make_resnet
from tests.oracles.small_tasks import SMALL_VOC


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Write ResNet-18 of random weights."""
    file = tmp_path_factory.mktemp("weights") / "r18.pth"
    torch.save(make_resnet(18, base=64).state_dict(), file)
    return file


def make(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.mark.parametrize(
    ("files", "key", "value"),
    [
        (["Annotations/a.xml", "JPEGImages/a.jpg"], "DATASETS.VOC_DIR", "."),
        (["data.yaml"], "DATASETS.YOLO_YAML", "data.yaml"),
        (["data.yaml", "data_split.yaml"], "DATASETS.YOLO_YAML", "data_split.yaml"),
        (["train/_annotations.coco.json"], "DATASETS.COCO_DIR", "."),
        (["annotations/a.xml", "images/a.jpg"], "DATASETS.VOC_DIR", "."),
        (["annots/a.xml", "images/a.jpg", "LICENSE"], "DATASETS.VOC_DIR", "."),
        (
            ["VOCdevkit/VOC2007/Annotations/a.xml", "VOCdevkit/VOC2007/JPEGImages/a.jpg", "README"],
            "DATASETS.VOC_DIR",
            "VOCdevkit/VOC2007",
        ),
        (
            ["set/data.yaml", "set/images/a.jpg", "set/labels/a.txt"],
            "DATASETS.YOLO_YAML",
            "set/data.yaml",
        ),
    ],
)
def test_the_layout_is_found(tmp_path, files, key, value):
    assert find_custom(make(tmp_path, *files)) == {key: str(tmp_path / value)}


@pytest.mark.parametrize(
    ("files", "train", "test"),
    [
        (["annotations/custom_train.json", "annotations/custom_val.json"], 0, 1),
        (["train.json", "valid.json", "test.json"], 0, 2),
        (["all.json", "all_test.json", "all_train.json", "all_val.json"], 2, 1),
        (["train.json", "train_test.json", "train_train.json"], 2, 1),
        (
            [
                "annotations/instances_train2017.json",
                "annotations/instances_val2017.json",
                "annotations/captions_train2017.json",
                "annotations/captions_val2017.json",
                "annotations/image_info_test2017.json",
            ],
            0,
            1,
        ),
        (
            [
                "train/_annotations.coco.json",
                "train/_annotations.coco_train.json",
                "train/_annotations.coco_val.json",
            ],
            1,
            2,
        ),
    ],
)
def test_json_files_are_found_by_their_names(tmp_path, files, train, test):
    found = find_custom(make(tmp_path, *files))
    assert found == {
        "DATASETS.COCO_TRAIN_JSON": str(tmp_path / files[train]),
        "DATASETS.COCO_TEST_JSON": str(tmp_path / files[test]),
    }


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ([], r"no dataset \(it is empty\); expected VOC's Annotations/ and JPEG"),
        (["Annotations/a.xml", "b.txt"], r"no dataset \(it has Annotations/, b.txt\); expected"),
        (
            ["data.yaml", "train/_annotations.coco.json"],
            r"has several datasets \(DATASETS.COCO_DIR \., DATASETS.YOLO_YAML data.yaml\); .*move",
        ),
        (
            [
                f"{name}/{file}"
                for name in "ab"
                for file in ("Annotations/a.xml", "JPEGImages/a.jpg")
            ],
            r"datasets \(DATASETS.VOC_DIR a, DATASETS.VOC_DIR b\); give the folder of one",
        ),
        (
            [f"annotations/{name}_{split}.json" for name in "ab" for split in ("train", "val")],
            "_JSON annotations/a_train.json DATASETS.COCO_TEST_JSON annotations/a_val.json, D",
        ),
        (["classes.txt", "images/a.jpg"], r"without splits \(it has .* to divide it: .* split /"),
    ],
)
def test_no_layout_or_several_are_refused(tmp_path, files, error):
    with pytest.raises(DataError, match=error):
        find_custom(make(tmp_path, *files))


def test_one_json_file_is_divided_first(tmp_path):
    file = make(tmp_path, "images/a.jpg", "annotations/default.json") / "annotations/default.json"
    file.write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(DataError, match=r"without splits .* to divide it: .* split /"):
        find_custom(tmp_path)
    file.write_text("{}")
    with pytest.raises(DataError, match="no dataset"):
        find_custom(tmp_path)


@pytest.mark.parametrize(
    ("images", "classes", "iterations", "steps", "warmup", "period"),
    [
        (8, 1, 300, (225, 275), 30, 75),  # the least
        (120, 20, 6000, (4500, 5500), 50, 1500),  # many classes
        (3000, 3, 3000, (2250, 2750), 50, 750),  # many images: four passes
        (100_000, 1, 24_000, (18_000, 22_000), 50, 6000),  # VOC's schedule
    ],
)
def test_the_budget_follows_classes_and_images(images, classes, iterations, steps, warmup, period):
    assert evaluate.budget(images, classes, batch=4, warmup=50) == {
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": steps,
        "SOLVER.WARMUP_ITERS": warmup,
        "TEST.EVAL_PERIOD": period,
    }


@pytest.mark.parametrize(
    ("folder", "iterations"),
    [
        ("raccoon", 300),
        ("voc07_person", 354),
        ("bccd", 900),
        ("facemask", 900),
        ("chess_pieces", 3900),
        ("voc07_1200", 6000),
    ],
)
def test_the_budgets_of_real_datasets(folder, iterations, weights, shared_data, capsys):
    """Those of docs/guides/believable.md."""
    evaluate.choose(shared_data / folder, str(weights), None)
    assert f"budget: {iterations} iterations of 4 images, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("depth", "options", "keys"),
    [
        (10, {"base": 16}, {"DEPTH": 10, "STEM_OUT_CHANNELS": 16, "RES2_OUT_CHANNELS": 16}),
        (18, {"base": 64, "stem": "cifar"}, {"STEM": "cifar"}),
        (
            50,
            {"base": 16},
            {"STEM_OUT_CHANNELS": 16, "RES2_OUT_CHANNELS": 64, "WIDTH_PER_GROUP": 16},
        ),
    ],
)
def test_random_weights_get_the_network_of_the_others(tmp_path, depth, options, keys):
    """Of any width and stem; the pixels stay with each row's weights."""
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    torch.save(make_resnet(depth, **options).state_dict(), tmp_path / "mine.pth")
    file, chosen = evaluate.choose(tmp_path / "scenes", str(tmp_path / "mine.pth"), None)
    network = {key: value for key, value in chosen.items() if key.startswith("MODEL.")}
    assert network == {f"MODEL.RESNETS.{key}": value for key, value in keys.items()}
    pairs = [word for pair in network.items() for word in pair]
    pairs += ["DATASETS.VOC_DIR", str(tmp_path / "scenes"), "MODEL.WEIGHTS"]
    mine, random = (
        load_task(file, [*pairs, init], "embedded").cfg.MODEL.RESNETS
        for init in (str(tmp_path / "mine.pth"), "random")
    )
    assert mine == random


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "expected"),
    [
        ("test_vit3", None, "faster_rcnn_timm_vit_small"),
        ("test_mambaout", None, "faster_rcnn_timm_small"),
        ("vit_tiny_patch16_224", None, "faster_rcnn_ViT_Ti_small"),
        ("vit_tiny_patch16_224", "faster_rcnn_timm_vit_small", "faster_rcnn_timm_vit_small"),
        ("test_maxvit", None, "faster_rcnn_timm_small"),
    ],
)
def test_the_task_of_a_network_of_timm(tmp_path, name, task, expected):
    """A family's task where there is one, unless another is given; a square for one size."""
    import timm

    write_scenes(tmp_path / "scenes", 6, 2, seed=0)
    state = timm.create_model(name).state_dict()
    for value in state.values():
        if value.is_floating_point() and value.dim() == 1:
            value += 0.1
    torch.save({"state_dict": state, "arch": name, "epoch": 1}, tmp_path / "mine.pth")
    file, keys = evaluate.choose(tmp_path / "scenes", str(tmp_path / "mine.pth"), task)
    assert Path(file).stem == expected
    if "timm" in expected:
        assert keys["MODEL.TIMM.NAME"] == name
    assert ("MODEL.BACKBONE.SQUARE_PAD" in keys) == (name == "test_maxvit")


def test_the_help_names_the_number_of_seeds():
    text = " ".join(evaluate.build_parser().format_help().split())
    assert "seeds per row, 0, 1, ... (default: 3)" in text


@pytest.mark.parametrize(
    ("folder", "keys"),
    [
        ("facemask", ["COCO_TRAIN_JSON", "COCO_TEST_JSON"]),
        ("coco", ["COCO_TRAIN_JSON", "COCO_TEST_JSON"]),
        ("raccoon", ["VOC_DIR"]),
        ("chess_pieces", ["COCO_DIR"]),
    ],
)
def test_real_folders_are_found_and_read(folder, keys, shared_data):
    cfg = default_task()
    for key, value in find_custom(shared_data / folder).items():
        cfg.merge_from_list([key, value])
    assert custom_keys(cfg.DATASETS) == sorted(keys, reverse=True)
    resolve_names(cfg, [], eval_only=False)
    assert read_split(cfg.DATASETS.TEST[0], cfg).records


def test_random_weights_alone_choose_no_task(tmp_path):
    with pytest.raises(UserError, match="give the weights to evaluate"):
        evaluate.main(["--data", str(tmp_path), "--init", "random"])


@pytest.mark.parametrize(
    ("opts", "iterations", "steps"),
    [
        (["SOLVER.MAX_ITER", "400"], 400, (300, 367)),
        (["SOLVER.MAX_ITER=400", "SOLVER.STEPS", "(100,)"], 400, (100,)),
        (["SOLVER.IMS_PER_BATCH", "2"], 4200, (3150, 3850)),
    ],
)
def test_the_printed_budget_is_what_is_run(tmp_path, weights, capsys, opts, iterations, steps):
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    file, keys = evaluate.choose(tmp_path / "scenes", str(weights), None, opts)
    shown = capsys.readouterr().out
    pairs = [str(word) for pair in keys.items() for word in pair]
    pairs += [*split_assignments(opts), "MODEL.WEIGHTS", "random"]
    solver = load_task(file, pairs, "embedded").cfg.SOLVER
    assert (solver.MAX_ITER, tuple(solver.STEPS)) == (iterations, steps)
    expected = f"budget: {iterations} iterations of {solver.IMS_PER_BATCH} images, "
    assert expected in shown and f"steps at {steps}, evaluated every" in shown


@pytest.mark.parametrize("where", [["--plan", "plan.json"], ["--executor", "slurm", "--dry-run"]])
def test_what_other_machines_compute_is_not_timed(tmp_path, weights, capsys, monkeypatch, where):
    """A plan is written, and jobs are checked; neither asks for a flag that nobody gave."""
    monkeypatch.chdir(tmp_path)
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    argv = ["--data", "scenes", "--init", f"mine={weights}", "--trials", "1", *where]
    evaluate.main([*argv, "--gpus-per-run", "1", "--opts", "MODEL.DEVICE", "cpu"])
    shown = capsys.readouterr().out
    assert "timing" not in shown
    if "--plan" in where:
        assert len(json.loads((tmp_path / "plan.json").read_text())["runs"]) == 1
    else:
        assert "1 to do; how long that takes is not known" in shown


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["auto", "cpu", "local", "slurm", "--plan"])
def test_each_executor(tmp_path, weights, capsys, monkeypatch, executor):
    """Each computes the runs once and makes the table; a plan has their commands."""
    monkeypatch.chdir(ROOT)
    lab, cluster = Lab(tmp_path), FakeSlurm(tmp_path / "slurm")
    listed = "GPU 0: H100 (UUID: GPU-a)" if executor == "local" else ""
    (cluster.bin / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n")
    (cluster.bin / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("LOOK_SECONDS", "QUEUE_SECONDS"):
        monkeypatch.setattr(slurm, name, 0.05)
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    argv = ["--data", str(tmp_path / "scenes"), "--init", f"mine={weights}", "--init", "random"]
    argv += ["--trials", "1", "--output", str(lab.out)]
    plan = tmp_path / "plan.json"
    if executor == "--plan":
        evaluate.main([*argv, "--plan", str(plan)], FakePrograms(lab.journal))
        runs = json.loads(plan.read_text())["runs"]
        assert len(runs) == 2 and not lab.events()
        for run in runs:
            subprocess.run(run["command"], cwd=ROOT, check=True)
    else:
        argv += ["--executor", executor]
    if executor != "slurm":  # runs of the fake trainer are too short to be timed
        argv += ["--seconds-per-iteration", "1"]
    evaluate.main(argv, FakePrograms(lab.journal))
    lab.assert_once(2)
    assert set(cluster.ended().values()) == ({"COMPLETED"} if executor == "slurm" else set())
    shown = capsys.readouterr().out
    assert "timing" not in shown and re.search(r"^random +1 ", shown, re.M), shown
    assert {"table.md", "table.html"} <= set(lab.tables())


@pytest.mark.parametrize("place", ["inside", pytest.param("beside", marks=pytest.mark.slow)])
def test_a_folder_with_a_blank_and_its_own_output(tmp_path, weights, capsys, monkeypatch, place):
    """The output is in the folder of the data, which the same command continues."""
    data = tmp_path / "my données (1)"
    write_scenes(data, 4, 2, seed=0)
    monkeypatch.chdir(data if place == "inside" else tmp_path)
    lab = Lab(tmp_path)
    monkeypatch.setattr(run_suite, "write_tables", lambda *arguments: [])
    argv = ["--data", "." if place == "inside" else data.name, "--trials", "1"]
    argv += ["--init", f"mine={weights}", "--executor", "cpu", "--seconds-per-iteration", "1"]
    for _ in range(2):
        evaluate.main(argv, FakePrograms(lab.journal))
    lab.assert_once(1)
    assert [path.name for path in Path("output").iterdir()] == [data.name]
    out = tmp_path / "out of it"
    evaluate.main([*argv, "--output", str(out)], FakePrograms(lab.journal))
    assert (out / "suite.json").is_file()


def test_a_plan_is_not_written_into_the_data(tmp_path, weights, monkeypatch):
    """The plan would change the digest of the data, and the call without --plan be refused."""
    write_scenes(tmp_path / "scenes", 4, 2, seed=0)
    monkeypatch.chdir(tmp_path / "scenes")
    argv = ["--data", ".", "--init", f"mine={weights}", "--plan", "plan.json"]
    argv += ["--seconds-per-iteration", "1"]
    with pytest.raises(UserError, match=r"plan\.json: is inside the dataset"):
        evaluate.main(argv, FakePrograms(tmp_path / "journal"))
    assert not Path("output").exists()


@pytest.mark.slow
def test_from_a_folder_to_a_table(tmp_path, weights, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scenes(tmp_path / "scenes", 8, 4, seed=0)
    argv = ["--data", "scenes", "--init", f"mine={weights}", "--init", "random"]
    argv += ["--trials", "1", "--engine", "embedded", "--executor", "cpu"]
    argv += ["--seconds-per-iteration", "0.1"]
    evaluate.main([*argv, "--dry-run"])
    shown = capsys.readouterr().out
    assert "data: DATASETS.VOC_DIR scenes, 8 training images, 8 classes" in shown
    assert "faster_rcnn_R_18_C4_small" in shown and "no run was started" in shown
    assert "budget: 2400 iterations of 4 images, 1200 epochs" in shown
    assert not (tmp_path / "output").exists()
    short = SMALL_VOC | {"TEST.EVAL_PERIOD": 0}
    del short["SEED"]
    words = [str(word) for pair in short.items() for word in pair]
    evaluate.main([*argv, "--opts", *words])
    tables = tmp_path / "output" / "scenes" / "tables"
    assert "mine" in (tables / "table.md").read_text()
    source = hashlib.sha256(weights.read_bytes()).hexdigest()
    [run] = (tmp_path / "output/scenes/runs").glob("*/mine/*")
    [kept] = (tmp_path / "output/scenes/inits/converted").glob("*/mine.pth")
    record = read_record(run / "run.json")
    assert record.weights_sha256 == source
    assert record.provenance["converted_sha256"] == sha256_file(kept)
    assert dict(flatten(read_yaml(run / "config.yaml")))["MODEL.WEIGHTS"].endswith("/mine.pth")
