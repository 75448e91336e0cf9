"""Weights from trainer to rollouts, and run snapshots on disk."""
