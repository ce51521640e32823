"""Planning and loading of batches: which images, in which order, with which augmentation.

Bitwise identical to Detectron2's training samplers and AspectRatioGroupedDataset under the same
NumPy seed. All random numbers are sampled in one place, the plan of batches, in the order in which
Detectron2 samples them without workers. Therefore the batches do not depend on the number of
workers (Detectron2's do), and a run resumes at iteration i by skipping i batches of the plan, which
reads no images.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from detection.data.records import PackedRecords
from detection.data.sample import Sample
from detection.datasets.base import Record
from detection.datasets.files import first_error
from moco.common import distributed
from moco.common.errors import DataError
from moco.engine.loader import kill_workers_at_exit
from moco.engine.stop import ignore_stop_signals

# Index of an image and its sampled augmentation, as its mapper takes it (mapper.py).
Planned = tuple[int, Any]
Map = Callable[[Record, Any], Sample]


def with_keypoints(records: Sequence[Record], minimum: int) -> list[Record]:
    """Keep the records with at least `minimum` labeled keypoints (MIN_KEYPOINTS_PER_IMAGE)."""

    def labeled(record: Record) -> int:
        return sum(v > 0 for item in record["annotations"] for v in item.get("keypoints", [])[2::3])

    return [record for record in records if labeled(record) >= minimum]


def shuffle_forever(size: int, seed: int) -> Iterator[int]:
    """Yield the indices of endless random permutations of range(size), as TrainingSampler."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(size, generator=generator).tolist()


def repeat_forever(factors: Sequence[float], seed: int) -> Iterator[int]:
    """Yield permutations with each index repeated by its factor, as RepeatFactorTrainingSampler.

    The fraction of a factor is the probability of one more repetition.
    """
    generator = torch.Generator().manual_seed(seed)
    repeats = torch.tensor(factors, dtype=torch.float32)
    whole = repeats.trunc()
    while True:
        more = torch.rand(len(repeats), generator=generator) < repeats - whole
        indices = torch.arange(len(repeats)).repeat_interleave((whole + more).long())
        yield from indices[torch.randperm(len(indices), generator=generator)].tolist()


def repeat_factors(
    records: Sequence[Record], threshold: float, *, square_root: bool
) -> list[float]:
    """Compute the repeat factor of each record by its rarest class, at least 1 (LVIS, B.2).

    Args:
        records: The training records.
        threshold: DATALOADER.REPEAT_THRESHOLD, a share of the images; a class that is present in a
            share f < threshold of them gets the factor threshold / f.
        square_root: DATALOADER.REPEAT_SQRT; take the square root of the factors.
    """
    classes = [{item["category_id"] for item in record["annotations"]} for record in records]
    counts = Counter(c for image in classes for c in image)
    factors = {c: threshold / (count / len(records)) for c, count in counts.items()}
    scaled = math.sqrt if square_root else float
    return [max((1.0, *(scaled(factors[c]) for c in image))) for image in classes]


def plan_batches(
    is_wide: Sequence[bool],
    indices: Iterator[int],
    sample_params: Callable[[np.random.RandomState], Any],
    *,
    batch_size: int,
    rng: np.random.RandomState,
) -> Iterator[list[Planned]]:
    """Yield endless plans of batches, in which wide images are not mixed with others.

    An incomplete batch waits for more images of its kind, as in AspectRatioGroupedDataset.

    Args:
        is_wide: The group of each record.
        indices: Endless indices of the records.
        sample_params: Function that samples the augmentation of the next image from `rng`.
        batch_size: Images per batch.
        rng: Random stream of the augmentation.
    """
    waiting: dict[bool, list[Planned]] = {True: [], False: []}
    for index in indices:
        group = waiting[is_wide[index]]
        group.append((index, sample_params(rng)))
        if len(group) == batch_size:
            yield group.copy()
            group.clear()


class Images(Dataset[Any]):
    """Dataset of planned images; an item is a sample, or its error (see `first_error`)."""

    def __init__(self, records: Sequence[Record], mapper: Map) -> None:
        self.records, self.mapper = records, mapper

    def __getitem__(self, planned: Planned) -> Sample | DataError:
        index, params = planned
        try:
            return self.mapper(self.records[index], params)
        except DataError as error:
            return error


def load_batches(
    images: Images, plan: Iterable[list[Planned]], num_workers: int, *, collective: bool
) -> Generator[list[Sample]]:
    """Load batches of samples in the order of the plan.

    The call itself (not the first batch) consumes one number of torch's stream, as every DataLoader
    does, and so Detectron2's. Close the iterator to end its workers.

    Args:
        images: The images to load.
        plan: Batches of indices and sampled augmentations.
        num_workers: Data-loader workers; 0 loads in this process.
        collective: Raise an error of one process on all processes, at the same batch.

    Raises:
        DataError: If an image cannot be read; raised by the iterator.
    """
    if num_workers:
        kill_workers_at_exit()
    loader = DataLoader(
        images,
        batch_sampler=plan,
        num_workers=num_workers,
        collate_fn=list,
        worker_init_fn=ignore_stop_signals,
    )
    return _raising(iter(loader), collective)


def _raising(
    batches: Iterator[list[Sample | DataError]], collective: bool
) -> Generator[list[Sample]]:
    try:
        for batch in batches:
            error = first_error(batch)
            if collective:
                raise_on_all(error)
            elif error is not None:
                # `raise error` would create a reference cycle through this frame.
                raise DataError(str(error))
            yield batch  # type: ignore[misc]
    finally:
        del batches  # end the workers now, not when the traceback is dropped


def raise_on_all(error: DataError | None) -> None:
    """Raise an error of any process on all of them, so that none waits for it; a collective call.

    Raises:
        DataError: The error of the first process that has one.
    """
    if distributed.max_over_ranks(error is not None):
        texts: list[Any] = [error and str(error)]
        if distributed.world_size() > 1:
            own, texts = texts[0], [None] * distributed.world_size()
            torch.distributed.all_gather_object(texts, own)
        raise DataError(next(filter(None, texts)))


def training_batches(
    records: Sequence[Record],
    is_wide: Sequence[bool],
    order: Callable[[], Iterator[int]],
    sample_params: Callable[[np.random.RandomState], Any],
    mapper: Map,
    *,
    batch_size: int,
    num_workers: int,
    rng: np.random.RandomState,
    skip: int = 0,
    states: deque[Any] | None = None,
) -> Generator[list[Sample]]:
    """Load training batches without end; see `plan_batches`.

    Args:
        records: The training records.
        is_wide: The group of each record.
        order: Function that starts the endless indices of the records.
        sample_params: Function that samples the augmentation of the next image.
        mapper: Function (record, sampled augmentation) → sample.
        batch_size: Images per batch of this process.
        num_workers: Data-loader workers.
        rng: Random stream of the augmentation.
        skip: Number of batches to skip, without reading their images.
        states: Gets the state of `rng` after each batch, when that is planned; workers plan ahead.

    Raises:
        DataError: If an image cannot be read.
    """
    plan = plan_batches(is_wide, order(), sample_params, batch_size=batch_size, rng=rng)
    rest: Iterator[list[Planned]] = islice(plan, skip, None)
    if states is not None:
        rest = _noting(rest, rng, states)
    return load_batches(Images(records, mapper), rest, num_workers, collective=True)


def _noting(
    plan: Iterator[list[Planned]], rng: np.random.RandomState, states: deque[Any]
) -> Iterator[list[Planned]]:
    for batch in plan:
        states.append(rng.get_state())
        yield batch


def evaluation_batches(
    records: Sequence[Record], params: Any, mapper: Map, *, num_workers: int
) -> Generator[list[Sample]]:
    """Load every record once, in order, one image per batch as in Detectron2 (no padding)."""
    plan = [[(index, params)] for index in range(len(records))]
    return load_batches(Images(PackedRecords(records), mapper), plan, num_workers, collective=False)
