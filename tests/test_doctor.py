from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tandem import doctor

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"].keys() - {"all", "test", "check"}


def test_it_knows_what_each_extra_brings() -> None:
    assert doctor.BRINGS.keys() == EXTRAS


def test_here_nothing_is_wrong() -> None:
    findings = {finding.what: finding for finding in doctor.examine()}
    assert findings.keys() >= {"Python", "torch", "law 5", "/dev/shm", "disk"}
    assert "wrong" not in {finding.verdict for finding in findings.values()}


def test_a_missing_extra_is_a_note_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "extras", lambda: {"wandb": ("wandb",)})
    monkeypatch.setattr(metadata, "version", version)
    found = {finding.what: finding for finding in doctor.examine()}
    assert (found["wandb"].verdict, found["wandb"].advice) == ("note", "pip install 'tandem-rl[wandb]'")
    assert found["torch"].verdict == "wrong"


def test_the_extra_all_brings_all_of_them() -> None:
    assert {line.removeprefix("tandem-rl[").removesuffix("]") for line in PROJECT["optional-dependencies"]["all"]} == EXTRAS
