"""Suites of transfer runs and the tables made of them, the quickstart, and speed benchmarks."""
