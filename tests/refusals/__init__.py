"""Rows of what is refused, a file for each group of commands; `tests/test_refusals.py` runs them.

`moco-transfer` is not written. Paths are relative to the folder of the row: a name that
`tests/oracles/refused_files.py` has is made there before, and `edit` may change what was made.
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
