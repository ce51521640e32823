"""Detectron2's training batches, from any batch on.

Without data-loader workers the batches are bitwise identical to Detectron2's own.

Deviation: with them, Detectron2 samples each image's augmentation from a stream of the process that
happens to read it; here each place in the order of images has a seed of its own. So the batches
do not depend on the number of data-loader workers (Detectron2's do), and a run continues with the
images it would have seen.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from detectron2.data.common import AspectRatioGroupedDataset
from detectron2.utils import comm
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from detection.data.random_state import (
    State,
    augmentation_state,
    private_random,
    restore_augmentation,
)
from detection.datasets.base import Record
from detection.datasets.images import check_bits, explained, first_error
from moco.common.errors import DataError
from moco.data.decode import FORMATS
from moco.engine.loader import kill_workers_at_exit
from moco.engine.stop import ignore_stop_signals

Sample = dict[str, Any]


class Item(NamedTuple):
    """An image of this rank's endless order.

    Attributes:
        place: in the order.
        before: the streams that its augmentation was sampled from; None for the place's own seed.
        sample: the image as the model takes it.
    """

    place: int
    before: State | None
    sample: Sample


class ResumableLoader:
    """Endless batches, as from the loader that it is made of, which it replaces.

    Args:
        loader: of `detectron2.data.build_detection_train_loader`, without a collate function.
        seed: of the run; every rank samples from seeds of its own.

    Attributes:
        observe: is given every batch before the training.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._grouped = isinstance(loader, AspectRatioGroupedDataset)
        inner = loader.dataset if self._grouped else loader
        self._batch_size: int = loader.batch_size
        self._num_workers: int = inner.num_workers
        # Detectron2 has joined images and order in a ToIterableDataset.
        self._order: Iterable[int] = inner.dataset.sampler
        seeds = (seed % 2**32, comm.get_rank()) if self._num_workers else None
        self._images = _Images(inner.dataset.dataset, seeds)
        self._start: dict[str, Any] = {"done": 0, "waiting": [], "seeded": seeds is not None}
        self._now = self._start
        self.observe: Callable[[list[Sample]], None] = lambda batch: None

    def state_dict(self) -> dict[str, Any]:
        """How far the newest iterator is in its order, and which images wait for partners."""
        return self._now

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether `state` was left by a loader that samples as this one does."""
        return bool(state["seeded"] == self._start["seeded"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let every new iterator begin where another loader's was."""
        self._start = self._now = dict(state)

    def __iter__(self) -> Iterator[list[Sample]]:
        """As with every DataLoader, the call itself samples one number from torch's stream.

        Raises:
            DataError: from the iterator, on all ranks at the same batch; see `NamesImages`.
                `state_dict` and the random streams are those after the batch before.
        """
        order = enumerate(self._order)
        waiting = dict(self._start["waiting"])
        done = islice(order, self._start["done"])  # ends before the loader below takes from `order`
        again = [self._images.again(key, waiting[key[0]]) for key in done if key[0] in waiting]
        if self._num_workers:
            kill_workers_at_exit()
        loader: DataLoader[Any] = DataLoader(
            self._images,
            batch_size=None,
            sampler=order,
            num_workers=self._num_workers,
            collate_fn=_unchanged,  # type: ignore[arg-type]
            worker_init_fn=ignore_stop_signals,
        )
        return self._batches(iter(loader), again)

    def _batches(self, items: Iterator[Item], again: Sequence[Item]) -> Iterator[list[Sample]]:
        groups: dict[bool, list[Item]] = {False: [], True: []}
        for item in again:
            groups[self._is_wide(item)].append(item)
        before = augmentation_state()
        for item in items:
            error = first_error([item.sample])
            if error is not None:
                restore_augmentation(before)  # as if this batch had not been begun
                raise_on_all(error)
            group = groups[self._is_wide(item)]
            group.append(item)
            if len(group) < self._batch_size:
                continue
            batch = [item.sample for item in group]
            group.clear()
            waiting = [(kept.place, kept.before) for group in groups.values() for kept in group]
            raise_on_all(None)
            self._now = {**self._start, "done": item.place + 1, "waiting": waiting}
            self.observe(batch)
            yield batch
            before = augmentation_state()

    def _is_wide(self, item: Item) -> bool:
        return self._grouped and item.sample["width"] > item.sample["height"]


class NamesImages:
    """A mapper that hands back a DataError instead of a sample which it cannot make.

    The message is that of the embedded engine.
    """

    def __init__(self, mapper: Callable[[Record], Sample]) -> None:
        self._mapper = mapper

    def __call__(self, record: Record) -> Sample | DataError:
        path = record["file_name"]
        try:
            if "://" not in path:
                with Image.open(path, formats=FORMATS) as image:
                    check_bits(image, path)
            return self._mapper(record)
        except Exception as error:  # Pillow raises many kinds
            reason = explained(record, error)
            if isinstance(reason, DataError):
                return reason
            raise


class ReadableLoader:
    """A test loader whose mapper is `NamesImages`; an error of one rank is one of all."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Sample]]:
        error = None
        for batch in self._loader:
            error = first_error(batch)
            if error is not None:
                break
            yield batch
        raise_on_all(error)


def raise_on_all(error: DataError | None) -> None:
    """Let no rank wait for one that has an error; all of them call it.

    Raises:
        DataError: of the first rank that has one.
    """
    text = next(filter(None, comm.all_gather(error and str(error))), None)
    if text is not None:
        raise DataError(text)


class _Images(Dataset[Any]):
    """(place, index) → `Item`.

    Args:
        mapped: index → an image as the model takes it.
        seeds: of every place, with its number; None: sample from the streams as they are.
    """

    def __init__(self, mapped: Any, seeds: tuple[int, int] | None) -> None:
        self._mapped, self._seeds = mapped, seeds

    def __getitem__(self, key: tuple[int, int]) -> Item:
        place, index = key
        if self._seeds is None:
            return Item(place, augmentation_state(), self._mapped[index])
        seeds = np.random.SeedSequence([*self._seeds, place]).generate_state(2)
        np.random.seed(seeds)
        random.seed(seeds.tobytes())
        torch.default_generator.manual_seed(int(seeds[0]))
        return Item(place, None, self._mapped[index])

    def again(self, key: tuple[int, int], before: State | None) -> Item:
        """The same image as when it was sampled from `before`."""
        with private_random():
            if before is not None:
                restore_augmentation(before)
            return self[key]


def _unchanged(item: Item) -> Item:
    return item
