"""kNN classification: votes, the monitor of a pre-training, and the command."""

import shutil

import numpy as np
import pytest
import torch

from moco.common.run import read_record
from moco.data.images import read_labeled_sets
from moco.engine.checkpoint import list_checkpoints
from moco.engine.evaluation import CenterCrop
from moco.engine.knn import evaluate, extract_features, knn_predict
from moco.modeling.encoder import EncoderSpec, build_backbone
from tests.moco.classification.classify_runs import write_labeled
from tests.moco.commands import knn as main
from tests.moco.commands import pretrain
from tests.oracles.processes import run_on
from tests.oracles.resnets import randomize
from tests.oracles.training import metrics

HOW = CenterCrop(16, 16, (0.5,) * 3, (0.25,) * 3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """Write noise around three colors; `val` lacks one class, so the labels of the two differ."""
    root = tmp_path_factory.mktemp("labeled")
    return write_labeled(root, {"train": (6, 6, 6), "val": (0, 6, 6)})


def test_votes_are_weighted_as_in_instdisc():
    """Each of the k nearest images votes with weight exp(s / t), written out in NumPy."""
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
    tensors = torch.tensor(train).float(), torch.tensor(labels), torch.tensor(queries).float()
    assert knn_predict(*tensors, k, t, classes).tolist() == expected
    assert knn_predict(*tensors, k, 1e9, classes).tolist() != expected  # not weighted


def test_colors_are_classified(labeled):
    backbone = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    result = evaluate(backbone, read_labeled_sets(labeled), HOW, 3, 0.1, CPU)
    assert result.top1 == 100
    assert (result.num_train, result.num_val, result.num_classes) == (18, 12, 3)
    assert "kNN top-1 100.0% (k=3, t=0.1; 18 train" in str(result)
    most = evaluate(backbone, read_labeled_sets(labeled), HOW, 200, 0.1, CPU).k
    assert most == 18  # all training images
    sizes = {(0, 0, 224): (256, 224), (32, 0, 224): (37, 32), (0, 32, 32): (32, 32)}
    for settings, expected in sizes.items():
        assert CenterCrop.sized(*settings, (0.0,) * 3, (1.0,) * 3)[:2] == expected


def features_and_result(root):
    backbone = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    rows = extract_features(backbone, read_labeled_sets(root).train, HOW, CPU, workers=0, batch=4)
    return rows, evaluate(backbone, read_labeled_sets(root), HOW, 3, 0.1, CPU, batch=4)


@pytest.mark.slow
def test_processes_share_the_images_and_all_get_the_result(labeled, tmp_path):
    """17 and 11 images on 2 processes: the same rows in the same order as on one."""
    root = tmp_path / "odd"
    shutil.copytree(labeled, root)
    for name in ("train/blue/05.png", "val/red/05.png"):
        (root / name).unlink()
    alone, result = features_and_result(root)
    assert (len(alone), result.num_train, result.num_val) == (17, 17, 11)
    for rows, same in run_on(2, features_and_result, root):
        torch.testing.assert_close(rows, alone)
        assert same == result


def test_monitor_and_command_agree(labeled, images, tiny, tmp_path, capsys):
    data = {"DATA__ROOT": images, "DATA__KNN_ROOT": labeled}
    # The crop's own size, not 256/224 of it.
    knn = {"KNN__EVERY_EPOCHS": 1, "KNN__K": 5, "KNN__RESIZE_PX": 16}
    pretrain(tiny(OUTPUT_DIR=tmp_path / "run", SOLVER__MAX_ITERS=7, **data, **knn))
    lines = metrics(tmp_path / "run")
    measured = {line["iteration"]: line["knn/top1"] for line in lines if "knn/top1" in line}
    assert list(measured) == [3, 6, 7]
    assert read_record(tmp_path / "run/run.json").metrics["knn/top1"] == measured[7]
    checkpoint = list_checkpoints(tmp_path / "run")[-1]
    command = ["--checkpoint", str(checkpoint), "--data", str(labeled), "--k", "5"]
    capsys.readouterr()
    main([*command, "--output", str(tmp_path / "knn")])
    assert f"kNN top-1 {measured[7]:.1f}% (k=5, t=0.1; 18 train, 12 val" in capsys.readouterr().out
    record = read_record(tmp_path / "knn" / "run.json")
    assert (record.kind, record.task) == ("knn", "knn_resnet10w0.125_stride2")
    assert (record.init, record.seed) == (f"run_{checkpoint.name.removesuffix('.pth.tar')}", 0)
    assert record.metrics == {"knn/top1": measured[7]}
    assert record.config["k"] == 5 and record.config["num_val"] == 12
    assert record.config["resize_px"] == record.config["crop_px"] == 16  # as for the monitor
    main([*command, "--output", str(tmp_path / "knn"), "--overwrite", "--init", "mine"])
    assert read_record(tmp_path / "knn" / "run.json").init == "mine"


@pytest.mark.parametrize("stem", ["imagenet", "stride2"])
def test_the_command_reads_files_of_other_projects(labeled, tmp_path, capsys, monkeypatch, stem):
    torch.manual_seed(0)
    network = build_backbone(EncoderSpec("resnet10", stem, 0.125))
    randomize(network)
    torch.save(network.state_dict(), tmp_path / "theirs.pth")
    command = ["--checkpoint", str(tmp_path / "theirs.pth"), "--data", str(labeled)]
    command += ["--crop-px", "32", "--output", str(tmp_path / "knn")]
    if stem != "imagenet":
        command += ["--stem", stem]
    main(command)
    record = read_record(tmp_path / "knn" / "run.json")
    assert (record.init, record.config["crop_px"], record.seed) == ("theirs", 32, 0)
    assert 0 <= record.metrics["knn/top1"] <= 100
    if stem == "stride2":
        assert "set --mean and --std" in capsys.readouterr().out
    pixels = ["--mean", "127.5", "102", "51", "--std", "51", "127.5", "127.5"]
    seen = []

    def spy(backbone, data, crop, *more):
        seen.append((crop.mean, crop.std))
        return evaluate(backbone, data, crop, *more)

    monkeypatch.setattr("moco.engine.knn.evaluate", spy)
    (labeled / "val/red/1.heic").write_bytes(b"left out")
    main([*command, "--overwrite", *pixels])
    (labeled / "val/red/1.heic").unlink()
    assert seen == [((0.5, 0.4, 0.2), (0.2, 0.5, 0.5))]
    out = capsys.readouterr().out
    assert "set --mean" not in out
    assert "note: " in out and "left out by suffix: 1 file (.heic 1)" in out
    again = read_record(tmp_path / "knn" / "run.json")
    assert again.config_sha256 == record.config_sha256  # pixels are not part of the protocol
    assert "pixels: mean (0.5, 0.4, 0.2), std (0.2, 0.5, 0.5), as requested" in again.notes


@pytest.mark.parametrize("t", [0.01, 0.001])
def test_a_small_temperature_does_not_overflow(t):
    """Regression: exp(1 / t) overflows float32 for t <= 0.0113, and class 0 won every vote."""
    train = torch.nn.functional.normalize(1 + torch.eye(8), dim=1)  # all are similar
    labels = torch.arange(8) % 4
    assert knn_predict(train, labels, train, 8, t, 4).tolist() == labels.tolist()
