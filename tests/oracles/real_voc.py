"""The real VOC2007 pictures, whose files may name the picture they stand for instead of holding it.

Where the data was copied without links, ``JPEGImages/000030.jpg`` is a text with the link's target.
"""

from __future__ import annotations

from pathlib import Path


def with_links(source: Path, folder: Path) -> Path:
    """``source`` (a VOC layout) again as ``folder``, made of links to the real files."""
    folder.mkdir(parents=True)
    for part in source.iterdir():
        if part.name != "JPEGImages":
            (folder / part.name).symlink_to(part)
    (folder / "JPEGImages").mkdir()
    for picture in (source / "JPEGImages").iterdir():
        target = picture
        if picture.stat().st_size < 255:
            target = picture.parent / picture.read_text().strip()
        (folder / "JPEGImages" / picture.name).symlink_to(target.resolve())
    return folder


def few_pictures(source: Path, folder: Path, image_ids: tuple[str, ...]) -> Path:
    """As `with_links`, but both trainval and test are these pictures."""
    with_links(source, folder)
    (folder / "ImageSets").unlink()
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for split in ("trainval", "test"):
        (lists / f"{split}.txt").write_text("\n".join(image_ids) + "\n")
    return folder
