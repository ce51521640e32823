"""Lookup in registries."""

import pytest
from fvcore.common.registry import Registry

from moco.common.errors import UserError
from moco.common.registry import lookup

FRUIT = Registry("FRUIT")


@FRUIT.register()
def pear() -> str:
    return "a pear"


@FRUIT.register()
def apple() -> str:
    return "an apple"


def test_what_is_registered_is_found_and_the_rest_is_refused_with_the_choices():
    assert lookup(FRUIT, "pear", "FRUIT.NAME")() == "a pear"
    with pytest.raises(UserError) as error:
        lookup(FRUIT, "plum", "FRUIT.NAME")
    for word in ("FRUIT.NAME", "plum", "apple, pear"):
        assert word in str(error.value)
