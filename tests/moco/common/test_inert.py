"""Checkpoints with objects of any class next to their tensors load without touching a class.

The files are written with the real classes if they are installed, else with one of the same name
that is pickled in the same way.
"""

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from convert.read import is_array
from moco.common.files import harmful_objects, load_pickle, load_torch
from moco.common.unpickler import OpaqueObject
from tests.oracles.python import run_python

ROOT = Path(__file__).resolve().parents[3]
STATE = {"conv1.weight": torch.ones(2)}


class _Statistics:
    """Copy of mmengine/logging/history_buffer.py: arrays, and its own methods by name."""

    def __init__(self):
        self.max_length, self._log_history = 10, np.array([1.0, 2.0])
        self.statistics_methods = {"mean": type(self).mean}

    def mean(self):
        raise AssertionError("never called")


class _AttrDict(dict):
    """Copy of vissl/config/attr_dict.py, addict and mmengine's: a dict with its own state."""

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        raise AssertionError("never called")


class _SelfDict(dict):
    """AttrDict of many scripts, and easydict's: its attributes are its items."""

    def __init__(self, *args, **kwargs):
        dict.__init__(self, *args, **kwargs)
        self.__dict__ = self


@pytest.fixture
def named(monkeypatch):
    """Return a function that makes a class of a dotted name that pickle finds, like another."""

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
    """Return a function that saves a value with a state dict in every format and loads it."""

    def both(value):
        found = []
        for protocol in (2, 3, 4, 5):
            for zipped in (True, False):
                how = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
                torch.save({"state_dict": STATE, "extra": value}, tmp_path / "x.pth", **how)
                found.append(load_torch(tmp_path / "x.pth", set()))
                assert torch.equal(found[-1]["state_dict"]["conv1.weight"], torch.ones(2))
            (tmp_path / "x.pkl").write_bytes(pickle.dumps({"extra": value}, protocol))
            found.append(load_pickle(tmp_path / "x.pkl", set()))
        return [content["extra"] for content in found]

    return both


def test_argparse(read, tmp_path):
    """DINO's, SimSiam's, PyContrast's and timm's "args"."""
    args = argparse.Namespace(arch="resnet50", schedule=[120, 160], path=pathlib.Path("/x"))
    for loaded in read(args):
        assert type(loaded) is OpaqueObject and loaded.name == "argparse.Namespace"
        assert loaded.pop("path").args == ("/", "x")
        assert loaded == {"arch": "resnet50", "schedule": [120, 160]}
    # Protocols 0 and 1 create objects in another way; torch.save cannot write tensors with them.
    assert pickle.dumps(args, 0).startswith(b"ccopy_reg\n_reconstructor")
    for protocol in (0, 1):
        (tmp_path / "x").write_bytes(pickle.dumps(argparse.Namespace(arch="r"), protocol))
        assert load_pickle(tmp_path / "x", set()) == {"arch": "r"}


def test_omegaconf(read):
    """Hydra's configurations (VISSL, solo-learn), whose nodes refer to their parents."""
    omegaconf = pytest.importorskip("omegaconf")
    config = {"a": 1, "b": {"c": [1, "x", None]}, "f": 1.5, "g": "${a}", "h": True}
    for loaded in read(omegaconf.OmegaConf.create(config)):
        assert loaded.name == "omegaconf.dictconfig.DictConfig"
        items = loaded["_content"]
        assert items["a"]["_val"] == 1 and items["g"]["_val"] == "${a}"
        (one, text, none) = items["b"]["_content"]["c"]["_content"]
        assert (one["_val"], text["_val"], none["_val"]) == (1, "x", None)


DICTIONARIES = (
    "pytorch_lightning.utilities.parsing.AttributeDict", "vissl.config.attr_dict.AttrDict",
    "lightning.pytorch.utilities.parsing.AttributeDict", "vissl.utils.hydra_config.AttrDict",
    "mmengine.config.config.ConfigDict", "mmcv.utils.config.ConfigDict", "addict.addict.Dict",
    "detectron2.config.config.CfgNode", "easydict.EasyDict",
)  # fmt: skip


@pytest.mark.parametrize("name", DICTIONARIES)
def test_dictionaries_of_others(read, named, name):
    written = named(name, _SelfDict if name == "easydict.EasyDict" else _AttrDict)
    for loaded in read(written({"lr": 0.1, "inner": written({"a": [1]})})):
        assert type(loaded) is OpaqueObject and loaded.name == name
        assert loaded == {"lr": 0.1, "inner": {"a": [1]}}


def test_a_history_buffer_and_classes_as_keys(read, named):
    """MMSelfSup's message_hub; and Lightning up to 1.4, whose keys are the callbacks' classes."""
    buffer = named("mmengine.logging.history_buffer.HistoryBuffer", _Statistics)
    callback = named("pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint", _AttrDict)
    for loaded in read({callback: {"best": buffer()}}):
        ((key, value),) = loaded.items()
        assert key.name == "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
        assert value["best"]["_log_history"].tolist() == [1.0, 2.0]
        method = value["best"]["statistics_methods"]["mean"]
        if method.name.endswith(".getattr"):  # the form of protocols below 4
            method = OpaqueObject(f"{method.args[0].name}.{method.args[1]}")
        assert method.name == "mmengine.logging.history_buffer.HistoryBuffer.mean"


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
        for name in ("set", "frozen"):  # sets become lists, whose items nobody has to hash
            assert set(loaded[name]) == written[name]
            loaded[name] = written[name]
        assert loaded == written
    for loaded in read(datetime.timedelta(seconds=3)):
        assert loaded.name == "datetime.timedelta" and loaded.args == (0, 3, 0)


@pytest.mark.slow
def test_the_classes_are_not_imported(tmp_path):
    """Installed ones neither, whose own code could run."""
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
    run_python("-c", code, tmp_path / "x.pth", tmp_path / "x.pkl")


def test_names_are_listed_even_of_discarded_objects(tmp_path):
    """A payload is inserted before a file's own content, and its result is popped."""
    before = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R0"
    (tmp_path / "x").write_bytes(before + pickle.dumps({"a": 1}, 2)[2:])
    objects: set[str] = set()
    assert load_pickle(tmp_path / "x", objects) == {"a": 1}
    assert objects == {"os.system"} and harmful_objects(objects) == ["os.system"]


def test_which_names_are_harmful():
    harmful = ["__builtin__.eval", "posix.system", "subprocess.Popen", "torch.os.system"]
    others = ["builtins.getattr", "torch.optim.lr_scheduler.StepLR", "my_os.evaluate.open"]
    assert harmful_objects({*harmful, *others}) == harmful
