"""Batches for a model: which images, in which order, with which changes.

Bitwise identical to Detectron2's training samplers and AspectRatioGroupedDataset under the same
NumPy seed. All random numbers are sampled in one place, the plan of batches, in the order in which
Detectron2 samples them without workers. So the batches do not depend on the number of workers
(Detectron2's do), and a run resumes at iteration i by skipping i batches of the plan, which reads
no image.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from detection.data.records import PackedRecords
from detection.data.sample import Sample
from detection.datasets.base import Record
from detection.datasets.images import first_error
from moco.common import distributed
from moco.common.errors import DataError
from moco.engine.loader import kill_workers_at_exit
from moco.engine.stop import ignore_stop_signals

# An image's number and its sampled changes, as its mapper takes them (mapper.py).
Planned = tuple[int, Any]
Map = Callable[[Record, Any], Sample]


def with_keypoints(records: Sequence[Record], minimum: int) -> list[Record]:
    """The records with that many labeled keypoints (ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE)."""

    def labeled(record: Record) -> int:
        return sum(v > 0 for item in record["annotations"] for v in item.get("keypoints", [])[2::3])

    return [record for record in records if labeled(record) >= minimum]


def shuffled_forever(size: int, seed: int) -> Iterator[int]:
    """Permutations of range(size), one after the other without end: TrainingSampler's stream."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(size, generator=generator).tolist()


def repeated_forever(factors: Sequence[float], seed: int) -> Iterator[int]:
    """Every number about `factors` times in each permutation: RepeatFactorTrainingSampler's."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.tensor(factors, dtype=torch.float32)
    whole = wanted.trunc()
    while True:
        more = torch.rand(len(wanted), generator=generator) < wanted - whole
        indices = torch.arange(len(wanted)).repeat_interleave((whole + more).long())
        yield from indices[torch.randperm(len(indices), generator=generator)].tolist()


def repeat_factors(
    records: Sequence[Record], threshold: float, *, square_root: bool
) -> list[float]:
    """How often each record is shown, by its rarest class (LVIS, appendix B.2): at least once.

    Args:
        threshold: share of the images; a class in a smaller share f has the factor threshold / f
            or, with `square_root`, its root (DATALOADER.REPEAT_THRESHOLD and REPEAT_SQRT).
    """
    classes = [{item["category_id"] for item in record["annotations"]} for record in records]
    counts = Counter(c for own in classes for c in own)
    factors = {c: threshold / (count / len(records)) for c, count in counts.items()}
    scaled = math.sqrt if square_root else float
    return [max((1.0, *(scaled(factors[c]) for c in own))) for own in classes]


def plan_batches(
    is_wide: Sequence[bool],
    indices: Iterator[int],
    draw: Callable[[np.random.RandomState], Any],
    *,
    batch_size: int,
    rng: np.random.RandomState,
) -> Iterator[list[Planned]]:
    """Batches without end, in which wide images are not mixed with others.

    An image that has no partners yet waits for them, as in AspectRatioGroupedDataset.

    Args:
        is_wide: of each record, whether it belongs to the one group or to the other.
        indices: of the records, without end. draw: what happens to the next image, from `rng`.
    """
    waiting: dict[bool, list[Planned]] = {True: [], False: []}
    for index in indices:
        group = waiting[is_wide[index]]
        group.append((index, draw(rng)))
        if len(group) == batch_size:
            yield group.copy()
            group.clear()


class Images(Dataset[Any]):
    """What was planned -> samples; `first_error` tells why unreadable ones are their error."""

    def __init__(self, records: Sequence[Record], mapper: Map) -> None:
        self.records, self.mapper = records, mapper

    def __getitem__(self, planned: Planned) -> Sample | DataError:
        index, draw = planned
        try:
            return self.mapper(self.records[index], draw)
        except DataError as error:
            return error


def load_batches(
    images: Images, plan: Iterable[list[Planned]], num_workers: int, *, together: bool
) -> Generator[list[Sample]]:
    """Batches of samples in the order of the plan.

    The call itself (not the first batch) draws one number from torch's stream, as every
    DataLoader does and so Detectron2. Close the iterator to end its workers.

    Args:
        together: what one process cannot read is an error of all, at the same batch.

    Raises:
        DataError: from the iterator; an image cannot be read.
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
    return _raising(iter(loader), together)


def _raising(
    batches: Iterator[list[Sample | DataError]], together: bool
) -> Generator[list[Sample]]:
    try:
        for batch in batches:
            error = first_error(batch)
            if together:
                raise_on_all(error)
            elif error is not None:
                # Not `raise error`: it would refer to itself through this frame.
                raise DataError(str(error))
            yield batch  # type: ignore[misc]
    finally:
        del batches  # ends the workers now, and not when somebody drops the traceback


def raise_on_all(error: DataError | None) -> None:
    """Let no process wait for one that has an error; all of them call it.

    Raises:
        DataError: of the first process that has one.
    """
    if distributed.highest(error is not None):
        texts: list[Any] = [error and str(error)]
        if distributed.world_size() > 1:
            own, texts = texts[0], [None] * distributed.world_size()
            torch.distributed.all_gather_object(texts, own)
        raise DataError(next(filter(None, texts)))


def training_batches(
    records: Sequence[Record],
    is_wide: Sequence[bool],
    order: Callable[[], Iterator[int]],
    draw: Callable[[np.random.RandomState], Any],
    mapper: Map,
    *,
    batch_size: int,
    num_workers: int,
    seed: int,
    skip: int = 0,
    trained: int = 0,
) -> Generator[list[Sample]]:
    """Training batches without end, from batch number `skip` on; see `plan_batches`.

    Args:
        is_wide: see `plan_batches`.
        order: starts the endless indices of the records.
        trained: the random numbers of `draw` continue as after a training of that many batches,
            while the order starts again: what Detectron2's PreciseBN sees.

    Raises:
        DataError: an image cannot be read.
    """
    rng = np.random.RandomState(seed % 2**32)
    plan = partial(plan_batches, is_wide, draw=draw, batch_size=batch_size, rng=rng)
    for _ in islice(plan(order()), trained):
        pass
    rest = islice(plan(order()), skip, None)
    return load_batches(Images(records, mapper), rest, num_workers, together=True)


def evaluation_batches(
    records: Sequence[Record], draw: Any, mapper: Map, *, num_workers: int
) -> Generator[list[Sample]]:
    """Every record once, in order, one image per batch as in Detectron2 (no padding)."""
    plan = [[(index, draw)] for index in range(len(records))]
    return load_batches(Images(PackedRecords(records), mapper), plan, num_workers, together=False)
