"""Small synthetic body surface in the files that DensePose downloads.

24 parts of 4 vertices each instead of SMPL's 27554; distances are random. iopath looks for the
files below `$FVCORE_CACHE` before it downloads them.
"""

import pickle
from pathlib import Path

import numpy as np
from scipy.io import savemat

PARTS, VERTICES = 24, 4


def write_body(cache: Path) -> Path:
    """Write the files into `cache`, the value of `$FVCORE_CACHE`."""
    folder = cache / "densepose" / "data"
    folder.mkdir(parents=True)
    rng = np.random.RandomState(0)
    number = PARTS * VERTICES
    part = np.repeat(np.arange(1, PARTS + 1), VERTICES)
    savemat(
        folder / "SMPL_subdiv.mat",
        {"U_subdiv": rng.rand(number), "V_subdiv": rng.rand(number), "Part_ID_subdiv": part},
    )
    savemat(folder / "SMPL_SUBDIV_TRANSFORM.mat", {"index": np.arange(1, number + 1)})
    distances = rng.uniform(0, 0.5, (number * (number - 1) // 2, 1)).astype(np.float32)
    (folder / "Pdist_matrix.pkl").write_bytes(pickle.dumps({"Pdist_matrix": distances}))
    # 256x256 tables per part: (u, v) after a horizontal flip.
    symmetries = np.empty((1, PARTS), dtype=object)
    for index in range(PARTS):
        symmetries[0, index] = rng.rand(256, 256)
    both = {"U_transforms": symmetries, "V_transforms": symmetries}
    savemat(folder / "UV_symmetry_transforms.mat", both)
    return cache
