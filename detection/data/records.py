"""Records of a split in memory that is shared with data-loader workers."""

import gc
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import numpy as np

from detection.datasets import cache_clear
from detection.datasets.base import Record


@contextmanager
def records_forgotten(num_workers: int) -> Iterator[None]:
    """Clear the cached records, and exclude what workers share from garbage collection.

    The records of a large dataset are millions of objects. The garbage collector would visit them,
    and thereby copy them into every worker.
    """
    cache_clear()
    if num_workers == 0:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class PackedRecords(Sequence[Record]):
    """Records pickled into one byte array, as in Detectron2.

    A worker shares its parent's memory pages until one of the two writes to them. Reading a Python
    object writes its reference count, so a list of records would be copied into every worker. An
    array is not copied; each access unpickles a record.
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
        record: Record = pickle.loads(content)  # noqa: TID251  # written by `__init__`
        return record
