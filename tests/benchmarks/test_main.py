"""The console command: every command behind one name."""

import re
import subprocess
import sys

import pytest
import torch

from benchmarks import __main__ as console
from benchmarks import completion, list_configs
from benchmarks.suites.synthetic import write_scenes
from moco import __version__
from moco.common import command, shipped
from tests.benchmarks.suites.lab import Lab
from tests.oracles.resnets import make_resnet

# What takes long to import is only imported by a command that runs.
HEAVY = ("torch", "torchvision", "detectron2", "matplotlib", "scipy", "hotcoco", "tensorboard")


@pytest.mark.parametrize("name", console.COMMANDS)
def test_help_comes_at_once_and_is_called_as_it_was_started(name):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); "
        f"sys.argv = ['x', {name!r}, '--help']; from benchmarks import __main__ as m; m.cli()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=shipped.ROOT, capture_output=True, text=True, timeout=60
    )
    shown = {"inspect": "convert", "doctor": "datasets doctor"}.get(name, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: moco-transfer {shown}")


def run_without(modules, argv, cwd):
    """Run a command; afterwards nothing in `modules` may have been imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(shipped.ROOT)!r}); sys.argv = ['x', *{argv!r}]\n"
        "from benchmarks import __main__ as m\ncode = m.main()\n"
        f"found = [name for name in {modules!r} if name in sys.modules]\n"
        "sys.exit(f'imported: {found}' if found or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, (argv, done.stderr)


@pytest.mark.slow
def test_what_reads_imports_no_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(shipped.ROOT)
    lab, scenes = Lab(tmp_path, trials=1), tmp_path / "scenes"
    lab.run()
    write_scenes(scenes, 3, 2, seed=0)
    file, output = str(tmp_path / "suite.yaml"), ["--output", str(lab.out)]
    for line in ("configs", "weights list", "datasets list"):
        run_without(HEAVY, line.split(), tmp_path)
    run_without(HEAVY, ["suite", file, "--status", *output], tmp_path)
    run_without(HEAVY, ["doctor", "--voc-dir", str(scenes)], tmp_path)
    run_without(("torch", "torchvision", "detectron2"), ["table", str(lab.out / "runs")], tmp_path)
    run = next((lab.out / "runs").rglob("metrics.json")).parent
    (run / "metrics.json").write_text('{"iteration": 1, "epoch": 1, "loss": 2.0}\n')
    run_without(("torch", "scipy"), ["plot", str(run)], tmp_path)


@pytest.mark.slow
def test_what_checks_imports_no_torchvision(tmp_path):
    """And not torch's compiler, which torchvision imports; both take longer than torch."""
    write_scenes(tmp_path / "scenes", 3, 2, seed=0)
    weights = tmp_path / "weights.pth"
    torch.save(make_resnet(18).state_dict(), weights)
    slow = ("torchvision", "torch._dynamo", "matplotlib", "detectron2")
    run_without(slow, ["inspect", str(weights)], tmp_path)
    check = "train --check-only --engine embedded --config-file voc/quickstart_R_10_C4"
    keys = "DATASETS.VOC_DIR scenes MODEL.WEIGHTS random MODEL.DEVICE cpu"
    run_without(slow, f"{check} {keys}".split(), tmp_path)


def test_the_commands_and_the_version(capsys):
    with pytest.raises(SystemExit):
        console.main(["--help"])
    shown = capsys.readouterr().out.splitlines()
    assert console.COMMANDS.keys() <= {line.split()[0] for line in shown if line.strip()}
    with pytest.raises(SystemExit):
        console.main(["--version"])
    assert capsys.readouterr().out == f"moco-transfer {__version__}\n"
    for wrong in ([], ["trian"], ["--debug"]):
        with pytest.raises(SystemExit) as caught:
            console.main(wrong)
        assert caught.value.code == 2


def test_arguments_reach_the_command(tmp_path, capsys):
    assert console.main(["doctor", "voc", "--root", str(tmp_path)]) == 3
    assert "voc" in capsys.readouterr().out


def test_how_commands_are_written(monkeypatch):
    old = "python -m benchmarks knn"
    monkeypatch.setattr(sys, "argv", ["knn.py"])
    assert command.program("knn", old) == old
    monkeypatch.setattr(shipped, "CHECKOUT", False)  # nothing else can be started everywhere
    assert command.program("knn", old) == "moco-transfer knn"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["moco-transfer"])
    assert command.program("knn", old) == "moco-transfer knn"


@pytest.mark.parametrize("name", console.COMMANDS)
def test_the_console_command_names_no_script(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["moco-transfer"])
    text = console.module_of(name).build_parser().format_help()
    assert not re.search(r"(convert_to_d2|train_net)\.py|python -m|benchmarks\.", text)


def test_configs_have_titles(capsys):
    list_configs.main(["voc"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith(str(shipped.CONFIGS))
    titles = dict(line.split(None, 1) for line in lines)
    assert titles["voc/faster_rcnn_R_50_C4_9k"].startswith("Table 4 of the paper: Faster R-CNN")
    assert {name.partition("/")[0] for name in titles} == {"voc", "suites"}
    everything = list_configs.listing().splitlines()
    assert len(everything) == len(list(shipped.CONFIGS.glob("*/*.yaml")))


def test_a_config_is_printed_as_it_is(capsys):
    list_configs.main(["--show", "small_r18"])
    assert capsys.readouterr().out == (shipped.CONFIGS / "pretrain/small_r18.yaml").read_text()


def test_a_reader_may_stop_early():
    """Such as `moco-transfer configs | head`."""
    command = [sys.executable, "-m", "benchmarks", "configs"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=shipped.ROOT, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def completed(words: list[str]) -> set[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f'"{word}"' for word in words)
    shell = f"{completion.script('bash')}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n"
    shell += '_shtab_moco_transfer; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


def test_a_shell_completes_commands_and_their_arguments():
    assert completed(["moco-transfer", "tr"]) == {"train"}
    assert completed(["moco-transfer", "train", "--en"]) == {"--engine"}
    assert "coco" in completed(["moco-transfer", "datasets", "doctor", "c"])
