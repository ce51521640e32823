"""Golden names of experiments: defaults, protocol hashes, recipe labels, run ids.

A record is compared with others by the hash of its protocol, and a suite finds its finished runs by
their ids. tests/golden/regenerate_protocols.py writes what is expected.
"""

import json

import pytest

from moco.common.cfgnode import same_value
from tests.golden import regenerate_protocols as protocols


@pytest.fixture(scope="module")
def expected():
    return json.loads(protocols.FILE.read_text(encoding="utf-8"))


def test_no_default_has_changed(expected):
    """A hash leaves out what is at its default, so another default would go unnoticed there."""
    now = protocols.defaults()
    for table, keys in expected["defaults"].items():
        for key, value in keys.items():
            assert same_value(now[table][key], value), (table, key)
        assert now[table].keys() == keys.keys(), "add new keys by tests.golden.regenerate_protocols"


def test_tasks_of_the_embedded_engine(expected):
    tasks = protocols.tasks("embedded")
    assert len(tasks) == len(expected["tasks"]) - 1  # no DensePose
    assert {name: expected["tasks"][name] for name in tasks} == tasks


@pytest.mark.detectron2
def test_tasks_of_detectron2(detectron2, expected):
    assert protocols.tasks("detectron2") == expected["tasks"]


def test_recipes_of_pretraining_and_classification(expected):
    assert protocols.trainings() == expected["trainings"]


def test_run_ids(expected):
    assert protocols.run_ids() == expected["run_ids"]
