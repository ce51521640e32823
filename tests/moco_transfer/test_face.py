"""The Python face: README's lines and the page as printed, on tiny data; its refusals."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import moco_transfer as mt
from benchmarks import evaluate, run_suite
from benchmarks.suites import runs
from tests.benchmarks.suites.fake_slurm import FakeSlurm
from tests.benchmarks.suites.fake_trainer import FakePrograms
from tests.conftest import ROOT
from tests.oracles.checkpoints import own
from tests.oracles.python import run_python
from tests.oracles.resnets import make_resnet, randomize
from tests.oracles.tiny_voc import write_voc

SMALL = ROOT / "configs" / "voc" / "faster_rcnn_R_18_C4_small.yaml"
# A ResNet-18 of a quarter of the width, as random initialization has to be told.
TINY = """
DATASETS: {VOC_DIR: scenes}
DATALOADER: {NUM_WORKERS: 0}
MODEL:
  DEVICE: cpu
  RESNETS: {STEM_OUT_CHANNELS: 16, RES2_OUT_CHANNELS: 16}
  ROI_HEADS: {BATCH_SIZE_PER_IMAGE: 8, SCORE_THRESH_TEST: 0.0}
  RPN: {POST_NMS_TOPK_TRAIN: 30, POST_NMS_TOPK_TEST: 15}
INPUT: {MIN_SIZE_TRAIN: [80, 96], MIN_SIZE_TEST: 96}
SOLVER: {PRECISION: fp32, IMS_PER_BATCH: 2, MAX_ITER: 2, STEPS: [1], WARMUP_ITERS: 0}
TEST: {PRECISE_BN: {NUM_ITER: 2}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_voc(tmp_path / "scenes", {"trainval": 4, "test": 2}, one_large=True)
    (tmp_path / "tiny.yaml").write_text(f"_BASE_: {SMALL}\n{TINY}")
    torch.save(own(depth=18, base=16), tmp_path / "my_r50.pth.tar")
    return tmp_path


def printed(page: str, **replace: str) -> str:
    """Return the Python code of a page; each of `replace` has to be in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.S | re.M))
    for old, new in {"faster_rcnn_R_50_C4_24k": "tiny.yaml", **replace}.items():
        assert old in code
        code = code.replace(old, new)
    return code


def run(code: str, folder: Path) -> str:
    """Run a script without a guard of its `__main__`; return its output."""
    (folder / "script.py").write_text(code)
    return run_python("script.py", cwd=folder)


def written(out: Path) -> dict[str, int]:
    return {str(p.parent): p.stat().st_mtime_ns for p in out.rglob("run.json")}


@pytest.mark.slow
def test_readme_as_printed(folder: Path) -> None:
    code = printed("README.md", **{"seeds=3": "seeds=1"})
    assert len(code.split("\n\n")[1].splitlines()) <= 4
    said = run(code, folder)
    assert "2 to do" in said and said.count("random  ") == said.count("mine  ") == 1
    assert len(written(folder / "runs")) == 2


@pytest.mark.slow
def test_the_page_as_printed(folder: Path) -> None:
    net = resnet18()
    randomize(net)
    torch.save(net.state_dict(), folder / "my_r18.pth")
    said = run(printed("docs/guides/python.md", **{"seeds=3": "seeds=1"}), folder)
    assert "res5 (2, 128, 7, 10) stride 32" in said
    frame = re.findall(r"^\d+ +(random|mine|again) +(bbox/AP\w*) +1 ", said, re.M)
    assert len(set(frame)) == len(frame) == 9
    assert re.search(r"^runs/mine/tables/table\.html$", said, re.M)
    assert re.search(
        r"^\[\('random', 0, [\d.]+\), \('again', 0, [\d.]+\), \('mine', 0, ", said, re.M
    )


@pytest.mark.slow
def test_a_module_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    net, options = make_resnet(18, base=16), {"SOLVER.MAX_ITER": 1, "SOLVER.STEPS": ()}
    how = {"task": "tiny.yaml", "out": "out", "seeds": [3], "options": options}
    result = mt.evaluate({"mine": net}, **how, engine="embedded")
    [record] = result.runs
    assert (record.init, record.seed, record.iterations) == ("mine", 3, 1)
    assert record.weights_source == "state dict"
    before = written(folder)
    same = mt.evaluate({"mine": net}, **how, engine="embedded")
    assert str(same) == str(result) and written(folder) == before
    assert result._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    with torch.no_grad():
        net.conv1.weight.add_(1)
    with pytest.raises(mt.UserError, match=r"out was made by another command \(inits\.mine"):
        mt.evaluate({"mine": net}, **how, engine="embedded")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["cpu", "slurm"])
def test_each_executor(folder: Path, monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    cluster = FakeSlurm(folder / "slurm")
    monkeypatch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    how = {"task": "tiny.yaml", "seeds": 1, "options": {"SOLVER.MAX_ITER": 1, "SOLVER.STEPS": ()}}
    result = mt.evaluate({"random": None}, **how, out="out", executor=executor, engine="embedded")
    [record] = result.runs
    assert (record.init, record.iterations) == ("random", 1)
    assert list(cluster.ended().values()) == (["COMPLETED"] if executor == "slurm" else [])


@pytest.mark.parametrize("task", [None, "tiny.yaml"])
def test_data_as_the_command_has_it(folder, monkeypatch, capsys, task) -> None:
    """The same choices are printed and the same suite is written as by `moco-transfer evaluate`."""
    monkeypatch.chdir(folder)
    programs = FakePrograms(folder / "journal")
    # A class, as a module that is imported now may annotate with it.
    monkeypatch.setattr(runs, "Programs", type("Given", (), {"__new__": lambda cls: programs}))
    monkeypatch.setattr(run_suite, "time_undone", lambda *arguments: {})
    argv = ["--data", "scenes", "--init", "mine=my_r50.pth.tar", "--init", "random"]
    argv += ["--executor", "cpu", "--trials", "2", "--output", "command"]
    argv += ["--task", task] if task else []
    evaluate.main([*argv, "--plan", "plan.json", "--opts", "SOLVER.MAX_ITER", "400"], programs)
    chosen = re.findall(r"^(?:data|task|budget): .*$", capsys.readouterr().out, re.M)
    result = mt.evaluate(
        {"mine": "my_r50.pth.tar", "random": None},
        data="scenes",
        task=task,
        seeds=2,
        options={"SOLVER.MAX_ITER": 400},
        out="out",
        executor="cpu",
    )
    shown = re.findall(r"^(?:data|task|budget): .*$", capsys.readouterr().out, re.M)
    assert len(chosen) == 3 and shown == chosen
    files = (Path(out, "suite.json") for out in ("out", "command"))
    written, expected = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert written == expected
    [keys] = (each["keys"] for each in written["tasks"].values())
    assert keys["SOLVER.MAX_ITER"] == "400" and keys["SOLVER.STEPS"] == "(300, 367)"
    assert len(result.runs) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": None}, "evaluate: got no task and no data; give task=NAME"),
        ({"data": 3}, "data: got 3, expected the folder of a dataset"),
        ({"data": "scenes"}, "evaluate: give the weights to evaluate"),
        ({"data": "scenes", "task": ["a", "b"]}, "task: got 2 tasks, expected at most one with"),
        ({"data": "none", "inits": {"a": "my_r50.pth.tar"}}, "none: no such folder"),
        ({"inits": {"a": 3}}, "inits: a: got a int"),
        ({"inits": {"scratch": None}}, "the name random is for random initialization"),
        ({"inits": {"a": "no.pth"}}, "no.pth: no such file"),
        ({"task": "no_such_task"}, "no_such_task: no such file"),
        ({"task": ["tiny.yaml", "tiny.yaml"]}, "two tasks are called tiny"),
        ({"options": {"SOLVER.FOO": 1}}, "options: got the unknown key SOLVER.FOO"),
        ({"options": {"SEED": 1}}, "SEED is set for each run"),
        ({"seeds": 0}, "seeds: got 0, expected 1 to 100"),
        ({"engine": "jax"}, "engine: got 'jax', expected one of auto"),
        ({"executor": "cloud"}, "executor: got 'cloud', expected one of auto"),
        ({"workers": -1}, "workers: got -1"),
        ({"baseline": "mine"}, "baseline mine: no such init; choices are random"),
        ({"out": "tiny.yaml"}, "tiny.yaml: is a file"),
        ({"seeds": "3"}, "seeds: got '3', expected a number of seeds"),
        ({"seeds": [-1]}, "seeds: got [-1], expected a number of seeds, or different integers"),
        ({"seeds": [1, 1]}, "seeds: got [1, 1], expected"),
        ({"seeds": [0.5]}, "seeds: got [0.5], expected"),
        ({"seeds": True}, "seeds: got True, expected"),
        ({"seeds": None}, "seeds: got None, expected"),
        ({"seeds": 10**9}, "seeds: got 1000000000, expected 1 to 100"),
        ({"inits": ["a.pth"]}, "inits: got ['a.pth'], expected a mapping"),
        ({"inits": {3: None}}, "inits: got a dict, expected a mapping of names"),
        ({"task": 3}, "task: got 3, expected a task file"),
        ({"task": []}, "task: got [], expected a task file"),
        ({"out": 3}, "out: got 3, expected a folder"),
        ({"options": ["SOLVER.MAX_ITER", 2]}, "options: got"),
        ({"options": {3: 2}}, "options: got a dict, expected a mapping of keys"),
        ({"baseline": 3}, "baseline: got 3, expected the name of an init"),
        ({"engine": ["embedded"]}, "engine: got"),
        ({"executor": {}}, "executor: got a dict, expected a text"),
        ({"workers": "2"}, "workers: got '2', expected a number"),
        ({"gpus_per_run": 0.5}, "gpus_per_run: got 0.5, expected a number"),
    ],
)
def test_refusals(change, message, folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    fitting = {"inits": {"random": None}, "task": "tiny.yaml", "out": "out"}
    with pytest.raises(mt.UserError, match=re.escape(message)) as error:
        mt.evaluate(**{**fitting, **change})
    assert "\n" not in str(error.value) and not (folder / "out").exists()


def test_another_thread(folder, monkeypatch) -> None:
    """Two evaluations at once, in threads: nothing is started, as no signal would stop them."""
    monkeypatch.chdir(folder)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(mt.evaluate, {"random": None}, task="tiny.yaml", out=f"out{i}")
            for i in range(2)
        ]
    for call in calls:
        with pytest.raises(mt.UserError, match="evaluate: got another thread, expected the main"):
            call.result()
    assert not list(folder.glob("out*"))


def quantized() -> nn.Module:
    module = resnet18()
    module.register_buffer("q", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    return module


def with_state() -> nn.Module:
    class Stateful(nn.Module):
        def get_extra_state(self) -> object:
            return {"a": 3}

    return Stateful()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet18().to("meta"), "the ResNet: conv1.weight is on the meta device"),
        (quantized, "the ResNet: q is quantized"),
        (with_state, "the Stateful: _extra_state is no tensor"),
        (lambda: nn.LazyLinear(3), "the LazyLinear: weight is not initialized yet"),
        (lambda: resnet18, "source: got a function, expected a file"),
        (lambda: resnet18().state_dict(), "source: got a OrderedDict, expected a file"),
        (lambda: None, "source: got None, expected a file"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(quantized|Lazy modules)")
def test_modules_that_are_refused(make, message, folder, monkeypatch) -> None:
    with pytest.raises(mt.UserError, match=re.escape(message)):
        mt.load_backbone(make())
    if isinstance(made := make(), nn.Module):
        monkeypatch.chdir(folder)
        with pytest.raises(mt.UserError, match=re.escape(message)):
            mt.evaluate({"mine": made}, task="tiny.yaml", out="out")
        assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": torch.ones(3)}, "mean: got a Tensor, expected three numbers"),
        ({"std": [1, 2]}, "std: got a list, expected three numbers"),
        ({"timm_model": 3}, "timm_model: got 3, expected a text"),
        ({"stem": 4}, "stem: got 4, expected one of 'imagenet'"),
        ({"num_heads": "3"}, "num_heads: got '3', expected an integer"),
        ({"heads": 3}, "heads: no such option; choices are encoder, mean"),
    ],
)
def test_options_that_are_refused(options, message, folder) -> None:
    with pytest.raises(mt.UserError, match=re.escape(message)):
        mt.load_backbone(folder / "my_r50.pth.tar", **options)


def test_it_is_imported_at_once() -> None:
    names = run_python("-c", "import sys, moco_transfer; print(*sys.modules)").split()
    packages = {name.partition(".")[0] for name in names}
    assert "moco_transfer" in packages
    assert not packages & {"torch", "numpy", "pandas", "convert", "detection", "benchmarks"}
    assert mt.__all__ == sorted(mt.__all__) and all(map(mt.__dict__.get, mt.__all__))
