"""Files of another shape where a suite and a training read their own: one line, or left out."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.inspect_weights import main as inspect
from benchmarks.run_suite import main as run_suite
from benchmarks.suites.folder import SuiteFolder
from moco.common.errors import UserError
from moco.common.run import drop_metrics, metrics_lines
from tests.benchmarks.suites.fake_trainer import FakePrograms

VALUES: tuple[Any, ...] = (None, 3, "x", [], {}, [3], {"a": 3}, [[]], {"a": []}, [{}], [{"a": 1}])


def changed(content: Any) -> Iterator[Any]:
    """Yield copies in which one value, at any of the first three levels, has another shape."""

    def places(value: Any, depth: int) -> Iterator[list[Any]]:
        items = value.items() if isinstance(value, dict) else ()
        items = list(enumerate(value))[:1] if isinstance(value, list) else items
        for key, inside in items:
            yield [key]
            if depth:
                yield from ([key, *rest] for rest in places(inside, depth - 1))

    for place in places(content, 2):
        for value in VALUES:
            copy = inside = json.loads(json.dumps(content))
            for key in place[:-1]:
                inside = inside[key]
            inside[place[-1]] = value
            yield copy
    yield from VALUES


@pytest.mark.slow
def test_a_suite_json_of_another_shape(lab, capsys):
    """A user's own file of this name, or one that was edited."""
    lab.run("--plan", str(lab.path / "plan.json"))
    file = lab.out / "suite.json"
    content = json.loads(file.read_text())
    folder, refused = SuiteFolder(lab.out), 0
    for other in changed(content):
        file.write_text(json.dumps(other))
        for read in (folder.read, folder.recorded_data, lambda: folder.check(content)):
            try:
                read()
            except UserError as error:
                refused += 1
                assert str(error).isprintable() and len(str(error)) < 300
    assert refused > 300
    file.write_text(json.dumps({"name": "my suite", "tasks": ["a", "b"]}))
    for more in (["--status"], ["--dry-run"]):
        with pytest.raises(UserError, match=r"suite\.json: not of a suite \(suite: got nothing\)"):
            run_suite(lab.arguments(*more), FakePrograms(lab.journal))


LINES = ["[]", "3", '"a"', "null", "{}", '{"iteration": "a"}', '{"iteration": NaN}', '{"iter']
LINES += ["[" * 9999]


def test_lines_of_metrics_of_another_shape(tmp_path):
    good = [{"iteration": 1, "loss": 2.0}, {"iteration": 2, "loss": 1.0}]
    file = tmp_path / "metrics.json"
    file.write_text("\n".join([json.dumps(good[0]), *LINES, json.dumps(good[1])]))
    assert metrics_lines(tmp_path) == good
    drop_metrics(tmp_path, lambda line: line["iteration"] <= 1)
    assert [json.loads(line) for line in file.read_text().splitlines()] == good[:1]


CODES = "\x1b[2J\x1b]0;title\x07\u202e"


def test_names_that_would_control_the_terminal(tmp_path, capsys):
    for name in ("a", "b", f"no{CODES}set"):
        (tmp_path / "sets" / name).mkdir(parents=True)
    for name in "ab":
        (tmp_path / "sets" / name / "train").mkdir()
    weights = tmp_path / f"w{CODES}.pth"
    weights.write_text("no weights")
    with pytest.raises(UserError):
        run_suite(["many_small", "--data", str(tmp_path / "sets"), "--init", f"mine={weights}"])
    with pytest.raises(UserError):
        inspect([str(weights)])
    shown = capsys.readouterr().out
    assert "left out: " in shown and "reading " in shown
    assert [line for line in shown.splitlines() if not line.isprintable()] == []
