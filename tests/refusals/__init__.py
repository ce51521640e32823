"""Rows of refused inputs, one file per group of commands; `tests/test_refusals.py` runs them.

Commands are written without `moco-transfer`. Paths are relative to the folder of the row: files
that `tests/oracles/refused_files.py` knows are made there first, and `edit` may change them.
"""

from tests.refusals.annotations import ANNOTATIONS
from tests.refusals.convert import CONVERT
from tests.refusals.datasets import DATASETS
from tests.refusals.detection import DETECTION
from tests.refusals.models import MODELS
from tests.refusals.pretrain import PRETRAIN
from tests.refusals.report import REPORT
from tests.refusals.rows import Row
from tests.refusals.suites import SUITES

ALL = [*PRETRAIN, *CONVERT, *DETECTION, *MODELS, *DATASETS, *ANNOTATIONS, *SUITES, *REPORT]

__all__ = ["ALL", "Row"]
