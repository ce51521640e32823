"""Safe reading of Detectron2's model-zoo configs."""

import json
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import BASE_KEY

from moco.common.errors import UserError
from moco.common.files import read_text


def plain_copy(path: Path, scratch: Path) -> Path:
    """Copy a config and its bases into `scratch`, with YAML's Python tags replaced by their values.

    Nothing in the files is evaluated. Detectron2's `model_zoo.get_config_file` is not used, because
    it needs an older setuptools.
    """
    content = _ZooLoader(read_text(path)).get_single_data()
    if BASE_KEY in content:
        base = (path.parent / content[BASE_KEY]).resolve()
        content[BASE_KEY] = str(plain_copy(base, scratch))
    copy = scratch / path.name
    copy.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML, too
    return copy


class _ZooLoader(yaml.SafeLoader):
    """Safe YAML loader with the values of the expressions in the model zoo's configs."""


def _known_value(loader: _ZooLoader, node: yaml.SequenceNode) -> Any:
    (text,) = loader.construct_sequence(node)
    if text not in _EXPRESSIONS:
        raise UserError(
            f"the model-zoo config contains the expression {text!r}, which is not evaluated"
        )
    return _EXPRESSIONS[text]


_EXPRESSIONS = {
    "[[x, x * 2**(1.0/3), x * 2**(2.0/3) ] for x in [32, 64, 128, 256, 512 ]]": [
        [x, x * 2 ** (1.0 / 3), x * 2 ** (2.0 / 3)] for x in (32, 64, 128, 256, 512)
    ]
}
_ZooLoader.add_constructor("tag:yaml.org,2002:python/object/apply:eval", _known_value)
