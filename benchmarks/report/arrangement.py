"""Our sections in the order and the columns of the paper's tables, for LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report.content import Section, Shown, printed
from benchmarks.report.paper import OWN, PaperTable, load_paper
from benchmarks.report.style import MISSING
from detection.evaluation.metrics import titles


@dataclass(frozen=True)
class Panel:
    """One (sub-)table of the paper and our sections for it; None: not in the paper."""

    paper: PaperTable | None
    ours: tuple[Section, ...]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Metric and method of the paper's columns (without those that are no result)."""
        if self.paper is None:
            return [(metric, OWN) for metric in self.ours[0].table.metrics]
        pairs = zip(self.paper.metrics, self.paper.methods, strict=True)
        return [(metric, method) for metric, method in pairs if metric is not None]

    @property
    def titles(self) -> Sequence[str]:
        return titles([metric for metric, _ in self.columns])

    @property
    def methods(self) -> list[str]:
        """Heads of the columns; empty where all are of the paper's own pre-training."""
        if {method for _, method in self.columns} == {OWN}:
            return []
        return ["MoCo" if method == OWN else method for _, method in self.columns]

    def rows(self, section: Section) -> list[list[Shown]]:
        """Our rows: name, n, and a cell per column, empty in those of other methods."""
        found = []
        for row in section.table.rows:
            cells = [
                section.cell(row, metric)
                if method == OWN and metric in row.cells
                else Shown(MISSING)
                for metric, method in self.columns
            ]
            found.append(section.row(row, cells))
        return found

    @property
    def paper_rows(self) -> list[list[Shown]]:
        """The paper's rows in the same columns."""
        if self.paper is None:
            return []
        trials, metrics = Shown(str(self.paper.trials or MISSING)), self.paper.metrics
        rows = []
        for row in self.paper.rows:
            numbers = zip(row.values, row.gaps, metrics, strict=True)
            cells = [printed(value, gap) for value, gap, metric in numbers if metric is not None]
            rows.append([Shown(row.name), trials, *cells])
        return rows


def arrange(sections: Sequence[Section]) -> list[list[Panel]]:
    """Sections as the paper has its tables: in its order, the parts of one number together.

    A task that several of the paper's tables are about is in each; one that none is about is
    alone, at the end.
    """
    floats: dict[str, list[Panel]] = {}
    for paper in load_paper()[1]:
        if ours := tuple(section for section in sections if paper in section.papers):
            name = paper.cite if paper.number is None else str(paper.number)
            floats.setdefault(name, []).append(Panel(paper, ours))
    return [*floats.values(), *([Panel(None, (s,))] for s in sections if not s.papers)]
