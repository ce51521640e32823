"""Checkpoints with objects of any class beside their tensors load, and no class is ever touched.

The files are written with the real classes where they are installed, else with one of the same name
and the same way of being pickled.
"""

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from convert.read import is_array
from moco.common.errors import DataError
from moco.common.files import harmful_objects, load_pickle, load_torch
from moco.common.unpickler import Inert

ROOT = Path(__file__).resolve().parents[3]
STATE = {"conv1.weight": torch.ones(2)}


class _Statistics:
    """As mmengine/logging/history_buffer.py: arrays, and its own methods by name."""

    def __init__(self):
        self.max_length, self._log_history = 10, np.array([1.0, 2.0])
        self.statistics_methods = {"mean": type(self).mean}

    def mean(self):
        raise AssertionError("never called")


class _AttrDict(dict):
    """As vissl/config/attr_dict.py, addict and mmengine's: a dict with a state of its own."""

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        raise AssertionError("never called")


class _SelfDict(dict):
    """The AttrDict of many scripts, and easydict's: its attributes are its items."""

    def __init__(self, *args, **kwargs):
        dict.__init__(self, *args, **kwargs)
        self.__dict__ = self


@pytest.fixture
def named(monkeypatch):
    """`named("module.Class", like)`: a class of that name that pickle finds, like another."""

    def make(full, like):
        module, name = full.rsplit(".", 1)
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            parent = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        members = {k: v for k, v in vars(like).items() if k not in ("__dict__", "__weakref__")}
        cls = type(name, like.__bases__, {**members, "__module__": module, "__qualname__": name})
        for method in vars(cls).values():
            if isinstance(method, types.FunctionType):
                method.__module__ = module
                method.__qualname__ = f"{name}.{method.__name__}"
        setattr(sys.modules[module], name, cls)
        return cls

    return make


@pytest.fixture
def read(tmp_path):
    """Write a checkpoint with a value beside its state dict in every format; what each reads."""

    def both(value, protocols=(2, 3, 4, 5)):
        found = []
        for protocol in protocols:
            for zipped in (True, False):
                path = tmp_path / "x.pth"
                torch.save(
                    {"state_dict": STATE, "extra": value},
                    path,
                    pickle_protocol=protocol,
                    _use_new_zipfile_serialization=zipped,
                )
                found.append(load_torch(path, set()))
            (tmp_path / "x.pkl").write_bytes(pickle.dumps({"extra": value}, protocol))
            found.append(load_pickle(tmp_path / "x.pkl", set()))
        for content in found:
            assert torch.equal(content.get("state_dict", STATE)["conv1.weight"], torch.ones(2))
        return [content["extra"] for content in found]

    return both


def test_argparse(read, tmp_path):
    """DINO's, SimSiam's, PyContrast's and timm's "args"."""
    args = argparse.Namespace(
        arch="resnet50", lr=0.03, schedule=[120, 160], path=pathlib.Path("/x")
    )
    for loaded in read(args):
        assert type(loaded) is Inert and loaded.name == "argparse.Namespace"
        assert loaded.pop("path").args == ("/", "x")
        assert loaded == {"arch": "resnet50", "lr": 0.03, "schedule": [120, 160]}
    # Protocols 0 and 1 make objects in another way; torch.save cannot write tensors with them.
    assert pickle.dumps(args, 0).startswith(b"ccopy_reg\n_reconstructor")
    for protocol in (0, 1):
        (tmp_path / "x").write_bytes(pickle.dumps(argparse.Namespace(arch="r"), protocol))
        assert load_pickle(tmp_path / "x", set()) == {"arch": "r"}


def test_omegaconf(read):
    """Hydra's configurations: of VISSL and solo-learn; each node knows its parent."""
    omegaconf = pytest.importorskip("omegaconf")
    config = {"a": 1, "b": {"c": [1, "x", None]}, "f": 1.5, "g": "${a}", "h": True}
    for loaded in read(omegaconf.OmegaConf.create(config)):
        assert loaded.name == "omegaconf.dictconfig.DictConfig"
        items = loaded["_content"]
        assert items["a"]["_val"] == 1 and items["g"]["_val"] == "${a}"
        (one, text, none) = items["b"]["_content"]["c"]["_content"]
        assert (one["_val"], text["_val"], none["_val"]) == (1, "x", None)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("pytorch_lightning.utilities.parsing.AttributeDict", _AttrDict),
        ("lightning.pytorch.utilities.parsing.AttributeDict", _AttrDict),
        ("vissl.config.attr_dict.AttrDict", _AttrDict),
        ("vissl.utils.hydra_config.AttrDict", _AttrDict),
        ("mmengine.config.config.ConfigDict", _AttrDict),
        ("mmcv.utils.config.ConfigDict", _AttrDict),
        ("addict.addict.Dict", _AttrDict),
        ("detectron2.config.config.CfgNode", _AttrDict),
        ("easydict.EasyDict", _SelfDict),
    ],
)
def test_dictionaries_of_others(read, named, name, like):
    written = named(name, like)
    value = written({"lr": 0.1, "inner": written({"a": [1]})})
    for loaded in read(value):
        assert type(loaded) is Inert and loaded.name == name
        assert loaded == {"lr": 0.1, "inner": {"a": [1]}}


def test_a_history_buffer(read, named):
    """MMSelfSup's and MMPretrain's message_hub; its methods are names without a meaning."""
    buffer = named("mmengine.logging.history_buffer.HistoryBuffer", _Statistics)
    for loaded in read({"loss": buffer()}):
        assert loaded["loss"]["_log_history"].tolist() == [1.0, 2.0]
        method = loaded["loss"]["statistics_methods"]["mean"]
        if method.name.endswith(".getattr"):  # as protocols below 4 spell it
            method = Inert(f"{method.args[0].name}.{method.args[1]}")
        assert method.name == "mmengine.logging.history_buffer.HistoryBuffer.mean"


def test_classes_as_keys(read, named):
    """Lightning up to 1.4 has its callbacks' states under the callbacks' classes."""
    cls = named("pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint", _Statistics)
    for loaded in read({cls: {"best": 1.0}}):
        ((key, value),) = loaded.items()
        assert key.name == "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
        assert value == {"best": 1.0}


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Options:
    lr: float = 0.1


class Slots:
    __slots__ = ("a",)

    def __init__(self):
        self.a = 1


class Names(list):
    pass


def test_objects_of_any_class(read, named):
    """A scheduler, a loss, an enum, a dataclass, text in an array, a slice, a class of a list."""
    this = sys.modules.setdefault(__name__, types.ModuleType(__name__))
    vars(this).update(Color=Color, Options=Options, Slots=Slots, Names=Names)
    weight = torch.nn.Parameter(torch.ones(1))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], lr=0.1), 5)
    written = {
        "scheduler": scheduler,
        "color": Color.RED,
        "colors": {Color.RED: 2},
        "options": Options(),
        "slots": Slots(),
        "names": Names("ab"),
        "slice": slice(1, 2),
        "text": np.array(["a", "b"]),
        "things": np.array([{}, None]),
        "default": collections.defaultdict(list, a=[1]),
        "complex": 1j,
    }
    for loaded in read(written):
        assert loaded["scheduler"]["step_size"] == 5
        assert loaded["color"].args == (1,) and loaded["color"].name.endswith(".Color")
        assert list(loaded["colors"].values()) == [2]
        assert loaded["options"] == {"lr": 0.1} and loaded["slots"] == {"a": 1}
        assert loaded["names"] == {"__items__": ["a", "b"]}
        assert loaded["slice"].args == (1, 2, None)
        assert not is_array(loaded["text"]) and not is_array(loaded["things"])
        assert loaded["default"] == {"a": [1]}
        assert loaded["complex"].args == (0.0, 1.0)


def test_plain_containers_are_themselves(read):
    written = {
        "set": {1, 2},
        "frozen": frozenset([(1, "a"), None]),
        "ordered": collections.OrderedDict(b=1, a=2),
        "numpy": [np.float32(1.5), np.int64(3), np.bool_(True)],
        "bytes": [b"", b"\xff"],
    }
    for loaded in read(written):
        assert loaded == written
    for loaded in read(datetime.timedelta(seconds=3)):
        assert loaded.name == "datetime.timedelta" and loaded.args == (0, 3, 0)


@pytest.mark.slow
def test_the_classes_are_not_imported(tmp_path):
    """Even where they are installed; and a class's own code cannot run in a process without it."""
    omegaconf = pytest.importorskip("omegaconf")
    value = {"o": omegaconf.OmegaConf.create({"a": 1}), "n": argparse.Namespace(a=1)}
    torch.save(value, tmp_path / "x.pth")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, 4))
    code = (
        "import sys\n"
        "from moco.common.files import load_pickle, load_torch\n"
        "load_pickle(sys.argv[2], set())\n"
        "assert 'torch' not in sys.modules and 'argparse' not in sys.modules\n"
        "load_torch(sys.argv[1], set())\n"
        "assert 'omegaconf' not in sys.modules"
    )
    command = [sys.executable, "-c", code, tmp_path / "x.pth", tmp_path / "x.pkl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_are_listed_even_of_what_is_thrown_away(tmp_path):
    """A payload is put before a file's own content, and what it makes is popped."""
    before = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R0"
    (tmp_path / "x").write_bytes(before + pickle.dumps({"a": 1}, 2)[2:])
    objects: set[str] = set()
    assert load_pickle(tmp_path / "x", objects) == {"a": 1}
    assert objects == {"os.system"} and harmful_objects(objects) == ["os.system"]


@pytest.mark.parametrize(
    ("name", "is_harmful"),
    [
        ("posix.system", True),
        ("torch.os.system", True),
        ("subprocess.Popen", True),
        ("__builtin__.eval", True),
        ("builtins.getattr", False),
        ("torch.optim.lr_scheduler.StepLR", False),
        ("my_os.evaluate.open", False),
    ],
)
def test_which_names_are_harmful(name, is_harmful):
    assert bool(harmful_objects({name})) is is_harmful


def test_the_projects_own_files_hold_no_object(tmp_path, named):
    cls = named("my_project.models.Options", _AttrDict)
    torch.save({"state_dict": STATE, "args": cls({"a": 1})}, tmp_path / "x")
    with pytest.raises(DataError, match=r"refused.*names my_project\.models\.Options") as caught:
        load_torch(tmp_path / "x")
    assert "\n" not in str(caught.value)
