"""Speed benchmarks: this project against transcriptions of the official code, and its peers."""
