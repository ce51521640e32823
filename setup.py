"""What pyproject.toml cannot say: configs/ and results/ are in the package as parts of moco."""

from setuptools import find_namespace_packages, setup

PACKAGES = find_namespace_packages(include=["moco*", "convert*", "detection*", "benchmarks*"])
CONFIGS = ["moco.configs", *(f"moco.configs.{name}" for name in find_namespace_packages("configs"))]

setup(
    packages=[*PACKAGES, *CONFIGS, "moco.results"],
    package_dir={"moco.configs": "configs", "moco.results": "results"},
)
