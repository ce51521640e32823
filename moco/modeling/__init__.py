"""Networks and losses of the paper: encoder, InfoNCE, grouped and shuffled BN, mechanisms."""
