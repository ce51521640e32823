"""Lists of images and images from untrusted sources: no path leads out, no bomb takes memory."""

import shutil
from pathlib import Path

import pytest

from moco.common.errors import DataError
from moco.data.images import find_images
from tests.moco.commands import pretrain as main
from tests.oracles.bombs import png_bomb
from tests.oracles.python import run_python

ROOT = Path(__file__).resolve().parents[3]


class TestPathTraversal:
    """Row 12; tests/moco/data/test_shards.py has tar files, tests/detection the annotations."""

    @pytest.mark.parametrize("entry", ["../../etc/passwd", "a/../../secret.jpg", ".."])
    def test_a_list_stays_below_its_folder(self, images, tmp_path, entry):
        folder = tmp_path / "data"
        (folder / "a").mkdir(parents=True)
        image = sorted(images.iterdir())[0]
        shutil.copy(image, tmp_path / "secret.jpg")
        shutil.copy(image, folder / "a" / "x.jpg")
        (folder / "list.txt").write_text(f"a/x.jpg\n./a/../a/x.jpg\n{image}\n")
        here = folder / "a/x.jpg"
        assert find_images(folder / "list.txt") == [here, here, image]  # absolute paths are allowed
        (folder / "list.txt").write_text(f"a/x.jpg\n{entry}\n")
        with pytest.raises(DataError, match=r"list.txt: line 2: .* is outside the list's folder"):
            find_images(folder / "list.txt")

    def test_what_is_no_image_is_only_named(self, tiny, tmp_path):
        """An absolute path may name any file, but its content is not shown."""
        (tmp_path / "secret").write_text("top secret")
        (tmp_path / "list.txt").write_text(f"{tmp_path / 'secret'}\n" * 8)
        with pytest.raises(DataError, match="secret: not an image") as caught:
            main(tiny(DATA__ROOT=tmp_path / "list.txt", OUTPUT_DIR=tmp_path / "run"))
        assert "top secret" not in str(caught.value)
        (tmp_path / "list.txt").write_text("/dev/zero\n" * 8)
        with pytest.raises(DataError, match="no such file /dev/zero"):
            find_images(tmp_path / "list.txt")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_decompression_bomb_takes_no_memory(tmp_path):
    """Row 17: 400 megapixels in 49 KB; decoding them as RGB would take 1.2 GB."""
    (tmp_path / "bomb.png").write_bytes(png_bomb())
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    code = (
        "import sys\n"
        "from moco.data.decode import decode\n"
        "from moco.common.errors import DataError\n"
        "try: decode(sys.argv[1])\n"
        "except DataError as error: print(error)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"  # its peak, KiB
    )
    message, kib = run_python("-c", code, tmp_path / "bomb.png").splitlines()
    assert "bomb.png: decompression bomb?" in message
    assert int(kib) < 300 << 10
