"""Classes that checkpoints of other projects hold beside their tensors, as plain data.

A file may name these and no others; what it builds of them is an `Inert`, which keeps what the
object was made of. The classes themselves are never imported, whether installed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

# Who writes a class into checkpoints, module, classes; one row per module.
_CLASSES = (
    # The command line as "args" or "opt": DINO main_dino.py, PyContrast, SimSiam, timm train.py.
    ("argparse", "Namespace"),
    # Hydra's configurations: VISSL, solo-learn (hyper_parameters), fairseq. omegaconf/base.py,
    # nodes.py, dictconfig.py and listconfig.py: the classes of nodes and of their metadata.
    ("omegaconf.dictconfig", "DictConfig"),
    ("omegaconf.listconfig", "ListConfig"),
    ("omegaconf.base", "ContainerMetadata Metadata SCMode UnionNode"),
    (
        "omegaconf.nodes",
        "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode InterpolationResultNode "
        "PathNode StringNode",
    ),
    # What omegaconf's metadata says of a node's type.
    ("typing", "Any Dict List Optional Tuple Union"),
    *(
        (builtins, "NoneType bool bytes dict float int list long object str tuple unicode")
        for builtins in ("builtins", "__builtin__")  # Python 3, and protocols below 3
    ),
    # Lightning's hyper_parameters (utilities/parsing.py, fabric/utilities/data.py) and, up to
    # version 1.4, the classes as keys of "callbacks" (trainer/connectors/checkpoint_connector.py).
    ("pytorch_lightning.utilities.parsing", "AttributeDict"),
    ("lightning.pytorch.utilities.parsing", "AttributeDict"),
    ("lightning_fabric.utilities.data", "AttributeDict"),
    ("lightning.fabric.utilities.data", "AttributeDict"),
    ("pytorch_lightning.callbacks.early_stopping", "EarlyStopping"),
    ("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint"),
    # VISSL's "config" (vissl/config/attr_dict.py, before that vissl/utils/hydra_config.py).
    ("vissl.config.attr_dict", "AttrDict"),
    ("vissl.utils.hydra_config", "AttrDict"),
    # MMSelfSup, MMPretrain: mmengine/runner/runner.py, save_checkpoint, "message_hub" and "cfg";
    # the methods are the buffer's own record of its statistics (logging/history_buffer.py).
    ("addict.addict", "Dict"),
    ("mmcv.utils.config", "ConfigDict"),
    ("mmengine.config.config", "ConfigDict"),
    (
        "mmengine.logging.history_buffer",
        "HistoryBuffer HistoryBuffer.current HistoryBuffer.max HistoryBuffer.mean "
        "HistoryBuffer.min",
    ),
    # Configurations of Detectron2's projects and of repositories that use yacs or easydict.
    ("detectron2.config.config", "CfgNode"),
    ("fvcore.common.config", "CfgNode"),
    ("yacs.config", "CfgNode"),
    ("easydict", "EasyDict"),
    # When a run was started, how long it may take.
    ("datetime", "date datetime timedelta"),
    # The anneal_func of its state_dict (torch/optim/lr_scheduler.py before 2.3).
    ("torch.optim.lr_scheduler", "OneCycleLR"),
)


_MAX_PATH = 4096  # letters, as Linux's PATH_MAX


class Inert(dict[str, Any]):
    """An object's class by name, the arguments it was made with, and as items its state.

    A state that is no dictionary is the item "__state__".
    """

    __slots__ = ("args", "name")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.name, self.args = name, args

    def set_state(self, state: Any) -> None:
        """What pickle's BUILD does: the attributes, or (the attributes, those of slots)."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            self["__state__"] = state
            return
        for part in parts:
            self.set_attributes(part or {})
        # omegaconf's way up from a node; without it nothing contains itself.
        self.pop("_parent", None)

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        """Their names are text: copying other keys, with hashes of one's choice, takes time."""
        if not all(type(name) is str for name in attributes):
            raise TypeError("an attribute whose name is no text")
        self.update(attributes)


class Known:
    """A name that a pickle may use: by itself it is only a value.

    `make` is what stands for a call of it, None where it cannot be called; `memory` what a call
    takes in bytes, beside what Python's own sizes tell.
    """

    __slots__ = ("make", "memory", "name")

    def __init__(self, name: str, make: Callable[..., Any] | None, memory: int = 0) -> None:
        self.name, self.make, self.memory = name, make, memory

    def __repr__(self) -> str:
        return self.name


def _class(name: str) -> Known:
    return Known(name, lambda *args: Inert(name, args))


def _path(*parts: Any) -> str:
    if not all(type(part) is str for part in parts) or sum(map(len, parts)) > _MAX_PATH:
        raise TypeError("a path that is no text, or too long a one")
    return str(PurePosixPath(*parts))


def _version(text: Any) -> str:
    if type(text) is not str:  # the text of anything else may be endless
        raise TypeError("a version that is no text")
    return text


def _known() -> Iterator[Known]:
    for module, names in _CLASSES:
        for name in names.split():
            yield _class(f"{module}.{name}")
    # pathlib.Path in command lines and configurations; Python 3.13 moved the classes.
    for module in ("pathlib", "pathlib._local"):
        for name in (
            "Path",
            "PosixPath",
            "PurePath",
            "PurePosixPath",
            "PureWindowsPath",
            "WindowsPath",
        ):
            yield Known(f"{module}.{name}", _path)
    # A function among the optimizer's settings, which nothing here calls: VICReg's
    # main_vicreg.py:109-115, and Barlow Twins' released checkpoint (its issue #36).
    for module in ("__main__", "__mp_main__"):
        yield Known(f"{module}.exclude_bias_and_norm", None)
    # torch.__version__.
    yield Known("torch.torch_version.TorchVersion", _version)


KNOWN = {known.name: known for known in _known()}
