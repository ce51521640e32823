"""Linear classification: softmax regression by hand, the frozen network, accuracy, crops."""

import numpy as np
import pytest
import torch
from PIL import Image

from convert.initial_weights import read_initial_weights
from moco.classification.config import load_classify_cfg, scale_to_batch
from moco.classification.run import Classification, build_classifier, fingerprint, require_unchanged
from moco.common.errors import DataError, UserError
from moco.common.run import read_record
from moco.engine.checkpoint import CLASSIFIER_FORMAT, list_checkpoints, load_checkpoint
from moco.linear import LINEAR
from moco.modeling.encoder import COUNTER, load_backbone
from tests.moco.classification.classify_runs import MEAN, STD, words, write_labeled
from tests.moco.commands import linear as main
from tests.oracles.processes import run_on
from tests.oracles.training import metrics, newest


@pytest.fixture(scope="module")
def hard_data(tmp_path_factory):
    """Classes that overlap, so that the loss stays away from 0."""
    return write_labeled(tmp_path_factory.mktemp("hard"), noise=200)


@pytest.fixture(scope="module")
def straight(labeled, pretrained, tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    main(words(folder, labeled, pretrained))
    return folder


def last_state(folder):
    return newest(folder, CLASSIFIER_FORMAT)["state_dict"]


def test_training_is_softmax_regression_by_hand(hard_data, pretrained, tmp_path):
    """Without crops, the classifier and the accuracies follow from the features of the images.

    SGD with momentum in float64: v ← 0.9 v + g, w ← w - lr v; lr a tenth from the second epoch on.
    """
    whole = {"AUG__CROP_SCALE": "(1, 1)", "AUG__CROP_RATIO": "(1, 1)", "AUG__FLIP_PROB": 0}
    whole |= {"EVAL__RESIZE_PX": 16, "SOLVER__BASE_LR": 0.5, "SEED": 5}
    main(words(tmp_path / "run", hard_data, pretrained, **whole))

    weights = read_initial_weights(str(pretrained))
    backbone = load_backbone(weights.spec, weights.state)

    def features(split):
        files = sorted((hard_data / split).rglob("*.png"))
        pixels = np.stack([np.array(Image.open(file)) for file in files]) / 255
        x = torch.from_numpy((pixels - MEAN) / STD).permute(0, 3, 1, 2).float()
        names = sorted({file.parent.name for file in files})
        with torch.no_grad():
            h = backbone(x).double().numpy()
        return h, np.array([names.index(file.parent.name) for file in files])

    h, y = features("train")
    torch.manual_seed(5)
    start = build_classifier(weights, 3, LINEAR).fc
    w, b = start.weight.detach().double().numpy(), start.bias.detach().double().numpy()
    assert abs(w).max() < 0.06 and not b.any()  # N(0, 0.01)
    v_w, v_b, losses = np.zeros_like(w), np.zeros_like(b), []
    for epoch in range(3):
        lr = 0.5 if epoch < 1 else 0.05
        order = np.random.default_rng([5, epoch]).permutation(22)
        for step in range(2):
            rows = order[8 * step : 8 * step + 8]
            logits = h[rows] @ w.T + b
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            losses.append(-np.log(p[range(8), y[rows]]).mean())
            g = (p - np.eye(3)[y[rows]]) / 8
            v_w, v_b = 0.9 * v_w + g.T @ h[rows], 0.9 * v_b + g.sum(axis=0)
            w, b = w - lr * v_w, b - lr * v_b
    state = last_state(tmp_path / "run")
    np.testing.assert_allclose(state["module.fc.weight"], w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["module.fc.bias"], b, rtol=1e-4, atol=1e-5)
    lines = metrics(tmp_path / "run")
    np.testing.assert_allclose([x["loss"] for x in lines if "loss" in x], losses, rtol=1e-4)
    h, y = features("val")
    expected = 100 * ((h @ w.T + b).argmax(axis=1) == y).mean()
    assert 0 < expected < 100
    assert read_record(tmp_path / "run" / "run.json").metrics == {
        "linear/top1": pytest.approx(expected),
        "linear/top5": 100.0,  # of three classes
    }


def test_a_run_separates_colors_and_leaves_the_network_as_it_was(straight, pretrained):
    record = read_record(straight / "run.json")
    assert (record.kind, record.status, record.init) == ("linear", "done", "moco")
    assert record.task == "linear_resnet10w0.125_stride2"
    assert record.weights_source == "moco-transfer" and len(record.weights_sha256) == 64
    assert record.metrics["linear/top1"] == 100
    assert record.iterations == 6 and record.config["AUG.MEAN"] == list(MEAN)
    before = load_checkpoint(pretrained)["state_dict"]
    after = last_state(straight)
    for name in after:
        if not name.startswith("module.fc.") and not name.endswith(COUNTER):
            old = before[name.replace("module.", "module.encoder_q.")]
            assert torch.equal(after[name], old), name
    lines = metrics(straight)
    assert [x["iteration"] for x in lines if "linear/top1" in x] == [2, 4, 6]
    assert [round(x["lr"], 6) for x in lines if "lr" in x] == [3, 3, 0.3, 0.3, 0.3, 0.3]
    assert (straight / "last_checkpoint").read_text() == "checkpoint_0002.pth.tar"


def test_the_start_is_determined_by_the_seed(straight, labeled, pretrained, tmp_path):
    """The first batch is the same with other weights, and differs with another seed."""
    start = read_record(straight / "run.json").start
    assert len(start["batches"]) == 1
    arguments = words(tmp_path / "seed", labeled, pretrained, SEED=7)
    main(arguments)
    other = read_record(tmp_path / "seed" / "run.json").start
    assert other["batches"] != start["batches"]
    main(words(tmp_path / "random", labeled, "random"))
    random = read_record(tmp_path / "random" / "run.json").start
    assert start == random


@pytest.mark.parametrize("name", ["conv1.weight", "bn1.running_var", "bn1.num_batches_tracked"])
def test_a_changed_network_is_found(labeled, pretrained, tmp_path, monkeypatch, name):
    """One unit in the last place of one value of one tensor, after the third step."""
    update, steps = Classification.update, iter(range(6))

    def tamper(run, step):
        update(run, step)
        if next(steps) == 2:
            tensor = run.model.state_dict()[name].view(-1)[:1]
            counter = name.endswith("tracked")
            tensor.copy_(tensor + 1 if counter else torch.nextafter(tensor, tensor + 1))

    monkeypatch.setattr(Classification, "update", tamper)
    with pytest.raises(AssertionError, match=rf"frozen network changed.*: {name}$"):
        main(words(tmp_path / "run", labeled, pretrained))
    # The changed network is not saved.
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint_0000.pth.tar"]


def test_the_sign_of_zero_and_nan_are_compared_as_bits(pretrained):
    model = build_classifier(read_initial_weights(str(pretrained)), 3, LINEAR)
    model.bn1.running_mean.zero_()
    model.bn1.running_var[0] = torch.nan
    before = fingerprint(model)
    require_unchanged(model, before)
    model.fc.weight.data += 1
    require_unchanged(model, before)
    model.bn1.running_mean.neg_()
    with pytest.raises(AssertionError, match=r"bn1\.running_mean"):
        require_unchanged(model, before)


@pytest.mark.slow
def test_two_processes_equal_one(labeled, pretrained, straight, tmp_path):
    """BN is frozen, so gradients agree. The seven validation images are divided into 4 and 3."""
    run_on(2, main, words(tmp_path / "run", labeled, pretrained), connect=False)
    mine, theirs = last_state(tmp_path / "run"), last_state(straight)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5)
    one, two = read_record(straight / "run.json"), read_record(tmp_path / "run" / "run.json")
    assert one.metrics == two.metrics and one.config_sha256 == two.config_sha256
    assert two.provenance["processes"] == 2
    with pytest.raises(UserError, match="by 2 processes, this run has 1"):
        main([*words(tmp_path / "run", labeled, pretrained), "--resume"])


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_decoded_is_named(pretrained, tmp_path, split, workers):
    data = write_labeled(tmp_path / "data")
    bad = data / split / "red" / "01.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(DataError) as error:
        main(words(tmp_path / "run", data, pretrained, DATA__NUM_WORKERS=workers))
    assert str(error.value).startswith(str(bad)) and "\n" not in str(error.value)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_channels_last(labeled, pretrained, tmp_path, precision):
    more = {"SOLVER__PRECISION": precision, "SOLVER__CHANNELS_LAST": True}
    main(words(tmp_path / "run", labeled, pretrained, **more))
    assert read_record(tmp_path / "run" / "run.json").metrics["linear/top1"] == 100


def test_accuracy_is_not_rounded(labeled, pretrained, tmp_path):
    """Sevenths cannot be represented in float32."""
    main(words(tmp_path / "run", labeled, pretrained, SOLVER__BASE_LR=0.0, SOLVER__MAX_EPOCHS=2))
    record = read_record(tmp_path / "run" / "run.json")
    assert record.metrics["linear/top1"] in [100 * hits / 7 for hits in range(1, 7)]


@pytest.mark.parametrize(("config", "side"), [({"AUG.CROP_PX": 16}, 16), ({}, 224)])
def test_crops_are_those_of_the_pretraining(pretrained, tmp_path, config, side, capsys):
    """The crop size is that of kNN, or 224 px if the weights do not record it."""
    data = write_labeled(tmp_path / "data")
    (data / "train" / "red" / "more.heic").write_bytes(b"other")
    content = torch.load(pretrained, weights_only=False)
    torch.save({**content, "config": config}, tmp_path / "w.pth.tar")
    keys = {"AUG__CROP_PX": 0, "SOLVER__MAX_EPOCHS": 1, "SOLVER__MILESTONES_EPOCHS": "()"}
    main(words(tmp_path / "run", data, tmp_path / "w.pth.tar", **keys))
    record = read_record(tmp_path / "run" / "run.json")
    assert record.config["AUG.CROP_PX"] == side
    assert f"{data}/train: left out by suffix: 1 file (.heic 1)" in record.notes
    assert f"crops of {side} px" in capsys.readouterr().out


def test_durations_in_steps_follow_the_batch():
    keys = {"SOLVER.BATCH_SIZE": 64, "SOLVER.REFERENCE_BATCH_SIZE": 256}
    keys |= {"SOLVER.WARMUP_ITERS": 100, "SOLVER.DECAY_EVERY_ITERS": 50}
    opts = [str(word) for pair in keys.items() for word in pair]
    solver = scale_to_batch(load_classify_cfg(LINEAR.defaults, None, opts), random=False)
    assert (solver.BASE_LR, solver.WARMUP_ITERS, solver.DECAY_EVERY_ITERS) == (7.5, 400, 200)
