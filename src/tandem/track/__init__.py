"""Trackers: where metrics and samples go."""
