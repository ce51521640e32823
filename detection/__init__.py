"""Fine-tuning detectors from a pre-trained backbone, on Detectron2 or on the embedded engine."""

import warnings

# fvcore's source triggers it in every process, and a user cannot fix it.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
