"""Commands that a suite starts, parsed by the programs' own parsers."""

import sys

import pytest
from torch.distributed.run import get_args_parser

from benchmarks.suites.runs import HOST, PORT, RANK, Programs
from benchmarks.suites.suite import Init, expand
from benchmarks.suites.suite_file import load_suite, with_options
from detection import train_net
from moco.classification import classify
from moco.finetune import FINETUNE
from moco.linear import LINEAR
from tests.benchmarks.suites.lab import ROOT

command = Programs().command
INITS = {"random": Init("random", None), "mine": Init("/w/mine.pth", "a" * 64)}


def runs(name: str, **keys):
    suite = load_suite(ROOT / "configs" / "suites" / f"{name}.yaml")
    suite = with_options(suite, {}, {}, trials=2)
    return expand(suite, INITS, ["detectron2", "embedded"], version="1", **keys)


@pytest.mark.parametrize("name", ["paper", "smoke"])
@pytest.mark.parametrize("gpus", [0, 8])
def test_commands_are_what_the_programs_understand(name, gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", "/data")
    specs = runs(name, available=gpus)
    assert name != "paper" or {spec.gpus for spec in specs} == ({8} if gpus else {0})
    for spec in specs:
        argv = command(spec, tmp_path / "out")
        assert argv[0] == sys.executable
        if spec.program == "detection":
            assert argv[1:3] == ["-m", "detection.train_net"]
            args = train_net.build_parser().parse_args(argv[3:])
            assert args.resume and args.engine == spec.engine
            assert args.num_gpus == max(spec.gpus, 1)
            assert args.visualize == (4 if spec.seed == 0 else 0)
            given = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
            assert given["MODEL.WEIGHTS"] == spec.weights
        else:
            start = argv.index("benchmarks") + 2
            assert argv[start - 1] == spec.program
            assert ("torch.distributed.run" in argv) == (gpus > 1)
            protocol = LINEAR if spec.program == "linear" else FINETUNE
            args = classify.parse_args(protocol, argv[start:])
            assert (args.resume, args.checkpoint) == ("auto", spec.weights)
            assert args.init == ("" if spec.init == "random" else "mine")
            given = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
            assert given["DATA.ROOT"].startswith("/data/")
        assert args.config_file == str(spec.config)
        assert (given["OUTPUT_DIR"], given["SEED"]) == (str(tmp_path / "out"), str(spec.seed))


def test_commands_on_two_machines(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", "/data")
    specs = runs("paper", gpus=16, available=16)
    assert {spec.program for spec in specs} == {"detection", "linear", "finetune"}
    values = {RANK: "1", HOST: "node1", PORT: "20001"}
    for spec in specs:
        argv = command(spec, tmp_path, 2)
        for name, value in values.items():
            argv = [argument.replace(name, value) for argument in argv]
        assert not any("<" in argument for argument in argv)
        if spec.program == "detection":
            args = train_net.build_parser().parse_args(argv[3:])
            assert (args.num_gpus, args.num_machines, args.machine_rank) == (8, 2, 1)
            assert args.dist_url == "tcp://node1:20001"
        else:
            args = get_args_parser().parse_args(argv[3:])
            assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("8", "2", 1)
            assert (args.master_addr, args.master_port) == ("node1", 20001) and not args.standalone
            start = argv.index("-m", 3) + 1
            assert argv[start : start + 2] == ["benchmarks", spec.program]
