"""`.ci/release`: a version that some file does not name is refused; the workflow that calls it."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from moco import __version__

ROOT = Path(__file__).resolve().parent.parent
FILES = (".ci/release", "moco/__init__.py", "CITATION.cff", "README.md", "CHANGELOG.md")
BUILDS = 7  # exit code of the interpreter that stands in for the build


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", folder, *author, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository that is ready to be released, on the tag of its version."""
    folder = tmp_path / "checkout"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text())
    (folder / ".ci/release").chmod(0o755)
    log = folder / "CHANGELOG.md"
    start, _, rest = log.read_text().partition("## Unreleased")
    _, _, released = rest.partition(f"\n## {__version__}")
    log.write_text(f"{start}## Unreleased\n\n## {__version__}{released}")
    git(folder, "init", "-q")
    commit(folder, f"v{__version__}")
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/sh\nexit {BUILDS}\n")
    stand_in.chmod(0o755)
    return folder


def commit(folder: Path, tag: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    git(folder, "tag", "-f", "-a", tag, "-m", tag)


def release(folder: Path, *arguments: str) -> tuple[int, str]:
    path = f"{folder.parent / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [folder / ".ci/release", *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_tagged_version_is_built(checkout: Path) -> None:
    assert release(checkout) == (BUILDS, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("CITATION.cff", f"version: {__version__}", "version: 9.9.9"),
        ("README.md", f"{{{__version__}}}", "{9.9.9}"),
        ("CHANGELOG.md", f"## {__version__}", "## 9.9.9"),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n### Added\n\n- A thing.\n"),
    ],
)
def test_a_file_of_another_version_is_refused(
    checkout: Path, file: str, old: str, new: str
) -> None:
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new))
    code, said = release(checkout)
    assert code == 2 and "uncommitted" in said
    commit(checkout, f"v{__version__}")
    code, said = release(checkout)
    assert code == 2 and said.startswith(f"error: {file}: "), said
    assert release(checkout, "--untagged") == (BUILDS, "")


@pytest.mark.slow
def test_the_tag_has_to_be_of_this_commit(checkout: Path) -> None:
    git(checkout, "commit", "-q", "--allow-empty", "-m", "later")
    code, said = release(checkout)
    assert code == 2 and f"no tag v{__version__}" in said


def test_the_workflow_runs_what_is_here_and_publishes_nothing_else() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", ".ci/release"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)
    assert jobs["build"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert jobs["build"]["needs"] == "test" and jobs["publish"]["needs"] == "build"
    assert workflow["permissions"] == {"contents": "read"}
    trusted = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert trusted == ["publish"] and not any("secrets." in str(job) for job in jobs.values())
