"""Tar shards: the same images as in files, in an order that needs no memory, and hostile tars."""

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
from moco.data.augment import V2
from moco.data.images import find_images, open_images
from moco.data.shards import ShardImages, ShardOrder, expand_braces, find_shards
from moco.data.views import Views, positions_of_steps
from tests.oracles.bombs import png_bomb

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def add(tar, name, content=b"", **header):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in header.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def write(path, members, form=tarfile.PAX_FORMAT):
    """A tar of (name, content)."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            add(tar, name, content)
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
        write(tmp_path / "a.tar", [("b.1.png", png()), ("b.2.png", png())])
        with pytest.raises(DataError, match=r"a\.tar: 2 images in one sample \(b\.1\.png, b\.2"):
            open_images(tmp_path / "a.tar")

    def test_global_index(self, shards):
        data = open_images(shards)
        assert [color(data, i) for i in (0, 5, 6, 25)] == [0, 5, 6, 25]
        assert data.name(24) == f"{shards}/train-004.tar:24.png"

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

    def test_where_nothing_is(self, tmp_path):
        write(tmp_path / "a.tar", [("x.cls", b"1")])
        with pytest.raises(DataError, match=r"no images .* in 1 shard"):
            open_images(tmp_path)


class TestFinding:
    def test_folder_file_and_pattern(self, shards):
        names = sorted(shards.glob("*.tar"))
        (shards / ".partial.tar").write_bytes(b"")
        assert find_shards(shards) == names
        assert find_shards(names[1]) == [names[1]]
        assert find_shards(f"{shards}/train-{{001..003}}.tar") == names[1:4]
        with pytest.raises(DataError, match=r"train-005\.tar: no such file"):
            find_shards(f"{shards}/train-{{000..005}}.tar")
        (shards / "train").mkdir()
        (names[0]).rename(shards / "train/a.tar")
        assert find_shards(shards) == [shards / "train/a.tar"]

    def test_braces(self):
        expected = ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
        assert list(expand_braces("a-{08..11}.tar")) == expected
        assert list(expand_braces("plain.tar")) == ["plain.tar"]
        with pytest.raises(UserError, match=r"\{3\.\.1\} falls; expected \{1\.\.3\}"):
            list(expand_braces("{3..1}.tar"))

    def test_of_a_pattern_the_first_missing_name_is_said_at_once(self, shards):
        pattern = f"{shards}/train-{{000..999999999999}}.tar"
        with pytest.raises(DataError, match=r"train-005\.tar: no such file"):
            find_shards(pattern)

    @pytest.mark.parametrize("root", ["pipe:touch /tmp/x", "https://a.org/b.tar", "s3://b/c.tar"])
    def test_pipes_and_urls_are_refused(self, root):
        with pytest.raises(UserError, match="pipes and URLs are not read"):
            open_images(root)

    def test_shards_among_images_are_refused(self, shards):
        (shards / "x.png").write_bytes(png())
        with pytest.raises(DataError, match=r"shards \(train-000\.tar\) and images \(x\.png\)"):
            open_images(shards)


def cuts(whole):
    """Where windows of two of the five shards end; the last shard has 2 images, the others 6."""
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

    def test_is_fixed(self, shards):
        """Begun runs are resumed in it."""
        seed, epoch = 3, 5
        expected = []
        shuffled = np.random.default_rng([seed, epoch]).permutation(5)
        for window, part in enumerate((shuffled[:2], shuffled[2:4], shuffled[4:])):
            indices = [i for s in part for i in range(6 * s, min(6 * s + 6, 26))]
            expected += (
                np.random.default_rng([seed, epoch, window + 1]).permutation(indices).tolist()
            )
        order = open_images(shards, window=2).epoch_order(seed, epoch)
        assert order[:26].tolist() == expected

    def test_is_a_function_of_seed_and_epoch(self, shards):
        data = open_images(shards, window=2)
        orders = {(s, e): data.epoch_order(s, e)[:26].tolist() for s in (0, 1) for e in (0, 1)}
        assert len({tuple(order) for order in orders.values()}) == 4
        again = open_images(shards, window=2).epoch_order(1, 0)
        pieces = [again[a : a + 7].tolist() for a in (21, 0, 14, 7)]  # in any order
        assert pieces[1] + pieces[3] + pieces[2] + pieces[0] == orders[1, 0]

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

    def test_one_beside_the_shards_is_used(self, shards):
        entries = [
            {"url": path.name, "nsamples": 6, "filesize": path.stat().st_size}
            for path in sorted(shards.glob("*.tar"))
        ]
        content = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": entries}
        (shards / "index.json").write_text(json.dumps(content))
        data = open_images(shards)
        assert len(data) == 30  # it says so of the last shard, too
        assert color(data, 7) == 7
        with pytest.raises(DataError, match=r"image 5 of .*train-004\.tar: holds 2 .* expected 6"):
            data.read(29)


class TestHostile:
    def test_links_and_devices_are_named(self, tmp_path):
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            with tarfile.open(tmp_path / "a.tar", "w") as tar:
                add(tar, "0.png", png())
                add(tar, "1.png", type=kind, linkname="/etc/passwd")
            with pytest.raises(DataError, match=r"a\.tar:1\.png: a link or special file"):
                open_images(tmp_path)

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
        """Beyond the end mark there is only padding: everywhere else it is an error."""
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

    def test_sizes_that_lie(self, tmp_path):
        path = write(tmp_path / "a.tar", [("0.png", png(1))])
        good = path.read_bytes()
        for field, reason in (
            (b"77777777777\0", "goes beyond the end"),
            (b"\x80" + b"\x7f" * 11, "goes beyond the end"),
            (b"\xff" * 12, "goes beyond the end"),
            (b"\xff" * 10 + b"\xf8\0", "goes beyond the end"),  # -2048: back to the header
            (b"0000000-012\0", "not a tar, or damaged"),
        ):
            header = bytearray(good[:512])
            header[124:136] = field
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            path.write_bytes(bytes(header) + good[512:])
            with pytest.raises(DataError, match=reason):
                open_images(path)

    @pytest.mark.parametrize(
        "record", [b"99 path=x\n", b"9 size=-1\n", b"11 size=1e3\n", b"0 path=y\n"]
    )
    def test_damaged_extended_headers(self, tmp_path, record):
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            add(tar, "PaxHeader", record, type=tarfile.XHDTYPE)
            add(tar, "0.png", png())
        with pytest.raises(DataError, match="damaged"):
            open_images(tmp_path)

    def test_no_tar_compressed_and_joined(self, tmp_path):
        path = write(tmp_path / "a.tar", [("0.png", png(1))])
        tar = path.read_bytes()
        for content, reason in (
            (gzip.compress(tar), "compressed with gzip, which cannot be read at random"),
            (b"", "not a tar"),
            (b"<html>" * 200, "not a tar"),
            (tar + tar, "joined by cat"),
        ):
            path.write_bytes(content)
            with pytest.raises(DataError, match=reason):
                open_images(path)
        with pytest.raises(UserError, match=r"unpack it to a plain .tar"):
            open_images(tmp_path / "a.tar.gz")

    def test_a_huge_member_is_not_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr("moco.data.shards.MAX_IMAGE_BYTES", 50)
        data = ShardImages([write(tmp_path / "a.tar", [("0.png", png())])])
        with pytest.raises(DataError, match=r"a\.tar:0\.png: \d+ bytes, the limit is 50"):
            data.read(0)


def test_an_interrupted_scan_continues(shards, tmp_path, monkeypatch):
    """It writes down now and then what it has found."""
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
