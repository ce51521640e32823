"""Pre-training from a file: the tensors that are loaded, and what is recorded of them."""

import pytest
import torch
from torchvision.models import resnet18

from moco.common.files import sha256_file
from moco.common.run import read_record
from moco.engine.checkpoint import list_checkpoints
from tests.moco.commands import pretrain as main
from tests.oracles.resnets import randomize
from tests.oracles.training import newest

# One step that moves no parameter of the query encoder: what was loaded is still there.
STILL = {"SOLVER__BASE_LR": 0.0, "SOLVER__MAX_ITERS": 1}
R18 = {"MODEL__ARCH": "resnet18", "MODEL__STEM": "imagenet", "MODEL__WIDTH": 1.0}


@pytest.fixture
def earlier(opts, tmp_path):
    """Run a short pre-training; return its checkpoint and tensors."""
    main(opts("earlier", SEED=5, SOLVER__MAX_ITERS=3))
    return list_checkpoints(tmp_path / "earlier")[-1], newest(tmp_path / "earlier")["state_dict"]


@pytest.fixture
def official(earlier, tmp_path):
    """Write the tensors of `earlier` as facebookresearch/moco's main_moco.py does."""
    path = tmp_path / "official.pth.tar"
    content = {"epoch": 1, "arch": "resnet10", "state_dict": earlier[1], "optimizer": {}}
    torch.save(content, path)
    return path, earlier[1]


def parameters(state, encoder):
    start = f"module.{encoder}."
    moving = ("running_mean", "running_var", "num_batches_tracked")
    return {
        name.removeprefix(start): value
        for name, value in state.items()
        if name.startswith(start) and not name.endswith(moving)
    }


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("source", ["earlier", "official"])
def test_a_moco_checkpoint_brings_queue_and_key_encoder(source, request, opts, tmp_path, capsys):
    path, tensors = request.getfixturevalue(source)
    main(opts(MODEL__WEIGHTS=path, MOCO__M=0.0, **STILL))
    state = newest(tmp_path / "run")["state_dict"]
    assert_equal(parameters(state, "encoder_q"), parameters(tensors, "encoder_q"))
    # The step replaced 8 of the 20 keys, from where the pointer was.
    start = int(tensors["module.queue_ptr"])
    replaced = [(start + i) % 20 for i in range(8)]
    stayed = [i for i in range(20) if i not in replaced]
    assert torch.equal(state["module.queue"][:, stayed], tensors["module.queue"][:, stayed])
    assert not torch.equal(state["module.queue"][:, replaced], tensors["module.queue"][:, replaced])
    record = read_record(tmp_path / "run/run.json")
    assert (record.weights_sha256, record.init) != (None, "random")
    assert record.weights_sha256 == sha256_file(path)
    assert "moco" in record.weights_source
    assert record.coverage["left_at_init"] == []
    assert record.config["MODEL.WEIGHTS"] == str(path)


def test_the_key_encoder_is_the_files_own(earlier, opts, tmp_path):
    path, tensors = earlier
    first = [tensors[f"module.encoder_{e}.conv1.weight"] for e in "qk"]
    assert not torch.equal(*first)
    main(opts(MODEL__WEIGHTS=path, MOCO__M=0.5, **STILL))
    state = newest(tmp_path / "run")["state_dict"]
    for name, key in parameters(state, "encoder_k").items():
        mean = (tensors[f"module.encoder_k.{name}"] + tensors[f"module.encoder_q.{name}"]) / 2
        torch.testing.assert_close(key, mean, rtol=1e-6, atol=1e-7)


def test_any_backbone_that_the_converter_knows(opts, tmp_path, capsys):
    torch.manual_seed(1)
    network = resnet18()
    randomize(network)  # an untrained network is refused
    tensors = network.state_dict()
    torch.save(tensors, tmp_path / "tv.pth")
    main(opts(MODEL__WEIGHTS=tmp_path / "tv.pth", **R18, **STILL, AUG__CROP_PX=32))
    state = newest(tmp_path / "run")["state_dict"]
    for encoder in ("encoder_q", "encoder_k"):
        mine = {n: p for n, p in parameters(state, encoder).items() if not n.startswith("fc.")}
        for name, value in mine.items():
            assert torch.equal(value, tensors[name]), name
    # A key encoder without weights of its own is a copy, head and all.
    assert_equal(parameters(state, "encoder_k"), parameters(state, "encoder_q"))
    record = read_record(tmp_path / "run/run.json")
    at_init = ["encoder_q.fc.bias", "encoder_q.fc.weight", "queue", "queue_ptr"]
    assert record.coverage["left_at_init"] == at_init
    assert record.init == "tv"
    (note,) = [note for note in record.notes if "not loaded from the file" in note]
    assert f"note: {note}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, taken",
    [
        ({"MOCO__K": 24}, {"encoder_q.fc", "encoder_k"}),
        ({"MOCO__DIM": 8}, set()),
        ({"MOCO__MLP": True}, set()),
        ({"MOCO__MECHANISM": "end_to_end", "MOCO__K": 8}, {"encoder_q.fc"}),
        ({"MOCO__MECHANISM": "memory_bank"}, {"encoder_q.fc"}),
    ],
)
def test_parts_that_do_not_fit_start_from_scratch(changes, taken, earlier, opts, tmp_path):
    path, tensors = earlier
    main(opts(MODEL__WEIGHTS=path, **{**STILL, **changes}))
    record = read_record(tmp_path / "run/run.json")
    at_init = record.coverage["left_at_init"]
    assert ("encoder_q.fc" in taken) == (
        not any(name.startswith("encoder_q.fc") for name in at_init)
    )
    notes = " ".join(note for note in record.notes if "not loaded from the file" in note)
    assert ("key encoder" in notes) == (
        "encoder_k" not in taken and "MECHANISM" not in str(changes)
    )
    state = newest(tmp_path / "run")["state_dict"]
    name = "module.encoder_q.conv1.weight"
    assert torch.equal(state[name], tensors[name])


def test_random_weights_are_those_of_no_file(opts, tmp_path):
    for name, keys in (("named", {"MODEL__WEIGHTS": "random"}), ("none", {})):
        main(opts(name, **STILL, **keys))
    assert_equal(newest(tmp_path / "named")["state_dict"], newest(tmp_path / "none")["state_dict"])
    record = read_record(tmp_path / "named" / "run.json")
    assert (record.init, record.weights_sha256) == ("random", None)


def test_the_protocols_hash_is_that_of_a_run_from_scratch(earlier, opts, tmp_path):
    """The hash does not depend on the weights, in detection neither."""
    main(opts(MODEL__WEIGHTS=earlier[0], SOLVER__MAX_ITERS=3))
    records = [read_record(tmp_path / name / "run.json") for name in ("run", "earlier")]
    assert records[0].config_sha256 == records[1].config_sha256
