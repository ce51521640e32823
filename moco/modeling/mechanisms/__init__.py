"""Contrastive loss mechanisms (the paper's Figure 2), one file each."""
