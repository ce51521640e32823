"""Console command: every command behind one name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as console
from benchmarks import completion, list_configs, make_table, plot_curves, quickstart, run_suite
from benchmarks.suites.synthetic import write_scenes
from moco import __version__
from moco.common import command, shipped
from tests.benchmarks.suites.lab import Lab
from tests.oracles.python import run_python
from tests.oracles.resnets import make_resnet

# Packages that take long to import; only a command that runs may do so.
HEAVY = (
    "torch", "torchvision", "detectron2", "timm", "transformers", "matplotlib", "scipy", "pandas",
    "cv2", "hotcoco", "tensorboard",
)  # fmt: skip


@pytest.mark.parametrize("name", console.COMMANDS)
def test_help_needs_no_heavy_package_and_names_the_console_command(name):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); "
        f"sys.argv = ['x', {name!r}, '--help']; from benchmarks import __main__ as m; m.cli()"
    )
    text = run_python("-c", code)
    assert text.startswith(f"usage: moco-transfer {name}")
    assert not re.search(r"(convert_to_d2|train_net)\.py|python -m|benchmarks\.", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*console.COMMANDS, ""])
def test_every_command_starts_as_a_module_and_as_a_script(name, tmp_path, capsys):
    """From any folder, without an installation, and with the options of the console command."""
    module = console.COMMANDS[name][0] if name else "benchmarks.__main__"
    file = shipped.ROOT / f"{module.replace('.', '/')}.py"
    with pytest.raises(SystemExit):
        console.main([name, "--help"] if name else ["--help"])
    options = re.compile(r"(?<!\S)--\w[\w-]*|^    \w+(?=  )", re.M)  # and subcommands
    expected = options.findall(capsys.readouterr().out)
    # An editable installation is found by a finder or by its folder in the path.
    setup = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({HEAVY})); "
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]; "
        f"sys.path[:] = [each for each in sys.path[1:] if each != {str(shipped.ROOT)!r}]; "
    )
    for start in (
        f"sys.path.insert(0, {str(shipped.ROOT)!r}); sys.argv = ['x', '--help']; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
        f"sys.path.insert(0, {str(file.parent)!r}); sys.argv = [{str(file)!r}, '--help']; "
        f"runpy.run_path({str(file)!r}, run_name='__main__')",
    ):
        done = subprocess.run(
            [sys.executable, "-c", setup + start], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, ""), start
        assert done.stdout.startswith("usage: ") and options.findall(done.stdout) == expected


def run_without(modules, argv, cwd):
    """Run a command, and check that it has not imported any of `modules`."""
    code = (
        f"import sys; sys.argv = ['x', *{argv!r}]\n"
        "from benchmarks import __main__ as m\ncode = m.main()\n"
        f"found = [name for name in {modules!r} if name in sys.modules]\n"
        "sys.exit(f'imported: {found}' if found or code else 0)"
    )
    run_python("-c", code, cwd=cwd)


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
    # It computes the score of perfect predictions by COCO's metric.
    rest = [name for name in HEAVY if name != "hotcoco"]
    run_without(rest, ["doctor", "--voc-dir", str(scenes)], tmp_path)
    run_without(("torch", "torchvision", "detectron2"), ["table", str(lab.out / "runs")], tmp_path)
    run = next((lab.out / "runs").rglob("metrics.json")).parent
    (run / "metrics.json").write_text('{"iteration": 1, "epoch": 1, "loss": 2.0}\n')
    run_without(("torch", "scipy"), ["plot", str(run)], tmp_path)


@pytest.mark.slow
def test_what_checks_imports_neither_torchvision_nor_compilers(tmp_path):
    """Torchvision imports torch's compiler; both take longer than torch."""
    write_scenes(tmp_path / "scenes", 3, 2, seed=0)
    weights = tmp_path / "weights.pth"
    torch.save(make_resnet(18).state_dict(), weights)
    packages = ("timm", "transformers", "matplotlib", "detectron2")
    slow = ("torchvision", "torch._dynamo", "torch._inductor", "triton", *packages)
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


def test_without_a_command_the_usual_ones_are_shown(capsys):
    assert console.main([]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    shown = [line.split()[1:] for line in lines if line.startswith("moco-transfer ")]
    assert [words[0] for words in shown[:-1]] == list(console.USUAL) and len(console.USUAL) == 6
    assert shown[-1][0] == "--help"
    for name, *arguments in shown[:-1]:
        console.module_of(name).build_parser().parse_args(arguments)
        assert console.COMMANDS[name][1] in lines
    run_without(HEAVY, [], shipped.ROOT)


def test_arguments_reach_the_command(tmp_path, capsys):
    assert console.main(["doctor", "voc", "--root", str(tmp_path)]) == 3
    assert "voc" in capsys.readouterr().out


def test_how_commands_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["knn.py"])
    monkeypatch.chdir(shipped.ROOT)
    assert command.program("knn") == "python -m benchmarks knn"
    monkeypatch.chdir(tmp_path)
    _, *words = command.program("knn").split()
    assert run_python(*words, "--help", cwd=tmp_path).startswith("usage: ")
    # Without a checkout, only the console command works everywhere.
    monkeypatch.setattr(shipped, "CHECKOUT", False)
    assert command.program("knn") == "moco-transfer knn"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["moco-transfer"])
    assert command.program("knn") == "moco-transfer knn"


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
    """`moco-transfer configs | head` prints no error."""
    command = [sys.executable, "-m", "benchmarks", "configs"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=shipped.ROOT, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def completed(arguments: list[str]) -> set[str]:
    """Return the completions that bash offers for the last argument."""
    line = " ".join(f'"{each}"' for each in arguments)
    shell = f"{completion.script('bash')}\nCOMP_WORDS=({line}); COMP_CWORD={len(arguments) - 1}\n"
    shell += '_shtab_moco_transfer; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


def test_a_shell_completes_commands_and_their_arguments():
    assert completed(["moco-transfer", "tr"]) == {"train"}
    assert completed(["moco-transfer", "train", "--en"]) == {"--engine"}
    assert "coco" in completed(["moco-transfer", "datasets", "doctor", "c"])


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (make_table, "RUNS --out=~/x"),
        (make_table, "RUNS --bundle=~/x"),
        (quickstart, "--output=~/x"),
        (quickstart, "--voc=~/x"),
        (run_suite, "smoke --plan=~/x"),
        (plot_curves, "RUN --output=~/x"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_paths_below_the_home_folder(module, words):
    """A shell leaves the tilde of `--out=~/x` alone."""
    args = vars(module.build_parser().parse_args(words.split()))
    assert args[words.partition("--")[2].partition("=")[0]] == Path.home() / "x"
