"""Tar shards: images equal to those in files, an order that needs no memory, and hostile tars."""

import gzip
import io
import json
import pickle
import tarfile
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

import moco.data.shards
from moco.common.errors import DataError, UserError
from moco.data.images import find_images, open_images
from moco.data.shards import ShardImages, ShardOrder, expand_braces, find_shards
from moco.data.views import Views, positions_of_steps
from tests.oracles.augmentations import V2
from tests.oracles.bombs import png_bomb

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def add(tar, name, content=b"", **header):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in header.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def packed(*members, form=tarfile.PAX_FORMAT):
    """Return a tar of (name, content, **header)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, content, *header in members:
            add(tar, name, content, **dict(*header))
    return buffer.getvalue()


def write(path, members):
    path.write_bytes(packed(*members))
    return path


def png(color=0, size=(4, 3)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (color, 0, 0)).save(buffer, "png")
    return buffer.getvalue()


def color(images, index):
    return int(images.read(index)[0, 0, 0])


@pytest.fixture
def shards(tmp_path):
    """26 images of colors 0 to 25 in shards of 6; the last one has 2."""
    for s in range(5):
        part = range(6 * s, min(6 * s + 6, 26))
        write(tmp_path / f"train-{s:03d}.tar", [(f"{i:02d}.png", png(i)) for i in part])
    return tmp_path


class TestReading:
    @pytest.mark.parametrize("form", FORMATS)
    def test_a_folder_packed_by_tar(self, images, tmp_path, form):
        files = find_images(images)
        folder = "n01440764/" + "d" * 120  # does not fit the 100 bytes of a name
        name = "caf\xe9" if form != "ustar" else "cafe"
        for s, part in enumerate((files[:10], files[10:])):
            with tarfile.open(tmp_path / f"{s}.tar", "w", format=FORMATS[form]) as tar:
                add(tar, folder, type=tarfile.DIRTYPE)
                for path in part:
                    tar.add(path, f"{folder}/{name}-{path.stem}.JPEG")
        ours, theirs = open_images(tmp_path), open_images(images)
        assert len(ours) == len(theirs) == len(files)
        for i in range(len(files)):
            assert torch.equal(ours.read(i), theirs.read(i))
        assert ours.name(11) == f"{tmp_path}/1.tar:{folder}/{name}-011.JPEG"

    def test_shards_of_the_webdataset_package(self, images, tmp_path):
        webdataset = pytest.importorskip("webdataset")
        files = find_images(images)
        with webdataset.ShardWriter(f"{tmp_path}/train-%06d.tar", maxcount=10, verbose=0) as sink:
            for i, path in enumerate(files):
                more = {"cls": i % 3, "json": {"i": i}, "pickle": [i]}
                sink.write({"__key__": f"a/{i:04d}", **more, "jpg": path.read_bytes()})
        ours, theirs = open_images(tmp_path), open_images(images)
        assert len(ours) == len(files)
        for i in range(len(files)):
            assert torch.equal(ours.read(i), theirs.read(i))

    def test_a_sample_has_one_image(self, tmp_path):
        members = [
            ("x/0.cls", b"3"),
            ("x/0.seg.png", png(9)),
            ("x/0.png", png(1)),
            ("y/0.cam2.png", png(2)),  # another folder; the only image of its sample
            ("y/0.payload.pickle", b"never read"),
            ("y/._1.png", b"what macOS adds"),
            ("notes.txt", b""),
        ]
        data = open_images(write(tmp_path / "a.tar", members))
        assert [color(data, i) for i in range(len(data))] == [1, 2]

    def test_few_shards_are_open(self, shards):
        data = open_images(shards, window=1)
        for index in (0, 7, 13, 0, 19, 25):
            color(data, index)
        assert list(data._open) == [3, 4]
        for index in (0, 7, 0, 13):
            color(data, index)
        assert list(data._open) == [0, 2]  # the least recently used one went

    def test_goes_to_other_processes(self, shards):
        data = open_images(shards)
        color(data, 3)
        assert color(pickle.loads(pickle.dumps(data)), 3) == 3
        views = Views(data, V2, seed=0)
        steps = [[(*p, 0) for p in at] for at in positions_of_steps(data, 8, 0, 0, 4)]
        zero, two = (
            list(torch.utils.data.DataLoader(views, batch_sampler=steps, num_workers=workers,
                                             collate_fn=lambda batch: batch))
            for workers in (0, 2)
        )  # fmt: skip
        assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(zero, two, strict=True))

    def test_a_shard_that_goes_during_the_run(self, shards):
        data = open_images(shards)
        (shards / "train-001.tar").unlink()
        with pytest.raises(DataError, match=r"^image 1 of .*/train-001\.tar: cannot be read"):
            data.read(7)
        views = Views(data, V2, seed=0, skip_bad=True)
        batch = views.__getitems__([(0, 7, 0)])
        assert batch.complete and "train-001.tar" in batch.bad[0]


class TestFinding:
    def test_folder_file_and_pattern(self, shards):
        names = sorted(shards.glob("*.tar"))
        (shards / ".partial.tar").write_bytes(b"")
        assert find_shards(shards) == names
        assert find_shards(names[1]) == [names[1]]
        assert find_shards(f"{shards}/train-{{001..003}}.tar") == names[1:4]
        with pytest.raises(DataError, match=r"train-005\.tar: no such file"):  # named at once
            find_shards(f"{shards}/train-{{000..999999999999}}.tar")
        (shards / "train").mkdir()
        (names[0]).rename(shards / "train/a.tar")
        assert find_shards(shards) == [shards / "train/a.tar"]

    def test_braces(self):
        expected = ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
        assert list(expand_braces("a-{08..11}.tar")) == expected
        assert list(expand_braces("plain.tar")) == ["plain.tar"]
        with pytest.raises(UserError, match=r"\{3\.\.1\} is descending; expected \{1\.\.3\}"):
            list(expand_braces("{3..1}.tar"))

    @pytest.mark.parametrize("root", ["pipe:touch /tmp/x", "https://a.org/b.tar", "s3://b/c.tar"])
    def test_pipes_and_urls_are_refused(self, root):
        with pytest.raises(UserError, match="pipes and URLs are not supported"):
            open_images(root)
        with pytest.raises(UserError, match=r"decompress it to a plain .tar"):
            open_images("a.tar.gz")

    def test_shards_among_images_are_refused(self, shards):
        (shards / "x.png").write_bytes(png())
        with pytest.raises(DataError, match=r"shards \(train-000\.tar\) and images \(x\.png\)"):
            open_images(shards)


def cuts(whole):
    """Return where windows of two of the five shards end; the last shard has 2 images, not 6."""
    first = 8 if 24 in whole[:12] else 12
    return [first, first + (8 if 24 in whole[first : first + 12] else 12)]


class TestOrder:
    def test_every_image_once_in_windows(self, shards):
        order = open_images(shards, window=2).epoch_order(1, 0)
        whole = order[:26].tolist()
        assert sorted(whole) == list(range(26))
        assert order[20:99].tolist() == whole[20:]
        shards_of = [{index // 6 for index in part} for part in np.split(whole, cuts(whole))]
        assert [len(part) for part in shards_of] == [2, 2, 1]
        assert set().union(*shards_of) == set(range(5))
        assert whole != sorted(whole)

    @pytest.mark.parametrize(("seed", "epoch"), [(3, 5), (1, 0), (1, 1)])
    def test_is_fixed(self, shards, seed, epoch):
        """Earlier runs are resumed in it, and any part of it can be computed first."""
        expected = []
        shuffled = np.random.default_rng([seed, epoch]).permutation(5)
        for window, part in enumerate((shuffled[:2], shuffled[2:4], shuffled[4:])):
            indices = [i for s in part for i in range(6 * s, min(6 * s + 6, 26))]
            expected += (
                np.random.default_rng([seed, epoch, window + 1]).permutation(indices).tolist()
            )
        order = open_images(shards, window=2).epoch_order(seed, epoch)
        for start in (21, 0, 14, 7):
            assert order[start : start + 7].tolist() == expected[start : start + 7]
        assert order[:26].tolist() == expected

    def test_resuming_at_any_step(self, shards):
        data = open_images(shards, window=2)
        steps = list(positions_of_steps(data, 4, 0, 0, 12))
        for start in range(12):
            assert list(positions_of_steps(data, 4, 0, start, 12)) == steps[start:]

    def test_a_billion_images_take_little_memory(self):
        starts = np.arange(100_001) * 10_000
        tracemalloc.start()
        order = ShardOrder(starts, 16, seed=0, epoch=0)
        parts = [order[first : first + 1024] for first in (0, 500_000_000, 999_999_500)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [len(part) for part in parts] == [1024, 1024, 500]
        assert len({index // 10_000 for index in parts[1].tolist()}) == 16
        assert peak < 32 << 20


class TestIndex:
    def test_shards_are_scanned_once(self, shards, tmp_path, monkeypatch):
        scanned = []
        scan = moco.data.shards.scan
        monkeypatch.setattr(
            "moco.data.shards.scan", lambda path: scanned.append(path) or scan(path)
        )
        index = tmp_path / "run/shards.json"
        assert len(open_images(shards, index)) == 26
        assert len(scanned) == 5
        assert len(open_images(shards, index)) == 26
        assert len(scanned) == 5
        write(shards / "train-004.tar", [(f"{i}.png", png(i, (64, 64))) for i in range(99)])
        assert len(open_images(shards, index)) == 24 + 99
        assert scanned[5:] == [shards / "train-004.tar"]
        index.write_text("cut off {")
        assert len(open_images(shards, index)) == 24 + 99

    def test_one_next_to_the_shards_is_used(self, shards):
        entries = [
            {"url": path.name, "nsamples": 6, "filesize": path.stat().st_size}
            for path in sorted(shards.glob("*.tar"))
        ]
        content = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": entries}
        (shards / "index.json").write_text(json.dumps(content))
        data = open_images(shards)
        assert len(data) == 30  # the index has 6 for the last shard, too
        assert color(data, 7) == 7
        with pytest.raises(
            DataError, match=r"image 5 of .*train-004\.tar: contains 2 .* expected 6"
        ):
            data.read(29)


GOOD = packed(("0.png", png(1)))


def with_size(field):
    """Return a tar whose first header has this size, and a valid checksum."""
    header = bytearray(GOOD[:512])
    header[124:136], header[148:156] = field, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + GOOD[512:]


def extended(record):
    """Return a tar with this record in an extended header."""
    header = ("PaxHeader", record, {"type": tarfile.XHDTYPE})
    return packed(header, ("0.png", png()), form=tarfile.USTAR_FORMAT)


def link(kind):
    """Return a tar with a link or device in the place of an image."""
    return packed(("0.png", png()), ("1.png", b"", {"type": kind, "linkname": "/etc/passwd"}))


class TestHostile:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            *(
                (link(kind), r":1\.png: a link or special file")
                for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
            ),
            (with_size(b"77777777777\0"), "goes beyond the end"),
            (with_size(b"\x80" + b"\x7f" * 11), "goes beyond the end"),
            (with_size(b"\xff" * 12), "goes beyond the end"),
            (with_size(b"\xff" * 10 + b"\xf8\0"), "goes beyond the end"),  # -2048: to the header
            (with_size(b"0000000-012\0"), ": not a tar, or damaged"),
            *(
                (extended(record), ".*damaged")
                for record in (b"9 size=-1\n", b"11 size=1e3\n", b"0 path=y\n")
            ),
            (extended(b"99 path=x\n"), ".*no images .* in 1 shard"),  # renamed, to no image
            (gzip.compress(GOOD), ": compressed with gzip, which has no random access"),
            (b"", ": not a tar"),
            (b"<html>" * 200, ": not a tar"),
            (GOOD + GOOD, ".*joined by cat"),
            (packed(("b.1.png", png()), ("b.2.png", png())), r": 2 images in one sample \(b\.1"),
            (packed(("x.cls", b"1")), ".*no images .* in 1 shard"),
        ],
    )
    def test_bad_tars_are_refused(self, tmp_path, content, reason):
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(DataError, match=reason) as caught:
            open_images(tmp_path)
        assert str(caught.value).startswith(str(tmp_path))

    def test_names_are_only_names(self, tmp_path):
        names = ["../../up.png", "/etc/root.png", "a\nb\x1b[31m.png"]
        data = open_images(write(tmp_path / "a.tar", [(name, png(5)) for name in names]))
        assert [color(data, i) for i in range(3)] == [5, 5, 5]
        assert data.name(0) == f"{tmp_path}/a.tar:../../up.png"
        assert data.name(2) == f"{tmp_path}/a.tar:a\\nb\\x1b[31m.png"
        assert list(tmp_path.iterdir()) == [tmp_path / "a.tar"]

    def test_bad_images_are_named(self, tmp_path):
        noise = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(
            noise, "jpeg"
        )
        cases = {
            "empty.jpg": (b"", "the file is empty"),
            "code.jpg": (pickle.dumps(print), "not an image"),
            "half.jpg": (noise.getvalue()[:1500], "cannot be decoded"),
            "bomb.png": (png_bomb(), "decompression bomb"),
        }
        assert len(cases["bomb.png"][0]) < 49_000
        data = open_images(write(tmp_path / "a.tar", [(n, c) for n, (c, _) in cases.items()]))
        for index, (name, (_, reason)) in enumerate(cases.items()):
            with pytest.raises(DataError, match=rf"a\.tar:{name}: {reason}"):
                data.read(index)

    def test_truncated_at_any_byte(self, tmp_path):
        """Truncation is an error everywhere except in the padding after the end mark."""
        path = write(tmp_path / "a.tar", [("0.png", png(1)), ("long/" * 30 + "1.png", png(2))])
        content = path.read_bytes()
        end = len(content.rstrip(b"\0"))
        end_mark = -(-end // 512) * 512 + 512
        for size in [*range(0, end_mark, 97), end_mark - 1]:
            path.write_bytes(content[:size])
            with pytest.raises(DataError, match=r"a.tar"):
                open_images(path)
        path.write_bytes(content[:end_mark])
        assert len(open_images(path)) == 2

    def test_flipped_bytes_never_end_in_another_error(self, tmp_path):
        path = write(tmp_path / "a.tar", [("0.png", png(1)), ("long/" * 30 + "1.png", png(2))])
        content = path.read_bytes()
        rng = np.random.default_rng(0)
        for _ in range(400):
            bad = bytearray(content)
            at = int(rng.integers(0, 3584))
            bad[at] = int(rng.integers(0, 256))
            if at % 512 < 500:  # a forger keeps the checksum right
                start = at - at % 512
                block = bad[start : start + 512]
                block[148:156] = b" " * 8
                bad[start + 148 : start + 156] = b"%06o\0 " % sum(block)
            path.write_bytes(bad)
            try:
                data = open_images(path)
                for i in range(len(data)):
                    data.read(i)
            except DataError as error:
                assert str(path) in str(error) or str(tmp_path) in str(error)

    def test_a_huge_member_is_not_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr("moco.data.shards.MAX_IMAGE_BYTES", 50)
        data = ShardImages([write(tmp_path / "a.tar", [("0.png", png())])])
        with pytest.raises(DataError, match=r"a\.tar:0\.png: \d+ bytes, the limit is 50"):
            data.read(0)


def test_an_interrupted_scan_continues(shards, tmp_path, monkeypatch):
    """The index is written during the scan."""
    scanned = []

    def scan(path):
        scanned.append(path.name)
        if len(scanned) == 4:
            raise KeyboardInterrupt
        return original(path)

    original = moco.data.shards.scan
    monkeypatch.setattr(moco.data.shards, "scan", scan)
    monkeypatch.setattr(moco.data.shards, "INDEX_SECONDS", 0)
    (tmp_path / "run").mkdir()
    with pytest.raises(KeyboardInterrupt):
        open_images(shards, tmp_path / "run/shards.json")
    assert len(open_images(shards, tmp_path / "run/shards.json")) == 26
    names = [f"train-{s:03d}.tar" for s in (0, 1, 2, 3, 3, 4)]
    assert scanned == names
