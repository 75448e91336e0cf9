"""Processes that tests fork: all by one server, which has the heavy imports behind it and no threads that a fork would break.

multiprocessing has one server a process, whoever asks for it, so that what it imports is said once, here.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tandem.launch", "torch._dynamo", "matplotlib.figure", "plotext"])
