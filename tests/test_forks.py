"""The server of forked processes has imported what a run needs."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from tests.forks import FORKS


def imported(end: Connection) -> None:
    end.send([name in sys.modules for name in ("tandem.launch", "torch._dynamo", "matplotlib.figure", "plotext")])


def test_a_forked_process_has_the_heavy_imports_behind_it() -> None:
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=imported, args=(there,))
    process.start()
    assert here.recv() == [True] * 4
    process.join()
