"""Settings of the whole suite. Hypothesis: no deadline, since a busy machine is no bug; the same examples every time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tandem", deadline=None, derandomize=True, report_multiple_bugs=False)
settings.load_profile("tandem")
