"""Rollout engines and the session that records tokens."""
