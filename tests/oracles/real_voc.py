"""The real VOC2007 images, whose files may name the real file instead of holding the image.

Where the data was copied without links, `JPEGImages/000030.jpg` is a text with the link's target.
"""

from pathlib import Path


def with_links(source: Path, folder: Path) -> Path:
    """`source` (a VOC layout) again as `folder`, made of links to the real files."""
    (folder / "JPEGImages").mkdir(parents=True)
    for part in source.iterdir():
        if part.name != "JPEGImages":
            (folder / part.name).symlink_to(part)
    for image in (source / "JPEGImages").iterdir():
        target = image.read_text().strip() if image.stat().st_size < 255 else image.name
        (folder / "JPEGImages" / image.name).symlink_to((image.parent / target).resolve())
    return folder


def few_images(source: Path, folder: Path, image_ids: tuple[str, ...]) -> Path:
    """As `with_links`, but both trainval and test are these images."""
    with_links(source, folder)
    (folder / "ImageSets").unlink()
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for split in ("trainval", "test"):
        (lists / f"{split}.txt").write_text("\n".join(image_ids) + "\n")
    return folder
