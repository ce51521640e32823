import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from moco.common.errors import DataError, UserError
from moco.common.run import read_record
from moco.data.images import labeled_sets
from moco.engine.checkpoint import list_checkpoints
from moco.engine.evaluation import CenterCrop
from moco.engine.knn import evaluate, features, knn_predict
from moco.knn import main
from moco.modeling.encoder import EncoderSpec, build_backbone
from moco.pretrain import main as pretrain
from tests.oracles.processes import run_on
from tests.oracles.resnets import randomize

COLORS = {"blue": (20, 40, 200), "green": (30, 180, 40), "red": (210, 30, 20)}
HOW = CenterCrop(16, 16, (0.5,) * 3, (0.25,) * 3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """Noise around three colors; `val` lacks one class, so labels of the two differ."""
    root = tmp_path_factory.mktemp("labeled")
    rng = np.random.default_rng(0)
    for split, classes in (("train", COLORS), ("val", ("green", "red"))):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(6):
                pixels = COLORS[name] + rng.normal(0, 25, (18, 20, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root


def test_votes_are_weighted_as_in_instdisc():
    """Written out: weight exp(s / t) for each of the k nearest."""
    rng = np.random.default_rng(0)
    M, N, D, k, t, classes = 40, 30, 5, 7, 0.1, 4
    train, queries = (rng.normal(size=(n, D)) for n in (M, N))
    train, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, queries))
    labels = rng.integers(0, classes, M)
    expected = []
    for query in queries:
        similarity = [float(query @ other) for other in train]
        nearest = sorted(range(M), key=lambda i: -similarity[i])[:k]
        votes = [0.0] * classes
        for i in nearest:
            votes[labels[i]] += np.exp(similarity[i] / t)
        expected.append(int(np.argmax(votes)))
    tensors = [torch.from_numpy(x) for x in (train, labels, queries)]
    got = knn_predict(tensors[0].float(), tensors[1], tensors[2].float(), k, t, classes)
    assert got.tolist() == expected
    unweighted = knn_predict(tensors[0].float(), tensors[1], tensors[2].float(), k, 1e9, classes)
    assert unweighted.tolist() != expected


def test_colors_are_told_apart(labeled):
    backbone = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    result = evaluate(backbone, labeled, HOW, 3, 0.1, CPU)
    assert result.top1 == 100
    assert (result.num_train, result.num_val, result.num_classes) == (18, 12, 3)
    assert "kNN top-1 100.0% (k=3, t=0.1; 18 train" in str(result)
    assert evaluate(backbone, labeled, HOW, 200, 0.1, CPU).k == 18  # no more than there are


def features_and_result(root):
    backbone = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    rows = features(backbone, labeled_sets(root).train, HOW, CPU, workers=0, batch=4)
    return rows, evaluate(backbone, root, HOW, 3, 0.1, CPU, batch=4)


@pytest.mark.slow
def test_processes_share_the_images_and_all_get_the_result(labeled, tmp_path):
    """17 and 11 images on 2 processes: the same rows in the same order as on one."""
    root = tmp_path / "odd"
    shutil.copytree(labeled, root)
    for name in ("train/blue/5.png", "val/red/5.png"):
        (root / name).unlink()
    alone, result = features_and_result(root)
    assert (len(alone), result.num_train, result.num_val) == (17, 17, 11)
    for rows, same in run_on(2, features_and_result, root):
        torch.testing.assert_close(rows, alone)
        assert same == result


def test_a_class_without_training_images_is_an_error(labeled, tmp_path):
    (tmp_path / "val").symlink_to(labeled / "val")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "red").symlink_to(labeled / "train" / "red")
    with pytest.raises(DataError, match="class green is in val and not in train"):
        evaluate(torch.nn.Flatten(), tmp_path, HOW, 1, 0.1, CPU)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_is_named_in_one_line(labeled, tmp_path, workers):
    shutil.copytree(labeled, tmp_path / "data")
    (tmp_path / "data/val/red/3.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        evaluate(torch.nn.Flatten(), tmp_path / "data", HOW, 1, 0.1, CPU, workers)
    assert str(caught.value) == f"{tmp_path}/data/val/red/3.png: the file is empty (0 bytes)"


def test_sizes():
    for given, expected in (
        ((0, 0, 224), (256, 224)),
        ((32, 0, 224), (37, 32)),
        ((0, 32, 32), (32, 32)),
    ):
        crop = CenterCrop.sized(*given, (0.0,) * 3, (1.0,) * 3)
        assert (crop.resize_px, crop.crop_px) == expected
    with pytest.raises(UserError, match="RESIZE_PX"):
        CenterCrop.sized(32, 30, 0, (0.0,) * 3, (1.0,) * 3)


def test_monitor_and_command_agree(labeled, images, tiny, tmp_path, capsys):
    opts = tiny(
        DATA__ROOT=images,
        DATA__KNN_ROOT=labeled,
        OUTPUT_DIR=tmp_path / "run",
        SOLVER__MAX_ITERS=7,
        KNN__EVERY_EPOCHS=1,
        KNN__K=5,
        KNN__RESIZE_PX=16,  # the crop's own size, not 256/224 of it
    )
    pretrain(opts)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    measured = {line["iteration"]: line["knn/top1"] for line in lines if "knn/top1" in line}
    assert list(measured) == [3, 6, 7]
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["metrics"]["knn/top1"] == measured[7]
    capsys.readouterr()
    checkpoint = list_checkpoints(tmp_path / "run")[-1]
    main(["--checkpoint", str(checkpoint), "--data", str(labeled), "--k", "5"])
    assert f"kNN top-1 {measured[7]:.1f}% (k=5, t=0.1; 18 train, 12 val" in capsys.readouterr().out
    command = ["--checkpoint", str(checkpoint), "--data", str(labeled), "--k", "5"]
    main([*command, "--output", str(tmp_path / "knn")])
    record = read_record(tmp_path / "knn" / "run.json")
    assert (record.kind, record.task) == ("knn", "knn_resnet10w0.125_stride2")
    assert (record.init, record.seed) == (f"run_{checkpoint.name.removesuffix('.pth.tar')}", 0)
    assert record.metrics == {"knn/top1": measured[7]}
    assert record.config["k"] == 5 and record.config["num_val"] == 12
    assert record.config["resize_px"] == record.config["crop_px"] == 16  # as the monitor
    with pytest.raises(UserError, match="is not empty"):
        main([*command, "--output", str(tmp_path / "knn")])
    main([*command, "--output", str(tmp_path / "knn"), "--overwrite", "--init", "mine"])
    assert read_record(tmp_path / "knn" / "run.json").init == "mine"


@pytest.mark.parametrize("stem", ["imagenet", "stride2"])
def test_command_takes_files_of_others(labeled, tmp_path, capsys, stem):
    torch.manual_seed(0)
    network = build_backbone(EncoderSpec("resnet10", stem, 0.125))
    randomize(network)
    torch.save(network.state_dict(), tmp_path / "theirs.pth")
    command = ["--checkpoint", str(tmp_path / "theirs.pth"), "--data", str(labeled)]
    command += ["--crop-px", "32", "--output", str(tmp_path / "knn")]
    if stem != "imagenet":
        with pytest.raises(UserError, match="--stem"):
            main(command)
        command += ["--stem", stem]
    main(command)
    record = read_record(tmp_path / "knn" / "run.json")
    assert (record.init, record.config["crop_px"], record.seed) == ("theirs", 32, 0)
    assert 0 <= record.metrics["knn/top1"] <= 100
