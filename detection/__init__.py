"""Fine-tuning detectors from a pre-trained backbone, on Detectron2 or on the embedded engine."""
