"""What both engines' runs share: processes, random state, weights, resuming."""
