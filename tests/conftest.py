"""Settings of the whole suite. Hypothesis: no deadline, since a busy machine is no bug; the same examples every time.

Ray: no tokens, since whether a process asks for one depends on what Ray has left behind in the home directory; and none that
begins because somebody asks it for something after the end.

Processes of pytest-xdist: a file is run by one of them, since its tests share what its fixtures made, and so are all tests of Ray,
which takes a whole machine for its own.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_AUTO_CONNECT": "0"}
settings.register_profile("tandem", deadline=None, derandomize=True, report_multiple_bugs=False)
settings.load_profile("tandem")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_ray = {item.path for item in items if item.get_closest_marker("ray")}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.path in with_ray else str(item.path)))
