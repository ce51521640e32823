"""How many images and objects the published splits have."""

# name → images, objects (0: not given where the dataset is published).
_COUNTS = {
    "voc_2007_trainval": (5011, 0),
    "voc_2007_train": (2501, 0),
    "voc_2007_val": (2510, 0),
    "voc_2007_test": (4952, 0),
    "voc_2012_trainval": (11540, 0),
    "voc_2012_train": (5717, 0),
    "voc_2012_val": (5823, 0),
    "voc_2007_sem_seg_train": (209, 0),
    "voc_2007_sem_seg_val": (213, 0),
    "voc_2007_sem_seg_trainval": (422, 0),
    "voc_2007_sem_seg_test": (210, 0),
    "voc_2012_sem_seg_train": (1464, 0),
    "voc_2012_sem_seg_val": (1449, 0),
    "voc_2012_sem_seg_trainval": (2913, 0),
    "voc_2012_sem_seg_train_aug": (10582, 0),
    "coco_2017_train": (118287, 860001),
    "coco_2017_val": (5000, 36781),
    "coco_2014_train": (82783, 604907),
    "coco_2014_val": (40504, 291875),
    "coco_2014_minival": (5000, 0),
    "coco_2014_valminusminival": (35504, 0),
    "keypoints_coco_2017_train": (118287, 262465),
    "keypoints_coco_2017_val": (5000, 11004),
    "lvis_v0.5_train": (57263, 0),
    "lvis_v0.5_val": (5000, 0),
    "lvis_v1_train": (100170, 1270141),
    "lvis_v1_val": (19809, 244707),
    "cityscapes_fine_instance_seg_train": (2975, 0),
    "cityscapes_fine_instance_seg_val": (500, 0),
    "cityscapes_fine_sem_seg_train": (2975, 0),
    "cityscapes_fine_sem_seg_val": (500, 0),
}


def image_count(name: str) -> int:
    """Images of the published split; 0 where none is known."""
    return _COUNTS.get(name, (0, 0))[0]


def object_count(name: str) -> int:
    """Annotated objects of the published split; 0 where none is known."""
    return _COUNTS.get(name, (0, 0))[1]
