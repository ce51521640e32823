"""Command `suite`: checks, lists, refusals and reports, with a miniature training program."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import run_suite
from benchmarks.report.records import collect
from benchmarks.report.report import tables_so_far
from benchmarks.report.stats import pooled_std, runs_needed, smallest_gap
from benchmarks.run_suite import SuiteFailed
from benchmarks.suites import forecast
from benchmarks.suites.folder import check_agreement, suite_content
from benchmarks.suites.suite import Init, RunSpec
from benchmarks.suites.suite_file import load_suite, with_options
from moco.common.errors import UserError
from moco.common.pretrained import locate_weights
from tests.benchmarks.report.fake_runs import csv_rows
from tests.benchmarks.suites.fake_trainer import ITERATIONS, FakePrograms
from tests.benchmarks.suites.lab import Lab, kept
from tests.benchmarks.suites.run_code import command
from tests.oracles.file_server import file_server


@pytest.mark.slow
def test_a_suite_to_its_tables_and_nothing_twice(lab, capsys):
    lab.with_tables = True
    lab.run()
    lab.assert_once(8)
    assert lab.count("start") == lab.count("done") and not lab.count("resume")
    shown = capsys.readouterr().out
    assert "Two tasks: 8 runs, on the CPU, 2 at a time" in shown and "mine" in shown
    assert shown.splitlines()[-1] == f"page: {lab.out / 'tables' / 'table.html'}"
    tables = lab.tables()
    assert {"table.md", "table.csv", "table.tex", "table.html"} <= set(tables)
    # A run is named after its init, and trains from a copy of its weights.
    copy = lab.out / "inits" / "mine.pth"
    assert copy.read_text() == "weights of mine" and not copy.is_symlink()
    (lab.out / "tables" / ".tmp-half").write_text("left by a killed runner")
    lab.run()
    assert len(lab.events()) == 8 * (2 + ITERATIONS)
    assert lab.tables() == tables


def test_more_tasks_trials_and_inits_come_on_top(lab, capsys):
    """A task that cannot run here may be left out, and computed by a later call."""
    shown = dry_run(lab, capsys, "--trials", "1", "--skip", "b")
    assert shown.startswith("left out: b, by --skip\n") and "\n2 to do" in shown
    lab.run("--trials", "1", "--skip", "b")
    assert {name.split("/")[0] for name in lab.count("done")} == {"a"}
    (lab.path / "new.pth").write_text("other weights")
    lab.run("--trials", "2", "--init", f"new={lab.path / 'new.pth'}")
    lab.assert_once(12)


def test_several_pre_trainings_are_one_row(lab, capsys):
    lab.with_tables = True
    (lab.path / "second.pth").write_text("weights of another pre-training")
    lab.inits = ["--init", "random", "--init", f"mine={lab.path}/mine.pth,{lab.path}/second.pth"]
    assert "2 runs or pre-trainings per row" in dry_run(lab, capsys, "--trials", "3")
    lab.run("--trials", "3", "--baseline", "mine", "--skip", "b")
    lab.assert_once(3 * 3)
    printed = capsys.readouterr().out
    assert "mine (2 files of weights)" in printed
    assert "not over test images" in (lab.out / "tables" / "table.md").read_text()
    assert {path.name for path in (lab.out / "inits").iterdir()} == {"mine@1.pth", "mine@2.pth"}
    rows = csv_rows((lab.out / "tables" / "table.csv").read_text())
    assert {(row["init"], row["n"]) for row in rows} == {("random", "3"), ("mine", "2")}
    (lab.path / "second.pth").write_text((lab.path / "mine.pth").read_text())
    with pytest.raises(UserError, match="mine@1 and mine@2 are the same weights"):
        lab.run("--output", str(lab.path / "other"))


def test_weights_at_another_place_on_another_machine(lab):
    """The copy of the weights stays for the machines that continue a run."""
    lab.run("--trials", "1")
    copy, moved = lab.out / "inits" / "mine.pth", lab.path / "elsewhere.pth"
    (lab.path / "mine.pth").rename(moved)
    lab.inits = ["--init", "random", "--init", f"mine={moved}"]
    # A broken link and a damaged copy are replaced.
    for damage in (lambda: copy.symlink_to("nowhere.pth"), lambda: copy.write_text("half")):
        copy.unlink()
        damage()
        lab.run()
        assert copy.read_text() == "weights of mine" and not copy.is_symlink()
    moved.unlink()
    assert copy.read_text() == "weights of mine"
    lab.assert_once(8)


@pytest.mark.slow
def test_a_failure_is_shown_and_the_others_continue(failing_lab, capsys):
    lab = failing_lab
    lab.with_tables = True
    with pytest.raises(SuiteFailed, match="2 of 4 runs failed") as error:
        lab.run()
    assert error.value.exit_code == 1
    assert {name.split("/")[1] for name in lab.count("done")} == {"mine"}
    [log] = lab.out.glob("runs/a/bad/*/suite.log")
    line = "failed: a bad seed 0 (embedded): the loss is nan at iteration 3; its log is "
    assert f"{line}{log}" in capsys.readouterr().err
    tables = lab.tables()
    numbers = tables["runs.csv"].decode()
    assert "mine" in numbers and "bad" not in numbers
    assert b"the loss is nan at iteration 3" in b"".join(tables.values())
    assert lab.states() == {"done": 2, "failed": 2}
    with pytest.raises(SuiteFailed):
        lab.run("--baseline", "bad")
    assert "note: no run of the baseline bad is done" in capsys.readouterr().out
    before = lab.events()
    with pytest.raises(SuiteFailed):
        lab.run()
    assert lab.events() == before and lab.tables() == tables
    with pytest.raises(SuiteFailed):
        lab.run("--retry-failed")
    assert sum(lab.count("resume").values()) == 2  # once each, from its checkpoint
    assert set(lab.count("start").values()) == {1}


def test_a_retry_forgets_what_was(lab, capsys):
    """A repeated run is not a failed one while it runs, and its next error is its own."""

    class Failing(FakePrograms):
        def command(self, spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
            left = f"import os; assert not os.path.exists({str(folder / 'failed.json')!r}); "
            return command(f"{left}print({text!r}); raise SystemExit(4)")

    for text, more in (("error: old", ()), ("something new", ("--retry-failed",))):
        with pytest.raises(SuiteFailed):
            lab.main(Failing(lab.journal), "--trials", "1", *more)
        out, err = capsys.readouterr()
        assert text.removeprefix("error: ") in err and "\n4 to do" in out
    texts = [json.loads(p.read_text())["error"] for p in lab.out.glob("runs/*/*/*/failed.json")]
    assert texts == ["something new"] * 4


def test_status_shows_untrusted_records_as_text(lab, capsys):
    lab.run()
    paths = sorted(lab.out.rglob("run.json"))
    changes = ({"status": "failed", "notes": ["\x1b[2J"]}, {"init": "\x1b[2J"}, {"notes": 5})
    for path, changed in zip(paths, changes, strict=False):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    paths[3].write_text("[" * 100_000)
    paths[3].with_name("metrics.json").write_text(f'{{"iteration": {10**400}}}\n' + "[" * 10_000)
    capsys.readouterr()
    lab.run("--status")
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    assert printed.count("\\x1b[2J") == 2 and printed.count("not a valid run record") == 2


def snapshot(lab: Lab) -> dict:
    return {path: path.stat().st_mtime_ns for path in lab.out.rglob("*")}


@pytest.mark.slow
@pytest.mark.race
def test_status_only_reads(lab, capsys):
    runner = lab.start(delay=0.3)
    lab.wait_for(lambda: len(lab.count("iteration-2")) == 2)
    run_suite.main([str(lab.path / "suite.yaml"), "--output", str(lab.out), "--status"])
    shown = capsys.readouterr().out
    assert "small: 2 running, 6 waiting of 8, about 0:" in shown
    running = re.findall(r" running +(\d)/8 +(\d+)%", shown)
    assert len(running) == 2, shown
    for at, percent in running:  # how far they are depends on how fast this test is
        assert int(at) >= 2 and abs(int(percent) - 12.5 * int(at)) <= 0.5
    runner.terminate()
    runner.wait(30)
    before = snapshot(lab)
    lab.run("--status")
    assert snapshot(lab) == before
    assert "2 interrupted, 6 waiting of 8; nothing is running" in capsys.readouterr().out
    lab.run()
    capsys.readouterr()
    lab.run("--status")
    assert capsys.readouterr().out.endswith("small: 8 done of 8\n")


def dry_run(lab: Lab, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    lab.run("--dry-run", *more)
    return capsys.readouterr().out


def test_dry_run_lists_and_writes_nothing(lab, capsys):
    shown = dry_run(lab, capsys)
    assert not lab.out.exists() and not lab.events()
    assert shown.count("unknown  ") >= 8 and "CPU hours:" not in shown
    assert "\n8 to do; how long that takes is not known (a, b)" in shown
    sizes = "8.0 GB with --keep final, 16.0 GB with last, 64.0 GB with all; "
    assert f"disk for checkpoints: {sizes}" in shown
    shown = dry_run(lab, capsys, "--seconds-per-iteration", "a=450")
    assert "8 to do: 4.00 CPU hours; how long 4 of them take is not known (b)" in shown
    stated = ("--seconds-per-iteration", "450")
    shown = dry_run(lab, capsys, *stated, "--seconds-per-iteration", "b=225")
    # 4 runs of 8 iterations of 450 s take 4 hours, 4 of 225 s take 2; two run at a time.
    assert "8 to do: 6.00 CPU hours, about 3:00:00 here" in shown
    assert shown.count("stated") == 8
    lab.run("--trials", "1")
    before = snapshot(lab)
    shown = dry_run(lab, capsys, *stated)
    # The records of the fake runs have 4 s for 8 iterations.
    assert "4 to do: 0.00 CPU hours, about 0:08 here" in shown and "measured, 2 runs" in shown
    assert snapshot(lab) == before
    lab.run()
    assert "\n0 to do\n" in dry_run(lab, capsys)


def test_dry_run_says_what_gap_the_runs_can_find(lab, capsys):
    """The gap is in standard deviations, and in points once runs are done."""
    assert "  a, 2 runs per row: 10.39 standard deviations\n" in dry_run(lab, capsys)
    shown = dry_run(lab, capsys, "--trials", "1")
    assert "  a, 1 run per row: none; 2 find 10.39 standard deviations" in shown
    lab.run()
    shown = dry_run(lab, capsys)
    [table] = [t for t in tables_so_far(collect([lab.out]), None) if t.title == "a"]
    std = pooled_std([row.cells["bbox/AP"] for row in table.rows])
    assert f"    {smallest_gap(2) * std:.2f} AP by the 4 embedded runs so far (" in shown
    assert f"0.5 takes {runs_needed(0.5 / std):.0f}" in shown


def test_weights_that_are_downloaded(lab, capsys, monkeypatch):
    """Weights are downloaded once, not by a dry run, and the copy's sidecar has their address."""
    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(lab.path / "cache"))
    with file_server({"/r50.pth": b"weights"}) as served:
        digest = hashlib.sha256(b"weights").hexdigest()
        given = ("--init", f"{served.url}/r50.pth#sha256={digest}", "--trials", "1")
        shown = dry_run(lab, capsys, *given, "--baseline", "r50")
        assert f"would download r50: {served.url}/r50.pth" in shown and "\n6 to do" in shown
        assert not served.requests
        lab.run(*given)
        assert len(served.requests) == 1
    (note,) = locate_weights(lab.out / "inits" / "r50.pth").notes
    assert served.url in note and digest in note


def test_what_is_left_of_started_and_failed_runs(failing_lab, capsys):
    """The rest of a started run is to do, and a failed one only with --retry-failed."""
    lab = failing_lab
    with pytest.raises(SuiteFailed):
        lab.run()
    for path in lab.out.glob("runs/*/mine/*/run.json"):
        path.unlink()
    for path in lab.out.glob("runs/*/mine/*/metrics.json"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    # Two runs of 8 iterations of 900 s have done 6, two have failed after the second.
    for more, line in (((), "2 to do: 1.00"), (("--retry-failed",), "4 to do: 4.00")):
        shown = dry_run(lab, capsys, "--seconds-per-iteration", "900", *more)
        assert f"\n{line} CPU hours, about " in shown


def test_speeds_that_do_not_count(lab, capsys):
    """Speeds of other hardware, and of the last process of a resumed run, do not count."""

    def edit_records(pattern: str, **changes) -> None:
        for path in lab.out.glob(f"runs/{pattern}/run.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    lab.run("--trials", "1")
    edit_records("*/mine/*", seconds=0.08)
    for path in lab.out.glob("runs/*/mine/*/.claim"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"iteration": 7.0}))
    shown = dry_run(lab, capsys)
    assert shown.count("measured, 1 run ") == 8 and ", about 0:08 here" in shown
    edit_records("*/random/*", provenance={"hardware": {"gpus": ["a GPU"]}}, seconds=8000.0)
    assert "4 to do; how long that takes is not known (a, b)" in dry_run(lab, capsys)


@pytest.mark.slow
@pytest.mark.race
def test_hours_from_timed_iterations(lab, capsys, monkeypatch):
    """Each task is timed once, in a temporary folder; a note names a run that ends too early."""
    monkeypatch.setattr(forecast, "ITERATIONS", 4)
    capsys.readouterr()
    lab.run("--dry-run", "--time", "--seconds-per-iteration", "b=0.1", delay=0.2)
    shown = capsys.readouterr().out
    assert shown.count("timing ") == 1 and "timing a random seed 0" in shown
    assert [path.name for path in lab.out.iterdir()] == [forecast.SPEEDS_NAME]
    [seconds] = {float(line.split()[6]) for line in shown.splitlines() if "measured, 1 run" in line}
    assert not lab.count("done") and seconds == 0.0, "some seconds are no hours"
    left = re.search(r"about 0:0(\d) here", shown)
    # Four runs of 8 iterations of 0.2 s and four of 0.1 s, two of which run at a time.
    assert left and 4 <= int(left[1]) <= 7
    lab.run("--dry-run", "--time", "--trials", "3")  # the speed of a is kept, that of b is new
    shown = capsys.readouterr().out
    assert shown.count("timing ") == 1 and "timing b random seed 0" in shown
    monkeypatch.setattr(forecast, "ITERATIONS", 40)
    monkeypatch.setattr(run_suite, "project_version", lambda: "of other code")
    lab.run("--dry-run", "--time", "--seconds-per-iteration", "b=0.1")
    shown = capsys.readouterr().out
    assert "note: a random seed 0 (embedded) could not be timed: it ended without a record" in shown
    with pytest.raises(UserError, match="--time: times runs on this machine"):
        lab.run("--plan", "plan.json", "--time", "--executor", "auto")


def test_nothing_starts_that_would_fail(lab, capsys):
    with pytest.raises(UserError, match="nothing was started: 2 problems") as error:
        lab.run(problems=["a from mine: no such dataset", "b: too wide"])
    assert error.value.exit_code == 2
    printed = capsys.readouterr().err
    assert "problem: a from mine: no such dataset\nproblem: b: too wide\n" in printed
    with pytest.raises(UserError, match="nothing was started: b: too wide"):
        lab.run("--dry-run", problems=["b: too wide"])
    shown = capsys.readouterr().out
    assert "\n8 to do; how long that takes" in shown and "disk for checkpoints: " in shown
    assert "checked every task" not in shown and not lab.events() and not lab.out.exists()


def test_what_two_calls_must_agree_on(lab):
    lab.run("--trials", "1")
    (lab.path / "mine.pth").write_text("other weights under the same name")
    for more in ((), ("--dry-run",)):
        with pytest.raises(UserError, match=r"inits\.mine: "):
            lab.run(*more, problems=["the folder is checked before the runs"])
    suite = load_suite(lab.path / "suite.yaml")
    inits = {"mine": Init("/w", "a" * 64)}
    more = {**inits, "new": Init("/n", "b" * 64)}

    def content(inits=inits, trials=2, engines=("embedded",), gpus=None, version="1", **keys):
        tasks = tuple(replace(task, overrides=tuple(keys.items())) for task in suite.tasks)
        own = with_options(replace(suite, tasks=tasks), {}, {}, trials)
        return suite_content(own, inits, engines, gpus=gpus, version=version)

    full, moved, half = (
        content(**{"DATASETS.COCO_TRAIN_JSON": path})
        for path in ("/data/full.json", "/other/full.json", "/data/half.json")
    )
    first = content()
    for before, now in (
        (first, first),
        (first, content(more, 3, ("embedded", "detectron2"))),
        (first, content(**{"DATASETS.VOC_DIR": "/data"})),
        (full, moved),
    ):
        check_agreement(before, now, "here")
    for before, now, text in (
        (first, content(more, engines=("detectron2",)), "engines: "),
        (first, content(trials=1), r"trials\.a: 2 before"),
        (first, content(gpus=4), "gpus_per_run: None before, 4 now"),
        (first, content(version="2"), "version: 1 before, 2 now"),
        (first, content({}), r"inits\.mine: "),
        (full, half, r"COCO_TRAIN_JSON: full\.json before, half\.json now"),
    ):
        with pytest.raises(UserError, match=f"here .*{text}"):
            check_agreement(before, now, "here")


@pytest.mark.slow
@pytest.mark.parametrize("record", ["of other weights", "damaged"])
def test_a_folder_of_another_run_is_not_continued(lab, capsys, record):
    """Even --retry-failed does not resume from the checkpoints of another run."""
    lab.run("--trials", "1")
    [path] = lab.out.glob("runs/a/mine/*/run.json")
    whole = path.read_text()
    other = json.dumps(json.loads(whole) | {"weights_sha256": "f" * 64})
    path.write_text("{" if record == "damaged" else other)
    before, lab.with_tables = lab.events(), True
    with pytest.raises(SuiteFailed, match="1 of 4"):
        lab.run("--trials", "1", "--retry-failed")
    assert lab.events() == before and "f" * 64 not in lab.tables()["runs.csv"].decode()
    printed = capsys.readouterr().err
    assert f"; remove {path.parent}, and the same command" in printed
    assert record == "damaged" or "weights_sha256 is ffff" in printed
    shutil.rmtree(path.parent)
    lab.with_tables = False
    lab.run("--trials", "1")
    assert path.read_text() == whole and len(lab.count("start")) == 4
    assert not lab.count("resume")


def test_which_checkpoints_stay(lab):
    every = tuple(f"model_{number:07d}.pth" for number in range(1, ITERATIONS + 1))
    lab.run("--trials", "1", "--keep", "all")
    assert kept(lab) == {every}
    lab.run()
    assert kept(lab) == {every, every[-1:]}, "runs that were done keep all"
    lab.run("--keep", "last")
    assert kept(lab) == {every[-2:], every[-1:]}, "unless a policy is given"
    lab.run("--keep", "final")
    assert kept(lab) == {every[-1:]}
