"""Benchmarks of the planner and the executor; run them as ``python -m bench.NAME``."""
