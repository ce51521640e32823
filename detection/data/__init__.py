"""From records to samples: order, augmentation, mapping, batches; knows no network."""
