"""Algorithms as pure functions on tensors; `table` holds one row per algorithm."""
