"""What pyproject.toml cannot say: configs/ and results/ as parts of moco, and absolute links."""

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGES = find_namespace_packages(include=["moco*", "convert*", "detection*", "benchmarks*"])
CONFIGS = ["moco.configs", *(f"moco.configs.{name}" for name in find_namespace_packages("configs"))]
FENCED = re.compile(r"(^```.*?^```$)", re.S | re.M)
# The text of a link may be an image: a badge.
LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\(([^)\s]+)\)")


def long_description(readme: str, repository: str | None) -> str:
    """Make the links and images of a README absolute, for pages that are not in the repository.

    Args:
        readme: Markdown, whose paths are relative to the root of the repository.
        repository: Address of the repository; without one, a relative link or image becomes text.
    """

    def absolute(found: re.Match[str]) -> str:
        is_image, text, target = found[1], LINK.sub(absolute, found[2]), found[3]
        if re.match(r"https?://", target):
            return found[0]
        if repository is None:
            return text
        folder = "" if target.startswith("#") else "/raw/HEAD/" if is_image else "/blob/HEAD/"
        return f"{is_image}[{text}]({repository}{folder}{target})"

    parts = FENCED.split(readme)
    parts[::2] = [LINK.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    setup(
        packages=[*PACKAGES, *CONFIGS, "moco.results"],
        package_dir={"moco.configs": "configs", "moco.results": "results"},
        long_description=long_description(
            (ROOT / "README.md").read_text("utf-8"), project["urls"].get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
