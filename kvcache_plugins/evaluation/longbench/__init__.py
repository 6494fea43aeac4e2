"""LongBench v1: 21 tasks, their metrics, and the predictions of a model through any cache."""
