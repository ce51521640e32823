"""Features of the verification's image from Detectron2's own backbone, filled from a file.

    python -m detection.backbone_features moco.pth features.pth

The backbone is built from the file's contract as for training, and Detectron2's own checkpointer
fills it. Writes a dict of tensors for torch.load: stem, res2 .. res5, each (1, C, H, W).

Without arguments both paths are read from standard input, one line with a JSON list, once
Detectron2 is imported: convert/detectron2_backbone.py starts this command before there is a file.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from convert.detectron2_backbone import READY
from moco.common.errors import UserError, run_cli
from moco.common.files import atomic_torch_save


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m detection.backbone_features", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("weights", nargs="?", help="file that convert/convert_to_d2.py wrote")
    parser.add_argument(
        "output", nargs="?", help="file to write; neither of them: read a JSON list from stdin"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; see `build_parser`."""
    args = build_parser().parse_args(argv)
    if (args.weights is None) != (args.output is None):
        raise UserError("output: missing; give WEIGHTS and OUTPUT, or neither")
    try:
        from detection.d2.backbone_features import features
    except ImportError as error:
        raise UserError(f"Detectron2 cannot be imported: {error}") from error
    weights, output = args.weights, args.output
    if weights is None:
        print(READY, flush=True)
        weights, output = json.loads(sys.stdin.readline())
    atomic_torch_save(output, features(weights))


if __name__ == "__main__":
    run_cli(main)
