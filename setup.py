"""What pyproject.toml cannot say: the folder configs/ is in the package as moco/configs/."""

from setuptools import find_namespace_packages, setup

PACKAGES = find_namespace_packages(include=["moco*", "convert*", "detection*", "benchmarks*"])
CONFIGS = ["moco.configs", *(f"moco.configs.{name}" for name in find_namespace_packages("configs"))]

setup(packages=[*PACKAGES, *CONFIGS], package_dir={"moco.configs": "configs"})
