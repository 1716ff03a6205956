"""Measurements that back what the documentation says (docs/benchmarks.md)."""
