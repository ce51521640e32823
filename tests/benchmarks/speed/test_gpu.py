"""What is for a GPU runs on the CPU, where every difference is one to itself."""

import pytest

from benchmarks.speed import __main__ as command
from benchmarks.speed import gpu
from benchmarks.speed.results import goals
from moco.common.errors import UserError

SLOW = {"compile", "pretrain fp16", "pretrain bf16", "resume", "fine-tune"}


def test_the_checks_find_the_cpu_equal_to_itself(tmp_path):
    checks = gpu.checks("cpu", tmp_path)
    assert checks.keys() == {key for key in goals() if key.startswith("branches ")}
    quick = [name for name in checks if name.removeprefix("branches ") not in SLOW]
    assert {name: checks[name]() for name in quick} == dict.fromkeys(quick, 0.0)


@pytest.mark.slow
def test_the_commands_among_the_checks_run(tmp_path):
    checks = gpu.checks("cpu", tmp_path)
    for name in ("resume", "fine-tune"):
        assert checks[f"branches {name}"]() == 0.0


def test_a_check_notices_a_difference(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "restore_random", lambda state: None)
    assert gpu.checks("cpu", tmp_path)["branches random state"]() > 0


def test_without_a_gpu_all_is_listed_as_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    page = tmp_path / "speed.md"
    with pytest.raises(UserError, match="GPU"):
        command.main(["gpu", "--output", str(page)])
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= len(gpu.checks("cpu", tmp_path)) + len(gpu.TIMED)
    assert all("needs a GPU" in row for row in rows)
