"""A split's records written again in YOLO layout, or in COCO's format as Roboflow exports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from detection.datasets.base import Split


def corners(item: dict) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = item["bbox"]
    return (x1, y1, x2, y2) if item["bbox_mode"] == 0 else (x1, y1, x1 + x2, y1 + y2)


def as_yolo(folder: Path, splits: dict[str, Split]) -> Path:
    """Write `splits` = {"train": split, ...} of VOC boxes; returns the data.yaml."""
    for name, split in splits.items():
        for record in split.records:
            image = folder / "images" / name / Path(record["file_name"]).name
            label = folder / "labels" / name / f"{image.stem}.txt"
            for path in (image, label):
                path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(record["file_name"], image)
            W, H = record["width"], record["height"]
            lines = [
                f"{item['category_id']} {(x1 + x2) / 2 / W} {(y1 + y2) / 2 / H} "
                f"{(x2 - x1) / W} {(y2 - y1) / H}\n"
                for item in record["annotations"]
                for x1, y1, x2, y2 in [corners(item)]
            ]
            label.write_text("".join(lines))
    names = {"names": list(next(iter(splits.values())).classes)}
    content = {**{name: f"images/{name}" for name in splits}, **names}
    (folder / "data.yaml").write_text(json.dumps(content))  # JSON is YAML
    return folder / "data.yaml"


def as_roboflow(folder: Path, splits: dict[str, Split]) -> Path:
    """Write `splits` with Roboflow's ids from 0 and its category 0; returns the folder."""
    for name, split in splits.items():
        (folder / name).mkdir(parents=True)
        dummy = {"id": 0, "name": "things", "supercategory": "none"}
        names = enumerate(split.classes, start=1)
        own = [{"id": i, "name": each, "supercategory": "things"} for i, each in names]
        content: dict = {"info": {"year": "2023"}, "licenses": [], "categories": [dummy, *own]}
        content |= {"images": [], "annotations": []}
        for image_id, record in enumerate(split.records):
            path = shutil.copy(record["file_name"], folder / name)
            size = {key: record[key] for key in ("height", "width")}
            content["images"].append({"id": image_id, "file_name": Path(path).name, **size})
            for item in record["annotations"]:
                x1, y1, x2, y2 = corners(item)
                content["annotations"].append(
                    {
                        "id": len(content["annotations"]),
                        "image_id": image_id,
                        "category_id": item["category_id"] + 1,
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "area": (x2 - x1) * (y2 - y1),
                        "iscrowd": 0,
                        "segmentation": [],
                    }
                )
        (folder / name / "_annotations.coco.json").write_text(json.dumps(content))
    return folder
