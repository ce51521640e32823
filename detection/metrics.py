"""Names and units of results, the same from every engine to every table.

``bbox/AP``, ``bbox/AP50``, ``bbox/AP75``: AP in 0..100; on VOC, AP is the mean over IoU .50:.05:.95
of the VOC AP. ``bbox/AP-<class>`` and ``bbox/AP50-<class>``: the same for one class.
"""

import math
from collections.abc import Mapping

HEADLINE = ("bbox/AP", "bbox/AP50", "bbox/AP75")


def for_record(metrics: Mapping[str, float]) -> tuple[dict[str, float | None], list[str]]:
    """Metrics as a run record stores them, and a note where a number is missing.

    NaN is not JSON and no result: it becomes None. Per-class numbers are rounded to 1e-6.

    Raises:
        ValueError: a headline metric is absent or outside 0..100 (a fault of the engine).
    """
    stored: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not math.isfinite(value):
            stored[name] = None
        elif 0 <= value <= 100:
            stored[name] = round(float(value), 6)
        else:
            raise ValueError(f"{name}: got {value}, expected 0..100")
    absent = [name for name in HEADLINE if name not in stored]
    if absent:
        raise ValueError(f"the engine reported no {', '.join(absent)}")
    missing = [name for name, value in stored.items() if value is None]
    notes = [f"not a number, so null: {', '.join(missing)}"] if missing else []
    return stored, notes


def headline(metrics: Mapping[str, float | None]) -> str:
    """``AP 12.3  AP50 30.1  AP75 7.9``."""
    shown = []
    for name in HEADLINE:
        value = metrics[name]
        shown.append(f"{name.removeprefix('bbox/')} {'-' if value is None else f'{value:.2f}'}")
    return "  ".join(shown)
