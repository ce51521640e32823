"""Hostile records: every payload through every renderer, and records that cannot be."""

import csv
import io
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from benchmarks import make_table, plot_curves
from benchmarks.report import export
from benchmarks.report.analysis import precision_recall
from benchmarks.report.plots import Plot
from benchmarks.report.records import FinishedRun, Results, Unusable
from benchmarks.report.report import Report
from benchmarks.report.style import figure_label, file_names, markdown
from benchmarks.report.table import aggregate
from moco.common.errors import UserError, run_cli
from tests.benchmarks.report.fake_runs import record, report, write_run

ORDINARY = "moco_v2 (200ep)"
PAYLOADS = {
    "parent folder": "../../../escaped",
    "absolute path": "/escaped/x",
    "dots": "..",
    "null byte": "a\0b",
    "long": "x" * 5000,
    "mathtext": "$\\frac{1}{$",
    "one dollar": "5$",
    "hidden in legends": "_nolegend_",
    "script": "<script>alert(1)</script>",
    "attribute": "\" onmouseover='x' x=\"",
    "closing tags": "</td></table><!--",
    "entity": "&lt;b&gt;",
    "new lines": "a\n\n# heading\n\n| b | c |\r\nd\u2028e\x0bf",
    "pipes": "a | b \\| c \\",
    "markdown": "[x](javascript:alert(1)) ![i](http://e) **b** `c` ~~d~~ _e_ $f$",
    "heading": "# heading",
    "list": "- item",
    "numbered list": "1. item",
    "underline": "===",
    "formula": "=cmd|' /C calc'!A0",
    "plus": "+1+cmd|' /C calc'!A0",
    "minus": "-1+cmd|' /C calc'!A0",
    "at": "@SUM(1+1)",
    "tab": "\t=1+1",
    "carriage return": "\r=1+1",
    "full width": "\uff1d1+1",
    "quotes": '","=1+1',
    "latex": "\\input{/etc/passwd} }{ % & # _ ^ ~ \\end{document}",
    "row's argument": "[1pt]",
    "star": "*",
    "another script": "\u6570 \u05d0\u05d1",
    "terminal": "\x1b]0;owned\x07\x1b[2Jx\x08\x7f",
    "C1": "\x9b31mred",
    "bidirectional": "a\u202eb\u2066c\u200fd\u061c",
    "surrogate": "a\ud800b",
}


def made(text: str) -> Report:
    """Make a report of finished runs and a failed one with `text` in every text of a record."""
    changes = {
        "task": text,
        "engine": text,
        "weights_source": text,
        "notes": [text],
        "recipe": {"label": text, "deviations": [text]},
        "config": {"DATASETS.TEST": [text], "SOLVER.MAX_EPOCHS": text, text: text},
    }
    runs = [
        FinishedRun(Path("runs", text[:200]), record(**changes, **of_run))
        for seed, version in ((0, "1"), (1, text))
        for provenance in (
            {
                "versions": {text: version, "torch": "2"},
                "git": text,
                "utc": text,
                "hardware": {"cpu": text, "gpus": [text] * seed},
            },
        )
        for of_run in (
            {"seed": seed, "provenance": provenance, "init": "random"},
            {"seed": seed, "provenance": provenance, "init": text, "weights_sha256": text},
        )
    ]
    unusable = Unusable(Path("runs", text[:200]), f"failed: {text}")
    return Report(aggregate(runs, baseline=text), Results(tuple(runs), (), (unusable,)))


def outputs(text: str) -> dict[str, str]:
    """Render every file of a report, and what is printed; the comparison without its row's name."""
    whole = made(text)
    files = {k: v for _, renderer in export.RENDERERS for k, v in renderer(whole).items()}
    [comparison] = whole.compared.values()
    assert re.fullmatch(r"compare-[\w.-]+\.html", comparison, re.ASCII)
    return files | {"compare.html": files.pop(comparison)}


class Structure(HTMLParser):
    """Tags with the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[object] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag):
        self.found.append(tag)

    def handle_comment(self, data):
        self.found.append("comment")


def html_structure(text: str) -> object:
    return Structure(text).found


def markdown_structure(text: str) -> object:
    """Per line how it begins and how much of each kind of markup it has."""
    found = []
    for line in text.splitlines():
        line = re.sub(r'(\]\([^)]*|id="[^"]*)', "", line)  # anchors, of letters and _.:- alone
        bare = re.sub(r"\\[!-/:-@\[-`{-~]", "x", line)
        start = re.match(r"(#+|[-+*>]|\d+[.)]|[=-]+$|\||)(?=\s|$)", bare)
        active = Counter(re.findall(r"[<`*\[|~$]|(?<!\w)_|_(?!\w)", bare))
        found.append((start[0] if start else "", active, bool(line)))
    return found


def csv_structure(text: str) -> object:
    rows = list(csv.reader(io.StringIO(text)))
    for row in rows:
        for cell in row:
            is_number = re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", cell)
            assert is_number or not cell.strip().startswith(tuple("=+-@\t\r\uff1d")), cell
    return len(rows), Counter(map(len, rows))


def latex_structure(text: str) -> object:
    """Return commands other than those for characters, and check that no row has an argument."""
    for line in text.splitlines():
        assert not re.match(r"\s*[\[*]", line), line
    bare = re.sub(r"\$(\\(pm|dagger|to)|[-<>|])\$|\\text(backslash|ascii\w+)\{\}", "", text)
    bare = re.sub(r"\\[{}%&#_$]", "", bare)
    depth = 0
    for char in bare:
        depth += {"{": 1, "}": -1}.get(char, 0)
        assert depth >= 0
    assert depth == 0 and "^" not in bare and "~" not in bare
    return re.findall(r"\\[A-Za-z]+|\\\\|[%&$]", bare), len(text.splitlines())


STRUCTURES: dict[str, Callable[[str], object]] = {
    "md": markdown_structure,
    "csv": csv_structure,
    "tex": latex_structure,
    "html": html_structure,
    "txt": lambda text: len(text.splitlines()),
}


@pytest.fixture(scope="module")
def ordinary() -> Iterator[dict[str, str]]:
    """Render an ordinary name without figures, which have a test of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plot, "svg", "<svg/>")
        yield outputs(ORDINARY)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_is_text_in_every_output(payload, ordinary):
    """It changes nothing but texts: the document's structure is that of an ordinary name's."""
    found = outputs(PAYLOADS[payload])
    assert found.keys() == ordinary.keys()
    for name, text in found.items():
        assert not {char for char in text if not char.isprintable() and char != "\n"}, name
        text.encode()
        structure = STRUCTURES[name.rpartition(".")[2]]
        assert structure(text) == structure(ordinary[name]), name


def test_ordinary_names_stay_as_they_are(ordinary):
    for name, text in ordinary.items():
        assert ORDINARY.replace("_", "\\_" if name.endswith("tex") else "_") in text, name
    for name in (ORDINARY, "ResNet-50, lr=0.03", "faster_rcnn_R_50_C4_24k", "10% of é"):
        assert markdown(name) == figure_label(name) == name


def test_names_of_files_are_all_different_and_never_paths():
    keys = [(text,) for text in PAYLOADS.values()]
    keys += [("a b",), ("a/b",), ("a_b",), ("A_b",), ("a", "b"), ("a-b",), ("a_b-0123abcd",)]
    names = file_names(keys)
    assert len({name.lower() for name in names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{,120}", f"loss-{n}") for n in names)
    ordinary = ("faster_rcnn_R_50_C4_24k", "lvis_v0.5_val", "embedded")
    assert file_names([ordinary, ("t",)]) == ["-".join(ordinary), "t"]


@pytest.mark.slow
def test_figures_of_all_payloads_and_nothing_outside_of_the_folder(tmp_path, capsys):
    """The whole command, figures included: each payload a row and a class, two of them tasks."""
    evil = "../../$\\frac{$\n<b>"
    for seed in (0, 1):
        for number, text in enumerate(["random", *PAYLOADS.values()]):
            write_run(
                tmp_path / "runs" / f"{number}-{seed}",
                losses=[2.0, 1.0],
                **{"task": evil, "init": text, "seed": seed},
                weights_sha256=None if text == "random" else str(number),
                metrics={"bbox/AP": number + seed / 2, f"bbox/AP-{text}": 1.0},
            )
    write_run(tmp_path / "runs" / "other", task=evil.replace("b", "B"), iterations=100)
    before = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    out = tmp_path / "a" / "b" / "out"
    make_table.main([str(tmp_path / "runs"), "--out", str(out)])
    printed = capsys.readouterr().out
    assert not {char for char in printed if not char.isprintable() and char != "\n"}
    written = [*out.iterdir()]
    assert all(map(Path.is_file, written)) and f"page: {out / 'table.html'}" in printed
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} - before == {
        tmp_path / "a",
        tmp_path / "a" / "b",
    }
    assert sum(path.suffix == ".png" for path in written) == 4
    svgs = [path for path in written if path.suffix == ".svg"]
    assert len(svgs) == 4 and all(map(ElementTree.parse, svgs))


def error_of(main, capsys, *arguments: object) -> str:
    """Run a command that ends with a user's error and return the line that it prints."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        run_cli(lambda argv: main(sys.argv[1:]))
    message = capsys.readouterr().err
    assert exit.value.code in (2, 3) and message.count("\n") == 1 and len(message) < 1000
    assert "unexpected" not in message and message.rstrip("\n").isprintable()
    return message


HUGE, NAN, INF = 10**400, float("nan"), float("inf")


def test_errors_show_no_control_characters(tmp_path, capsys):
    for seed in (0, 1):
        write_run(tmp_path / f"\x1b[2J{seed}", task="\x1b[2J\u202e\ud800", seed=0)
    assert "\\x1b[2J\\u202e\\ud800: " in error_of(make_table.main, capsys, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"iteration": 1e999, "loss": 1}',
        '{"iteration": 1, "epoch": NaN, "loss": 1}',
        "[" * 100_000,
        "5",
        '{"iteration": 1, "loss": [1]}',
        '{"iteration": "x", "loss": 1}',
        f'{{"iteration": {10**400}, "epoch": 1, "loss": 1}}'.replace("1, ", f"{10**400}, ", 1),
        f'{{"iteration": 1, "epoch": 1, "loss": {10**400}}}',
        "\x1b",
        "\xff",
        '{"iteration": 1, "epoch": 1, "loss": 1}, {}',
    ],
)
def test_metrics_that_are_none_are_one_line(tmp_path, capsys, line):
    (tmp_path / "metrics.json").write_bytes(line.encode("latin1") + b"\n")
    assert "metrics.json: " in error_of(plot_curves.main, capsys, tmp_path)


def test_curves_beyond_all_bounds_and_runs_with_hostile_names_are_plotted(tmp_path):
    for name in ("$\\frac{$", "_a\nb"):
        (tmp_path / name).mkdir()
        values = ("1", "NaN", "Infinity", "1e308", "-1e308", "1e99")
        rows = [f'{{"iteration": {i}, "epoch": {i}, "loss": {v}}}' for i, v in enumerate(values)]
        (tmp_path / name / "metrics.json").write_text("\n".join(rows))
    out = tmp_path / "curves.png"
    plot_curves.main([*(str(p) for p in tmp_path.iterdir()), "--output", str(out)])
    assert Image.open(out).size[0] > 100


def test_predictions_are_read_in_the_runs_folder_only(tmp_path):
    (tmp_path / "predictions.json").write_text("[]")
    (tmp_path / "run" / "inference").mkdir(parents=True)
    for name in ("../../predictions", str(tmp_path / "predictions"), "x" * 5000, "a\0b"):
        run = FinishedRun(tmp_path / "run", record(config={"DATASETS.TEST": [name]}))
        with pytest.raises(UserError, match="no predictions"):
            precision_recall(run)


def test_a_sample_image_is_decoded_as_any_other(tmp_path, monkeypatch):
    """PostScript, which PIL hands to another program, and more pixels than fit into memory."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("it was run"))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    header = b"IHDR" + struct.pack(">IIBBBBB", 1 << 16, 1 << 16, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header
    bomb += struct.pack(">I", zlib.crc32(header)) + struct.pack(">I", 0) + b"IDAT"
    for content in (postscript, bomb, b"not an image"):
        folder = tmp_path / str(len(content))
        samples = write_run(folder / "run") / "inference" / "visualize"
        samples.mkdir(parents=True)
        (samples / "x.jpg").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.jpg: "):
            export.html(report(folder))
