"""Lookup of configuration keys in the tasks that have rows in a report."""

from typing import Any

from detection.config.keys import KEYS as DETECTION_KEYS
from moco.engine.keys import CLASSIFICATION
from moco.engine.keys import KEYS as TRAINING_KEYS


def names_where(**flags: Any) -> tuple[str, ...]:
    """Return the keys of detection and classification with the flags of `moco.common.keys.Key`."""
    tables = DETECTION_KEYS, TRAINING_KEYS.of(CLASSIFICATION)
    return tuple(dict.fromkeys(name for table in tables for name in table.where(**flags).names))
