"""SHA-256 of every image of a dataset, and that each can be decoded."""

import shutil
import subprocess

import pytest

from moco.common.errors import DataError
from moco.verify import changed_files, write_sums
from moco.verify import main as verify


class TestHashes:
    """Row 18."""

    @pytest.fixture
    def folder(self, images, tmp_path):
        shutil.copytree(images, tmp_path / "data")
        return tmp_path / "data"

    def test_a_flipped_bit_is_found(self, folder, capsys):
        verify([str(folder), "--write"])
        verify([str(folder), "-j", "1"])
        path = folder / "003.jpg"
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
        capsys.readouterr()
        with pytest.raises(DataError, match="1 problems") as caught:
            verify([str(folder)])
        assert caught.value.exit_code == 3
        out = capsys.readouterr().out
        assert "26 images, 0 bad" in out, "the decoder should not see it, or this proves nothing"
        assert "003.jpg: has changed (SHA-256 " in out

    def test_missing_and_new_files(self, folder):
        assert write_sums(folder) == 26
        (folder / "001.jpg").unlink()
        (folder / "new.jpg").touch()
        (folder / ".hidden").touch()
        assert changed_files(folder) == ["001.jpg: missing", "new.jpg: not in SHA256SUMS"]
        (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../../etc/passwd\n")
        assert "../../etc/passwd: missing" in changed_files(folder)  # not opened
        (folder / "SHA256SUMS").write_text("hello\n")
        with pytest.raises(DataError, match=r"SHA256SUMS: line 1: expected a SHA-256"):
            changed_files(folder)

    @pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum here")
    def test_sha256sum_agrees(self, folder):
        write_sums(folder)
        subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, check=True)

    def test_bad_images_are_all_named_and_nothing_is_recorded(self, folder, capsys):
        (folder / "003.jpg").write_bytes(b"")
        (folder / "005.jpg").write_bytes((folder / "005.jpg").read_bytes()[:400])
        with pytest.raises(DataError, match="2 problems"):
            verify([str(folder), "--write"])
        out = capsys.readouterr().out
        assert "003.jpg: the file is empty" in out and "005.jpg: cannot be decoded" in out
        assert not (folder / "SHA256SUMS").exists()
