"""Tandem: reinforcement-learning post-training for language models.

The package root imports nothing heavy, so that `tandem --help` answers at once; import what you need from its module.
"""

__version__ = "0.1.0"
