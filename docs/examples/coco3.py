"""Write COCO files of the three classes with the most objects in the first 100 training images.

    python docs/examples/coco3.py COCO OUT

COCO has `annotations/instances_train2017.json` and `instances_val2017.json`; OUT gets `train.json`
and `test.json`, which name 100 images each. Their images belong into `OUT/train` and `OUT/test`.
"""

import json
import sys
from collections import Counter
from pathlib import Path

IMAGES = 100

source, out = map(Path, sys.argv[1:])
kept: set[int] = set()
for ours, theirs in (("train", "train2017"), ("test", "val2017")):
    content = json.loads((source / f"annotations/instances_{theirs}.json").read_text("utf-8"))
    images = content["images"][:IMAGES]
    names = {image["id"] for image in images}
    objects = [o for o in content["annotations"] if o["image_id"] in names]
    kept = kept or {c for c, _ in Counter(o["category_id"] for o in objects).most_common(3)}
    content["images"] = images
    content["categories"] = [c for c in content["categories"] if c["id"] in kept]
    content["annotations"] = [o for o in objects if o["category_id"] in kept]
    (out / f"{ours}.json").write_text(json.dumps(content), "utf-8")
