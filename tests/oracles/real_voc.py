"""Real VOC2007 images, also if symbolic links were copied as text files.

In such a copy, `JPEGImages/000030.jpg` is a text with the link's target.
"""

from __future__ import annotations

from pathlib import Path


def with_links(source: Path, folder: Path) -> Path:
    """Make `folder` a copy of `source` (in VOC layout) of links to the real files."""
    folder.mkdir(parents=True)
    for part in source.iterdir():
        if part.name != "JPEGImages":
            (folder / part.name).symlink_to(part)
    (folder / "JPEGImages").mkdir()
    for image in (source / "JPEGImages").iterdir():
        target = image
        if image.stat().st_size < 255:
            target = image.parent / image.read_text().strip()
        (folder / "JPEGImages" / image.name).symlink_to(target.resolve())
    return folder


def few_images(source: Path, folder: Path, image_ids: tuple[str, ...]) -> Path:
    """Make a copy as `with_links` whose trainval and test are both these images."""
    with_links(source, folder)
    (folder / "ImageSets").unlink()
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for split in ("trainval", "test"):
        (lists / f"{split}.txt").write_text("\n".join(image_ids) + "\n")
    return folder
