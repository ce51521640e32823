"""Command line of train_net.py: choice of the engine, output folder, run record."""

import json
import shutil
import sys

import pytest
import torch

from detection.engine import launch
from detection.engine.job import set_iterations
from detection.train_net import build_parser, choose_engine, main, parse_args
from moco.common.errors import DataError, NumericError, Preempted, UserError
from moco.common.run import read_record


@pytest.fixture
def argv(small_config, small_options, tmp_path):
    """Arguments for a run of the small task with random weights, into tmp_path/run."""

    def call(*opts: object, flags: tuple[str, ...] = (), engine: str = "embedded") -> list[str]:
        options = [*small_options, "MODEL.WEIGHTS", "random", "DATALOADER.NUM_WORKERS", "0"]
        command = ["--config-file", small_config, "--engine", engine, *flags, *options]
        return [*command, "OUTPUT_DIR", str(tmp_path / "run"), *map(str, opts)]

    return call


@pytest.mark.detectron2
def test_the_flags_are_detectron2s(detectron2):
    """All flags of its default_argument_parser exist, with equal defaults."""
    from detectron2.engine import default_argument_parser

    theirs = {o for a in default_argument_parser()._actions for o in a.option_strings}
    ours = {o for a in build_parser()._actions for o in a.option_strings}
    assert theirs <= ours
    own = {"--engine", "--overwrite", "--debug", "--check-only", "--visualize", "--import"}
    assert ours - theirs == own
    args = parse_args(["--eval-only", "MODEL.WEIGHTS", "a.pth"])
    assert (args.num_gpus, args.num_machines, args.machine_rank) == (1, 1, 0)
    assert args.opts == ["MODEL.WEIGHTS", "a.pth"]


def test_flags_and_pairs_in_any_order():
    arguments = ["SEED", "-1", "--config-file", "a.yaml", "OUTPUT_DIR=out", "DATASETS.VOC_DIR", ""]
    arguments += ["--resume"]
    arguments += ["MODEL.RPN.BOUNDARY_THRESH", "-1e-3", "--num-gpus", "2", "SOLVER.STEPS", "(1,)"]
    args = parse_args(arguments)
    assert (args.config_file, args.resume, args.num_gpus) == ("a.yaml", True, 2)
    pairs = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
    assert pairs == {
        **{"SEED": "-1", "OUTPUT_DIR": "out", "DATASETS.VOC_DIR": ""},
        **{"MODEL.RPN.BOUNDARY_THRESH": "-1e-3", "SOLVER.STEPS": "(1,)"},
    }


@pytest.mark.detectron2
def test_the_engine_is_detectron2_where_it_can_be_imported(detectron2):
    engine, reason = choose_engine("auto")
    assert engine == "detectron2"
    assert "can be imported" in reason
    assert choose_engine("embedded") == ("embedded", "requested")


def test_the_engine_without_detectron2(monkeypatch):
    monkeypatch.setitem(sys.modules, "detection.d2", None)
    engine, reason = choose_engine("auto")
    assert engine == "embedded"
    assert "Detectron2 cannot be imported" in reason


@pytest.mark.slow
def test_a_run_writes_its_record_last_and_says_what_next(argv, tmp_path, capsys):
    assert main(argv()) == 0
    folder = tmp_path / "run"
    record = read_record(folder / "run.json")
    assert (record.kind, record.status, record.engine) == ("detection", "done", "embedded")
    assert (record.init, record.weights_sha256, record.weights_source) == ("random", None, None)
    assert (record.seed, record.iterations, record.coverage) == (7, 3, None)
    assert record.config["DATASETS.VOC_CLASSES"] == ["blue", "green", "red"]
    assert record.seconds > 0
    assert set(record.metrics) >= {"bbox/AP", "bbox/AP50", "bbox/AP75", "bbox/AP-red"}
    newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest.name == "run.json"
    out = capsys.readouterr().out
    assert out.splitlines()[1] == "engine: embedded (requested)"
    assert "init random, seed 7, on cpu" in out
    assert "3 classes: blue, green, red" in out
    assert "shapes_test: AP " in out
    assert f"wrote {folder}: run.json, model_final.pth, metrics.json, log.txt, config.yaml" in out
    assert out.endswith(f"next: python -m benchmarks table {folder}\n")


def test_tasks_have_names(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = argv(flags=("--check-only",))
    words[words.index("--config-file") + 1] = "faster_rcnn_R_18_C4_small"
    assert main(words) == 0
    assert "voc/faster_rcnn_R_18_C4_small.yaml" in capsys.readouterr().out


def test_files_are_read_anew_by_each_run_of_a_process(argv, voc_folder, tmp_path, capsys):
    folder = shutil.copytree(voc_folder, tmp_path / "shapes")
    words = argv("DATASETS.VOC_DIR", folder, flags=("--check-only",))
    assert main(words) == 0 and "shapes_trainval (6 images)" in capsys.readouterr().out
    split = folder / "ImageSets/Main/trainval.txt"
    split.write_text("".join(split.read_text().splitlines(keepends=True)[1:]))
    assert main(words) == 0 and "shapes_trainval (5 images)" in capsys.readouterr().out


def test_overwriting_leaves_nothing_to_resume(argv, tmp_path, monkeypatch):
    """An overwritten run cannot be resumed, and results of other commands on it are removed."""
    folder = tmp_path / "run"
    made = ("error_types.json", "robustness.json", "inference/matches.npz", "corrupted/fog.3/x")
    made += ("model_0000001.pth", "model_final.pth")  # a damaged one must not lead back to them
    for name in ("last_checkpoint", "log.txt", "run.json", *made):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("model_0000001.pth")

    def fails(*_: object) -> None:
        raise NumericError("at once")

    monkeypatch.setattr(launch, "run", fails)
    with pytest.raises(NumericError):
        main(argv(flags=("--overwrite",)))
    assert not (folder / "last_checkpoint").exists()
    assert not any((folder / name).exists() for name in made)
    assert "model_0000001" not in (folder / "log.txt").read_text()
    assert read_record(folder / "run.json").status == "failed"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_weights(argv, r18_file, tmp_path, monkeypatch):
    """The record has to name the weights that the run started from."""

    def stopped(*_: object) -> None:
        raise Preempted("stopped by SIGTERM")

    def start(*opts: object, flags: tuple[str, ...] = ("--resume",)) -> None:
        with pytest.raises(Preempted):
            main(argv("MODEL.WEIGHTS", *opts, flags=flags))

    monkeypatch.setattr(launch, "run", stopped)
    folder, copy, other = tmp_path / "run", tmp_path / "copy.pth", tmp_path / "other.pth"
    shutil.copy(r18_file, copy)
    start("random", flags=())
    with pytest.raises(UserError, match=r"run was started from random, but .*r18.pth \(sha256"):
        main(argv("MODEL.WEIGHTS", r18_file, flags=("--resume",)))
    start(r18_file, flags=("--overwrite",))
    start(copy)
    with pytest.raises(UserError, match=r"r18.pth \(sha256 .*, but MODEL.WEIGHTS is random"):
        main(argv("MODEL.WEIGHTS", "random", flags=("--resume",)))
    content = torch.load(r18_file, weights_only=True)
    content["model"]["stem.conv1.weight"][0] += 0.01
    torch.save(content, other)
    with pytest.raises(UserError, match=r"started from .*r18.pth \(sha256 .*other.pth \(sha256"):
        main(argv("MODEL.WEIGHTS", other, flags=("--resume",)))
    shutil.copy(other, copy)
    start(r18_file)
    (folder / "start.json").unlink()  # Plain Detectron2 writes none.
    start(r18_file)
    with pytest.raises(UserError, match=r"started from .*r18.pth, but MODEL.WEIGHTS is .*copy.pth"):
        main(argv("MODEL.WEIGHTS", copy, flags=("--resume",)))


@pytest.mark.slow
def test_evaluation_records_the_protocol_of_the_training(argv, tmp_path, voc_folder, small_config):
    """The schedule is that of the training; another test setting is another protocol."""
    main(argv("SOLVER.BASE_LR", "0.003"))
    trained = read_record(tmp_path / "run" / "run.json")
    model = (
        "MODEL.WEIGHTS",
        tmp_path / "run" / "model_final.pth",
        "OUTPUT_DIR",
        tmp_path / "again",
    )

    def evaluated(*opts):
        main(argv(*model, *opts, flags=("--eval-only",)))
        return read_record(tmp_path / "again" / "inference" / "run.json")

    record = evaluated("SOLVER.MAX_ITER", "99", "SEED", "5")
    assert record.config_sha256 == trained.config_sha256
    assert (record.seed, record.config["SOLVER.BASE_LR"]) == (trained.seed, 0.003)
    other = evaluated("TEST.DETECTIONS_PER_IMAGE", "7")
    assert other.config_sha256 != trained.config_sha256
    (tmp_path / "run" / "run.json").unlink()
    alone = evaluated()
    assert alone.config_sha256 != trained.config_sha256
    assert any("training data" in note for note in alone.notes)


@pytest.mark.slow
def test_evaluation_needs_no_training_data(argv, tmp_path, voc_folder):
    """A folder with only the test split can be evaluated."""
    main(argv())
    only = tmp_path / "shapes"
    for part in ("Annotations", "JPEGImages"):
        (only / part).parent.mkdir(exist_ok=True)
        (only / part).symlink_to(voc_folder / part)
    (only / "ImageSets" / "Main").mkdir(parents=True)
    (only / "ImageSets" / "Main" / "test.txt").write_bytes(
        (voc_folder / "ImageSets" / "Main" / "test.txt").read_bytes()
    )
    model = ("MODEL.WEIGHTS", tmp_path / "run" / "model_final.pth")
    where = ("DATASETS.VOC_DIR", only, "OUTPUT_DIR", tmp_path / "again")
    main(argv(*model, *where, flags=("--eval-only",)))
    again = read_record(tmp_path / "again" / "inference" / "run.json")
    trained = read_record(tmp_path / "run" / "run.json")
    assert again.metrics == trained.metrics
    assert again.config_sha256 == trained.config_sha256


@pytest.mark.parametrize(
    ("error", "known", "iterations"),
    [
        (NumericError("loss_cls is nan"), 5, 5),
        (DataError("the first image is damaged"), 0, 0),  # the lines are of an earlier attempt
        (RuntimeError("process 1 was killed"), None, 40),
    ],
)
def test_a_failed_run_is_recorded(error, known, iterations, argv, tmp_path, monkeypatch):
    """The iterations are those of the error, or else of metrics.json."""

    def fails(*_: object) -> None:
        (tmp_path / "run/metrics.json").write_text('{"iteration": 19}\n{"iteration": 39}\n{"it')
        if known is not None:
            set_iterations(error, known)
        raise error

    monkeypatch.setattr(launch, "run", fails)
    with pytest.raises(type(error)):
        main(argv())
    record = read_record(tmp_path / "run" / "run.json")
    assert (record.status, record.metrics, record.iterations) == ("failed", {}, iterations)
    assert record.notes[-1] == f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_restarted_by_torchrun_the_run_continues(argv, tmp_path, monkeypatch):
    assert main(argv()) == 0
    longer = argv("SOLVER.MAX_ITER", 4)
    with pytest.raises(UserError, match="is not empty"):
        main(longer)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(longer) == 0
    assert "continuing at iteration 3" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_evaluation_takes_the_model_as_it_was_trained(argv, tmp_path, small_config, small_options):
    """Channel order, mean and class order come from the run; contradictions are refused."""
    main(argv("INPUT.FORMAT", "BGR", "DATASETS.VOC_CLASSES", "['red', 'green', 'blue']"))
    trained = tmp_path / "run" / "model_final.pth"
    record = read_record(tmp_path / "run" / "run.json")
    elsewhere = ("MODEL.WEIGHTS", trained, "OUTPUT_DIR", tmp_path / "again")
    main(argv(*elsewhere, flags=("--eval-only",)))
    again = read_record(tmp_path / "again" / "inference" / "run.json")
    assert again.config["INPUT.FORMAT"] == "BGR"
    assert again.config["DATASETS.VOC_CLASSES"] == ["red", "green", "blue"]
    assert again.metrics == record.metrics
    assert again.init == "model_final"
    assert json.loads((tmp_path / "again" / "inference" / "shapes_test.json").read_text())
    with pytest.raises(UserError, match=r"INPUT\.FORMAT: you set 'RGB', but"):
        main(argv(*elsewhere, "INPUT.FORMAT", "RGB", flags=("--eval-only",)))


def test_the_lists_of_a_folder_are_compared_once(argv, voc_folder, monkeypatch):
    """The checks before torch and those after it share one configuration."""
    compared = []
    monkeypatch.setattr("detection.config.resolve.check_trainval", compared.append)
    assert main(argv("DATASETS.VOC_DIR", voc_folder, flags=("--check-only",))) == 0
    assert compared == [voc_folder / "ImageSets" / "Main"]
