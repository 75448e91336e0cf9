"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import tandem, write_recipe


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("finished")
    assert tandem("train", str(write_recipe(directory)), f"run.dir={directory / 'run'}", "trainer.steps=2", "warmup=null") == 0
    return directory / "run"
