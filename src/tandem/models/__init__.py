"""Numerics, the decoder that training and native rollout share, its heads, Hugging Face import and export."""
