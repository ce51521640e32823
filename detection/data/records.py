"""Records of a split in memory that data-loader workers share."""

import gc
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import numpy as np

from detection.datasets import cache_clear
from detection.datasets.base import Record


@contextmanager
def records_forgotten() -> Iterator[None]:
    """Leave the records to those who have packed them.

    Those of a large dataset are millions of objects, which the garbage collector would walk
    through, and so copy into every worker.
    """
    cache_clear()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class PackedRecords(Sequence[Record]):
    """Records as one array of bytes, which is how Detectron2 keeps them.

    A worker shares its parent's pages until one of the two writes into them, and to read an object
    of Python is to write: its references are counted. Lists of records would so be copied into
    every worker. An array is not, and each access makes the record anew.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        parts = [pickle.dumps(record, protocol=-1) for record in records]
        self._ends = np.cumsum([len(part) for part in parts])
        self._content = np.frombuffer(b"".join(parts), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        content = self._content[start : self._ends[index]].tobytes()
        record: Record = pickle.loads(content)  # noqa: TID251  # its own, from `__init__`
        return record
