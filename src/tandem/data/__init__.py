"""Datasets and built-in tasks."""
