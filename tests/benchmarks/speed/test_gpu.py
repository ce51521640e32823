"""What is for a GPU runs on the CPU, where every difference is one to itself."""

import pytest

from benchmarks.speed import gpu


def test_the_checks_find_the_cpu_equal_to_itself(tmp_path):
    checks = gpu.checks("cpu", tmp_path)
    quick = [name for name in checks if "loss" not in name]  # without the commands
    assert len(quick) == 2 and all(checks[name][1]() == 0.0 for name in quick)


@pytest.mark.slow
def test_the_commands_among_the_checks_run(tmp_path):
    checks = gpu.checks("cpu", tmp_path)
    for name in ("losses of pretrain, stopped and resumed", "first loss of train, bf16"):
        assert checks[name][1]() == 0.0
    assert 0 < checks["first losses of pretrain, bf16"][1]() < 0.05


def test_a_check_notices_a_difference(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "restore_random", lambda state: None)
    assert gpu.checks("cpu", tmp_path)["restored random state"][1]() > 0


def test_a_branch_that_fails_does_not_stop_the_others(monkeypatch, tmp_path):
    def fails() -> float:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu, "checks", lambda *where: {"a": (0.0, fails), "b": (0.0, lambda: 0.0)})
    a, b = gpu.branches(gpu.Setting(tmp_path, 1, True))
    assert (a[0], a[-1]) == ("a", "no") and (b[0], b[-1]) == ("b", "yes")
