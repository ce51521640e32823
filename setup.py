"""Packaging. Detectron2 is not in the package index; README.md says how it is installed."""

from setuptools import find_packages, setup

STUBS = ["types-PyYAML", "types-tabulate", "types-tqdm"]
# One author and young: pinned, and compared with the package of the dataset in the tests.
LVIS = ["hotcoco==1.3.0"]
CITYSCAPES = ["cityscapesscripts", "shapely"]

setup(
    name="moco-transfer",
    version="0.1.0",
    description="How well does a pre-trained backbone transfer to detection and segmentation? "
    "MoCo (arXiv 1911.05722) as a Detectron2 plugin: pre-training, conversion, transfer, tables.",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(
        include=["moco*", "convert*", "detection*", "benchmarks*"], exclude=["benchmarks.speed"]
    ),
    package_data={
        "benchmarks.report": ["paper.yaml", "templates/*"],
        "detection.config": ["recipes.yaml"],
    },
    install_requires=[
        # torch.load(weights_only=True) of earlier versions can be made to run code
        # (CVE-2025-32434, CVE-2026-24747).
        "torch>=2.10",
        "torchvision>=0.25",
        "pillow>=12.3",
        "numpy",
        "fvcore",
        "pyyaml",
        "filelock",
        "tqdm",
        "tensorboard",
        "tabulate",
        "jinja2",
        "matplotlib",
        "scipy",
        "pycocotools",
        "safetensors",
    ],
    extras_require={
        "lvis": LVIS,
        "cityscapes": CITYSCAPES,
        "speed": ["lightly"],  # the peer that benchmarks.speed compares with
        "test": [
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy"),
            *STUBS,
            *LVIS,
            *CITYSCAPES,
            "webdataset",  # its shards are read without it; the tests let it write some
            *("lightly", "timm"),  # the tests convert what these packages write
        ],
    },
)
