"""Settings of the whole suite. Hypothesis: no deadline, since a busy machine is no bug; the same examples every time.

Slow tests have a limit of their own, for a machine whose cores others use too.

Ray: no tokens, since whether a process asks for one depends on what Ray has left behind in the home directory; and none that
begins because somebody asks it for something after the end.

Ctrl-C: a suite that a script started in its background is deaf to it, and so would be all runs that tests interrupt.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

_SLOW_S = 900

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_AUTO_CONNECT": "0"}
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("tandem", deadline=None, derandomize=True, report_multiple_bugs=False)
settings.load_profile("tandem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(_SLOW_S))
