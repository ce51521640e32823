"""Templates of a Detectron2 user's modules, for `--import`."""

# RoI heads that log a scalar in some iterations.
SPARSE = """
from detectron2.modeling import ROI_HEADS_REGISTRY
from detectron2.modeling.roi_heads import StandardROIHeads
from detectron2.utils.events import get_event_storage

@ROI_HEADS_REGISTRY.register()
class {name}(StandardROIHeads):
    def forward(self, images, features, proposals, targets=None):
        if self.training and get_event_storage().iter % 6 == 2:
            get_event_storage().put_scalar("users/sparse", len(images) + get_event_storage().iter)
        return super().forward(images, features, proposals, targets)
"""
# Datasets without training sizes, with boxes in two modes and masks in run lengths.
CATALOG = """
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.structures import BoxMode

def records(split):
    json_file = f"{root}/coco/annotations/instances_{{split}}2017.json"
    found = load_coco_json(json_file, f"{root}/coco/{{split}}2017", f"users_{{split}}")
    for record in found:
        if split == "train":
            del record["height"], record["width"]
        for item in record["annotations"][::2]:
            x, y, w, h = item["bbox"]
            item |= {{"bbox": [x, y, x + w, y + h], "bbox_mode": BoxMode.XYXY_ABS}}
    return found

for split in ("train", "val"):
    DatasetCatalog.register(f"users_{{split}}", lambda split=split: records(split))
    json_file = f"{root}/coco/annotations/instances_{{split}}2017.json"
    MetadataCatalog.get(f"users_{{split}}").set(json_file=json_file, evaluator_type="coco")
    DatasetCatalog.get(f"users_{{split}}")
"""
# Labels of every pixel next to those instances, which DatasetMapper reads with `Image.convert`.
PANOPTIC = """
import numpy as np
from pathlib import Path
from PIL import Image

def labeled(split):
    found = records(split)
    for number, record in enumerate(found):
        path = Path(record["file_name"])
        record["sem_seg_file_name"] = str(path.with_suffix(".labels.png"))
        if not Path(record["sem_seg_file_name"]).exists():
            width, height = Image.open(path).size
            y, x = np.mgrid[:height, :width]
            Image.fromarray(((x // 9 + y // 7 + number) % 4).astype(np.uint8)).save(
                record["sem_seg_file_name"]
            )
    return found

for split in ("train", "val"):
    DatasetCatalog.remove(f"users_{{split}}")
    DatasetCatalog.register(f"users_{{split}}", lambda split=split: labeled(split))
"""
