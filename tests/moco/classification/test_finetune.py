"""Fine-tuning: comparison with a loop by hand in one and two processes, learning rates, recipes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from convert.initial_weights import read_initial_weights
from moco.classification.config import default_cfg, load_classify_cfg, scale_to_batch
from moco.classification.run import build_classifier, crop_and_flip
from moco.common.cfgnode import load_cfg
from moco.common.run import read_record
from moco.data.augment import apply_colors
from moco.data.images import read_labeled_sets
from moco.data.views import Views
from moco.engine.checkpoint import CLASSIFIER_FORMAT, list_checkpoints
from moco.finetune import FINETUNE
from moco.linear import LINEAR
from moco.modeling.encoder import COUNTER
from moco.modeling.grouped_bn import GroupedBatchNorm2d
from tests.moco.classification.classify_runs import MEAN, SPEC, STD, TINY, words
from tests.moco.commands import finetune as main
from tests.oracles.processes import run_on
from tests.oracles.training import newest

SLOW = {"SOLVER__BASE_LR": 0.05, "SEED": 4}


@pytest.fixture(scope="module")
def straight(labeled, pretrained, tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    main(words(folder, labeled, pretrained, **SLOW))
    return folder


@pytest.fixture(scope="module")
def on_two(labeled, pretrained, tmp_path_factory):
    """Return the folder of a run of two processes."""
    folder = tmp_path_factory.mktemp("two") / "run"
    run_on(2, main, words(folder, labeled, pretrained, **SLOW), connect=False)
    return folder


def last_state(folder):
    return newest(folder, CLASSIFIER_FORMAT)["state_dict"]


def by_hand(labeled, pretrained, groups):
    """Train 6 steps by SGD with momentum 0.9 and weight decay 1e-4 on all parameters.

    BN normalizes each of `groups` parts of a batch by itself, as processes do.
    """
    keys = [str(word) for pair in TINY.items() for word in pair]
    cfg = load_cfg(default_cfg(FINETUNE.defaults), None, keys)
    sets = read_labeled_sets(labeled)
    weights = read_initial_weights(str(pretrained))
    torch.manual_seed(4)
    model = build_classifier(weights, 3, FINETUNE)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.BatchNorm2d) and groups > 1:
                grouped = GroupedBatchNorm2d(child.num_features, num_groups=groups)
                grouped.load_state_dict(child.state_dict())
                setattr(parent, name, grouped)
    model.train()
    views = Views(sets.train, crop_and_flip(cfg), 4)
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(6):
        epoch, within = divmod(step, 2)
        lr = 0.05 if epoch < 1 else 0.005
        order = np.random.default_rng([4, epoch]).permutation(22)
        rows = order[8 * within : 8 * within + 8].tolist()
        batch = views.__getitems__([(epoch, index, 0) for index in rows])
        x = apply_colors(batch.pixels, batch.params, crop_and_flip(cfg), MEAN, STD)
        loss = F.cross_entropy(model(x), torch.tensor(sets.train_labels)[rows])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                momentum[name].mul_(0.9).add_(p.grad + 1e-4 * p)
                p -= lr * momentum[name]
    return model.state_dict()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_is_sgd_by_hand(labeled, pretrained, request, processes):
    """Two processes average gradients and running statistics, and normalize their own images."""
    fixture = request.getfixturevalue("straight" if processes == 1 else "on_two")
    state = last_state(fixture)
    # Of two, with AVX2's kernels weights before layer4 differed by up to 6e-4, as where rounding
    # flips a ReLU; after BN over other images each tensor does by more than 2e-3.
    atol = 2e-5 if processes == 1 else 1e-3
    for name, expected in by_hand(labeled, pretrained, processes).items():
        got = state[f"module.{name}"]
        torch.testing.assert_close(
            got, expected, rtol=2e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_random_has_its_own_learning_rate(labeled, tmp_path, capsys):
    main(words(tmp_path / "run", labeled, "random"))
    assert "init random (random weights)" in (out := capsys.readouterr().out)
    assert "learning rate 0.1" in out
    record = read_record(tmp_path / "run" / "run.json")
    assert (record.init, record.weights_sha256, record.weights_source) == ("random", None, None)
    assert (record.kind, record.task) == ("finetune", "finetune_resnet10w0.125_stride2")


def test_rows_of_a_table_have_one_protocol(labeled, pretrained, straight, tmp_path):
    """The hash does not depend on seed, weights and their mean and std, but on all other keys."""
    main(words(tmp_path / "run", labeled, "random", SEED=9, SOLVER__BASE_LR=0.05))
    mine = read_record(tmp_path / "run" / "run.json")
    theirs = read_record(straight / "run.json")
    assert mine.config["AUG.MEAN"] != theirs.config["AUG.MEAN"]
    assert mine.config_sha256 == theirs.config_sha256
    main(words(tmp_path / "other", labeled, "random", SOLVER__BASE_LR=0.05, AUG__FLIP_PROB=0.4))
    assert read_record(tmp_path / "other" / "run.json").config_sha256 != mine.config_sha256


def test_fine_tuning_starts_from_a_classifier(labeled, straight, tmp_path):
    """An example is a network trained on ImageNet from scratch, fine-tuned on iNaturalist."""
    path = list_checkpoints(straight)[-1]
    weights = read_initial_weights(str(path))
    assert (weights.spec, weights.mean) == (SPEC, MEAN)
    assert weights.init == "run_checkpoint_0002"
    state = last_state(straight)
    for name, value in weights.state.items():
        assert name.endswith(COUNTER) or torch.equal(value, state[f"module.{name}"]), name
    main(words(tmp_path / "run", labeled, path, SOLVER__MAX_EPOCHS=2))


@pytest.mark.parametrize(
    ("file", "protocol", "lr", "random_lr", "milestones"),
    [
        ("imagenet/linear.yaml", LINEAR, 30.0, 30.0, (60, 80)),  # sec. 4.1
        ("imagenet/finetune.yaml", FINETUNE, 0.03, 0.1, (30, 60, 90)),  # appendix
        ("inaturalist/finetune_2018.yaml", FINETUNE, 0.025, 0.1, (70, 90)),  # appendix
    ],
)
def test_recipes_hold_the_papers_settings(request, file, protocol, lr, random_lr, milestones):
    path = request.config.rootpath / "configs" / file
    cfg = load_classify_cfg(protocol.defaults, path, [])
    assert scale_to_batch(cfg, random=False).BASE_LR == lr
    assert scale_to_batch(cfg, random=True).BASE_LR == random_lr
    assert (cfg.SOLVER.MAX_EPOCHS, tuple(cfg.SOLVER.MILESTONES_EPOCHS)) == (100, milestones)
    assert cfg.SOLVER.WEIGHT_DECAY == (0.0 if protocol.frozen else 1e-4)
    assert cfg.SOLVER.BATCH_SIZE == 256
    half = load_classify_cfg(protocol.defaults, path, ["SOLVER.BATCH_SIZE", "128"])
    assert scale_to_batch(half, random=False).BASE_LR == lr / 2  # linear scaling
    assert cfg.TASK == f"{path.parent.name}{'_2018' * ('2018' in path.stem)}_{protocol.kind}"


@pytest.mark.slow
def test_notes_on_processes_and_a_scaled_rate(on_two, labeled, pretrained, tmp_path, capsys):
    notes = read_record(on_two / "run.json").notes
    assert "batch 8: 2 processes x 4; BN over 4 images each" in notes
    scaled = {"SOLVER__REFERENCE_BATCH_SIZE": 16, "SOLVER__MAX_EPOCHS": 2}
    main(words(tmp_path / "run", labeled, pretrained, **SLOW | scaled))
    note = read_record(tmp_path / "run" / "run.json").notes[-1]
    assert note.startswith(
        "batch 8: 1 process x 8; BN over 8 images each; learning rate 0.025 instead of 0.05"
    )
    assert f"note: {note}" in capsys.readouterr().out
    assert not any("learning rate" in note for note in notes)
