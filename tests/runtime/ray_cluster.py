"""The one Ray of the tests: more logical cores than this machine has, so that pools of some ranks fit beside each other."""

from __future__ import annotations

import atexit
import os
from functools import cache
from typing import Any

import ray
from ray.cluster_utils import Cluster


@cache
def cluster() -> Cluster:
    """Started at the first call, in this process, which is its driver; ended with it."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    node: dict[str, Any] = {"num_cpus": 8, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=node)
    ray.init(started.address, log_to_driver=False, logging_level="ERROR")
    atexit.register(started.shutdown)
    atexit.register(ray.shutdown)  # before
    return started
