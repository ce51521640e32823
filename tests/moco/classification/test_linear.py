"""Linear classification: the mathematics by hand, the frozen network, and a run's habits."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from moco.classification.run import ClassifyRun, build_classifier, fingerprint, require_unchanged
from moco.classification.weights import read_weights
from moco.common.errors import DataError, LockedError, NumericError, Preempted, UserError
from moco.common.files import sha256_state
from moco.common.run import RunFolder, read_record
from moco.engine.checkpoint import (
    CLASSIFIER_FORMAT,
    list_checkpoints,
    load_backbone,
    load_checkpoint,
)
from moco.linear import LINEAR, main
from tests.moco.classification.classify_runs import (
    MEAN,
    STD,
    words,
    write_labeled,
    write_pretrained,
)
from tests.oracles.processes import run_on

COUNTS = {"train": (8, 8, 6), "val": (3, 2, 2)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_labeled(tmp_path_factory.mktemp("labeled"), COUNTS, noise=25)


@pytest.fixture(scope="module")
def hard_data(tmp_path_factory):
    """Classes that overlap, so that the loss stays away from 0."""
    return write_labeled(tmp_path_factory.mktemp("hard"), COUNTS, noise=200)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return write_pretrained(tmp_path_factory.mktemp("weights") / "moco.pth.tar")


@pytest.fixture(scope="module")
def straight(data, pretrained, tmp_path_factory):
    """Folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    main(words(folder, data, pretrained))
    return folder


def last_state(folder):
    path = list_checkpoints(folder)[-1]
    return load_checkpoint(path, CLASSIFIER_FORMAT)["state_dict"]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def test_training_is_softmax_regression_by_hand(hard_data, pretrained, tmp_path):
    """Without crops, the classifier and the accuracies follow from the features of the images.

    SGD with momentum in float64: v ← 0.9 v + g, w ← w - lr v; lr a tenth from the second epoch on.
    """
    whole = {"AUG__CROP_SCALE": "(1, 1)", "AUG__CROP_RATIO": "(1, 1)", "AUG__FLIP_PROB": 0}
    whole |= {"EVAL__RESIZE_PX": 16, "SOLVER__BASE_LR": 0.5, "SEED": 5}
    main(words(tmp_path / "run", hard_data, pretrained, **whole))

    backbone = load_backbone(load_checkpoint(pretrained))

    def features(split):
        files = sorted((hard_data / split).rglob("*.png"))
        pixels = np.stack([np.array(Image.open(file)) for file in files]) / 255
        x = torch.from_numpy((pixels - MEAN) / STD).permute(0, 3, 1, 2).float()
        names = sorted({file.parent.name for file in files})
        with torch.no_grad():
            h = backbone(x).double().numpy()
        return h, np.array([names.index(file.parent.name) for file in files])

    h, y = features("train")
    weights = read_weights(str(pretrained))
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
    assert record.weights_source == "moco-transfer/1" and len(record.weights_sha256) == 64
    assert record.metrics["linear/top1"] == 100
    assert record.iterations == 6 and record.config["AUG.MEAN"] == list(MEAN)
    before = load_checkpoint(pretrained)["state_dict"]
    after = last_state(straight)
    for name in after:
        if not name.startswith("module.fc."):
            old = before[name.replace("module.", "module.encoder_q.")]
            assert torch.equal(after[name], old), name
    lines = metrics(straight)
    assert [x["iteration"] for x in lines if "linear/top1" in x] == [2, 4, 6]
    assert [round(x["lr"], 6) for x in lines if "lr" in x] == [3, 3, 0.3, 0.3, 0.3, 0.3]
    assert (straight / "last_checkpoint").read_text() == "checkpoint_0002.pth.tar"


@pytest.mark.parametrize("name", ["conv1.weight", "bn1.running_var", "bn1.num_batches_tracked"])
def test_a_changed_network_is_found(data, pretrained, tmp_path, monkeypatch, name):
    """One unit in the last place of one value of one tensor, after the third step."""
    update, steps = ClassifyRun.update, iter(range(6))

    def tamper(run):
        update(run)
        if next(steps) == 2:
            tensor = run.model.state_dict()[name].view(-1)[:1]
            tensor += (
                1 if name.endswith("tracked") else torch.nextafter(tensor, tensor + 1) - tensor
            )

    monkeypatch.setattr(ClassifyRun, "update", tamper)
    with pytest.raises(AssertionError, match=rf"frozen network changed.*: {name}$"):
        main(words(tmp_path / "run", data, pretrained))
    # Nothing of the changed network was saved.
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint_0000.pth.tar"]


def test_the_sign_of_zero_and_nan_are_compared_as_bits(pretrained):
    model = build_classifier(read_weights(str(pretrained)), 3, LINEAR)
    model.bn1.running_mean.zero_()
    model.bn1.running_var[0] = torch.nan
    before = fingerprint(model)
    require_unchanged(model, before)
    model.fc.weight.data += 1
    require_unchanged(model, before)
    model.bn1.running_mean.neg_()
    with pytest.raises(AssertionError, match=r"bn1\.running_mean"):
        require_unchanged(model, before)


@pytest.mark.parametrize(("stop", "workers"), [(1, 0), (2, 2), (3, 0)])
def test_resumed_run_equals_the_straight_run(data, pretrained, straight, tmp_path, stop, workers):
    """To the last bit, stopped within an epoch and at its end, with other workers."""
    run = tmp_path / "run"
    more = {"DATA__NUM_WORKERS": workers}
    with pytest.raises(Preempted, match=rf"after step {stop} of 6 .*--resume"):
        main(words(run, data, pretrained, SOLVER__STOP_AT_ITERS=stop, **more))
    main([*words(run, data, pretrained, **more), "--resume"])
    assert sha256_state(last_state(run)) == sha256_state(last_state(straight))

    def numbers(folder):
        return [{k: v for k, v in x.items() if k != "images_per_second"} for x in metrics(folder)]

    assert numbers(run)[-3:] == numbers(straight)[-3:]
    assert read_record(run / "run.json").metrics == read_record(straight / "run.json").metrics


def test_stop_signal_saves_and_says_how_to_go_on(data, pretrained, tmp_path, monkeypatch):
    log = ClassifyRun.log

    def interrupted(run, values, lr, step):
        log(run, values, lr, step)
        if step == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ClassifyRun, "log", interrupted)
    with pytest.raises(Preempted, match=r"after step 2 of 6 .* run the same command with --resume"):
        main(words(tmp_path / "run", data, pretrained))
    assert Preempted.exit_code == 85
    assert not (tmp_path / "run" / "run.json").exists()


def test_two_processes_equal_one(data, pretrained, straight, tmp_path):
    """No BN statistics are made, so the gradients are the same numbers, averaged in two parts; the
    seven validation images are divided 4 and 3."""
    run_on(2, main, words(tmp_path / "run", data, pretrained), connect=False)
    mine, theirs = last_state(tmp_path / "run"), last_state(straight)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5)
    one, two = read_record(straight / "run.json"), read_record(tmp_path / "run" / "run.json")
    assert one.metrics == two.metrics and one.config_sha256 == two.config_sha256
    assert two.provenance["processes"] == 2
    with pytest.raises(UserError, match="trained with processes 2, not 1"):
        main([*words(tmp_path / "run", data, pretrained), "--resume"])


def test_a_loss_that_is_not_a_number_stops_the_run(data, pretrained, tmp_path):
    with pytest.raises(NumericError, match=r"loss is (nan|inf) at step .*SOLVER\.BASE_LR"):
        main(words(tmp_path / "run", data, pretrained, SOLVER__BASE_LR=1e38))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_image_that_cannot_be_decoded_is_named(pretrained, tmp_path, split, workers):
    data = write_labeled(tmp_path / "data", COUNTS, noise=25)
    bad = data / split / "red" / "01.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(DataError) as error:
        main(words(tmp_path / "run", data, pretrained, DATA__NUM_WORKERS=workers))
    assert str(error.value).startswith(str(bad)) and "\n" not in str(error.value)


def test_a_folder_in_use_or_used(data, pretrained, straight):
    with pytest.raises(UserError, match=r"is not empty .*--resume"):
        main(words(straight, data, pretrained))
    with RunFolder(straight, resume=True), pytest.raises(LockedError):
        main([*words(straight, data, pretrained), "--resume"])


def test_resuming_another_run_is_refused(data, pretrained, straight, tmp_path):
    with pytest.raises(UserError, match=r"SOLVER\.BASE_LR 3\.0, this run has 2\.0"):
        main([*words(straight, data, pretrained, SOLVER__BASE_LR=2), "--resume"])
    other = write_pretrained(tmp_path / "moco.pth.tar")
    state = torch.load(other, weights_only=True)
    state["state_dict"]["module.encoder_q.conv1.weight"] += 1
    torch.save(state, other)
    with pytest.raises(UserError, match="trained with weights_sha256"):
        main([*words(straight, data, other), "--resume"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["SOLVER.BASE_LRR", "3"], r"unknown key SOLVER\.BASE_LRR; the nearest is SOLVER\.BASE_LR"),
        (["MODEL.ARCH", "resnet18"], r"MODEL\.ARCH: got resnet18, but .* of resnet10"),
        (["-b", "32"], r"22 images are less than one batch of 32"),
        (["--epochs", "1"], r"MILESTONES_EPOCHS: 1 is never reached"),
        (["EVAL.RESIZE_PX", "8"], r"EVAL\.RESIZE_PX: got 8, expected at least the crop's 16"),
        (["AUG.STD", "(0.2, 0, 0.2)"], r"AUG\.STD"),
        (["DATA.ROOT", ""], r"DATA\.ROOT is not set"),
        (["SOLVER.PRECISION", "half"], r"choices are fp32, bf16, fp16"),
    ],
)
def test_keys_that_cannot_be_used(data, pretrained, tmp_path, extra, message):
    command = words(tmp_path / "run", data, pretrained)
    if extra[0] in command:
        at = command.index(extra[0])
        command[at : at + 2] = extra
    elif extra[0].startswith("-"):
        key = {"-b": "SOLVER.BATCH_SIZE", "--epochs": "SOLVER.MAX_EPOCHS"}[extra[0]]
        at = command.index(key)
        command[at : at + 2] = extra
    else:
        command += extra
    with pytest.raises(UserError, match=message):
        main(command)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_and_channels_last(data, pretrained, tmp_path, precision):
    more = {"SOLVER__PRECISION": precision, "SOLVER__CHANNELS_LAST": True}
    main(words(tmp_path / "run", data, pretrained, **more))
    assert read_record(tmp_path / "run" / "run.json").metrics["linear/top1"] == 100


def test_accuracy_is_not_rounded(data, pretrained, tmp_path):
    """Sevenths are no numbers of float32."""
    main(words(tmp_path / "run", data, pretrained, SOLVER__BASE_LR=0.0, SOLVER__MAX_EPOCHS=2))
    record = read_record(tmp_path / "run" / "run.json")
    assert record.metrics["linear/top1"] in [100 * right / 7 for right in range(1, 7)]
