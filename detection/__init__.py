"""Fine-tuning detectors from a pre-trained backbone, on Detectron2 or on the embedded engine."""

import warnings

# Of fvcore's source, in every process that imports it; nothing that a user could do about it.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
