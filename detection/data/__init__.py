"""Data pipeline from records to batches of samples: order, augmentation, mapping."""
