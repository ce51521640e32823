"""Builders of training and evaluation batches from a config."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode

from detection.data import sem_seg
from detection.data.batches import (
    evaluation_batches,
    repeat_factors,
    repeat_forever,
    shuffle_forever,
    training_batches,
    with_keypoints,
)
from detection.data.corruptions import add_corruption
from detection.data.mapper import (
    Augmentation,
    AugmentationParams,
    LabelMapper,
    Mapper,
    SeededMapper,
    flip_indices,
    sample_seed,
)
from detection.data.records import PackedRecords
from detection.data.sample import Sample
from detection.data.transforms import LargeScaleJitter
from detection.datasets import read_split
from detection.datasets.base import Record, image_key, with_objects
from detection.datasets.files import OpenURL
from moco.common import distributed
from moco.common.errors import UserError


def is_semantic(cfg: CfgNode) -> bool:
    """Return whether the task is semantic segmentation."""
    return cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor"


def training_records(cfg: CfgNode) -> list[Record]:
    """Read the records of DATASETS.TRAIN that the task trains on.

    Raises:
        UserError: If none is left.
    """
    records = [record for name in cfg.DATASETS.TRAIN for record in read_split(name, cfg).records]
    return keep_trainable(cfg, records)


def keep_trainable(cfg: CfgNode, records: list[Record]) -> list[Record]:
    """Keep the records with annotations that the task trains on.

    Raises:
        UserError: If none is left.
    """
    if is_semantic(cfg):
        return records
    if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
        records = with_objects(records)
    if cfg.MODEL.KEYPOINT_ON:
        records = with_keypoints(records, cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE)
    if not records:
        missing = "labeled keypoints" if cfg.MODEL.KEYPOINT_ON else "an object"
        raise UserError(f"DATASETS.TRAIN has no image with {missing}; check its annotations")
    return records


# Records and mapper of an engine (`detection.config.engines.Engine.mapper`).
Mapped = tuple[Sequence[Record], Callable[[Record], Sample]]


class TrainingData:
    """Training data of this process: packed records, their order, and their mapper.

    Args:
        cfg: The task.
        own: Records and mapper of the engine, if it maps the task by itself.
        open_url: Opens images whose path contains `://`.

    Raises:
        UserError: If no image has an object.
    """

    def __init__(
        self, cfg: CfgNode, own: Mapped | None = None, open_url: OpenURL | None = None
    ) -> None:
        self._cfg = cfg
        if own is None:
            records: Sequence[Record] = training_records(cfg)
            self._sample_params, self._mapper = _training_mapper(cfg, open_url)
        else:
            records, self._sample_params = own[0], sample_seed
            self._mapper = SeededMapper(own[1], open_url)
        self._order = _order(cfg, records)
        grouped = cfg.DATALOADER.ASPECT_RATIO_GROUPING
        self._is_wide = [grouped and record["width"] > record["height"] for record in records]
        self._records = PackedRecords(records)

    def batches(self, num_workers: int, *, skip: int = 0) -> Generator[list[Sample]]:
        """Load batches without end; see `batches.training_batches`.

        Raises:
            DataError: If an image cannot be read.
        """
        rng = np.random.RandomState((self._cfg.SEED + distributed.rank()) % 2**32)
        states: deque[Any] = deque()
        return self._taken(self._load(rng, num_workers, skip, states), states)

    def batches_again(self) -> Generator[list[Sample]]:
        """Load batches from the first image, with the random stream after the last batch taken.

        Detectron2's PreciseBN continues its stream of augmentations, too.

        Raises:
            DataError: If an image cannot be read.
        """
        rng = np.random.RandomState()
        rng.set_state(self._state)
        return self._load(rng, num_workers=0)

    def _taken(
        self, batches: Generator[list[Sample]], states: deque[Any]
    ) -> Generator[list[Sample]]:
        with closing(batches):
            for batch in batches:
                self._state = states.popleft()
                yield batch

    def _load(
        self,
        rng: np.random.RandomState,
        num_workers: int,
        skip: int = 0,
        states: deque[Any] | None = None,
    ) -> Generator[list[Sample]]:
        cfg, rank, processes = self._cfg, distributed.rank(), distributed.world_size()
        return training_batches(
            self._records,
            self._is_wide,
            lambda: islice(self._order(), rank, None, processes),
            self._sample_params,
            self._mapper,
            batch_size=cfg.SOLVER.IMS_PER_BATCH // processes,
            num_workers=num_workers,
            rng=rng,
            skip=skip,
            states=states,
        )


def _order(cfg: CfgNode, records: Sequence[Record]) -> Callable[[], Iterator[int]]:
    """Return a function that starts the endless record indices of DATALOADER.SAMPLER_TRAIN."""
    settings = cfg.DATALOADER
    if settings.SAMPLER_TRAIN == "TrainingSampler":
        return partial(shuffle_forever, len(records), cfg.SEED)
    threshold, square_root = settings.REPEAT_THRESHOLD, settings.REPEAT_SQRT
    factors = repeat_factors(records, threshold, square_root=square_root)
    return partial(repeat_forever, factors, cfg.SEED)


def build_evaluation(
    cfg: CfgNode,
    records: Sequence[Record],
    own: Mapped | None = None,
    open_url: OpenURL | None = None,
) -> Generator[list[Sample]]:
    """Load every image once, one at a time; for `own` and `open_url` see `TrainingData`."""
    keys = cfg.INPUT
    params: Any = None
    mapper: Callable[..., Sample]
    if own is not None:
        by_key = {image_key(record): record for record in own[0]}
        records = [by_key[image_key(record)] for record in records]
        mapper, params = SeededMapper(own[1], open_url), 0
    elif is_semantic(cfg):
        _, mapper = _training_mapper(cfg, open_url)
    else:
        mapper = Mapper(keys.MAX_SIZE_TEST, keys.FORMAT, learning=False, open_url=open_url)
        params = AugmentationParams(keys.MIN_SIZE_TEST)
    mapper = add_corruption(mapper, cfg, open_url)
    return evaluation_batches(records, params, mapper, num_workers=cfg.DATALOADER.NUM_WORKERS)


def _training_mapper(
    cfg: CfgNode, open_url: OpenURL | None
) -> tuple[Callable[..., Any], Callable[..., Sample]]:
    """Return the function that samples an augmentation, and the mapper that applies it."""
    keys = cfg.INPUT
    if is_semantic(cfg):
        labels = sem_seg.Augmentation.from_config(cfg)
        tested = keys.MIN_SIZE_TEST, keys.MAX_SIZE_TEST
        return labels.sample_params, LabelMapper(labels, keys.FORMAT, open_url, *tested)
    sizes, sampling = tuple(keys.MIN_SIZE_TRAIN), keys.MIN_SIZE_TRAIN_SAMPLING
    flips = None
    if cfg.MODEL.KEYPOINT_ON:
        metadata = read_split(cfg.DATASETS.TRAIN[0], cfg).metadata
        flips = flip_indices(metadata["keypoint_names"], metadata["keypoint_flip_map"])
    masks = keys.MASK_FORMAT if cfg.MODEL.MASK_ON else ""
    jitter = LargeScaleJitter.from_config(cfg) if keys.LSJ.ENABLED else None
    mapper = Mapper(
        keys.MAX_SIZE_TRAIN, keys.FORMAT, masks, flips, jitter=jitter, open_url=open_url
    )
    if jitter is not None:
        return jitter.sample_params, mapper
    return Augmentation(sizes, sampling, keys.RANDOM_FLIP).sample_params, mapper
