from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tandem import doctor
from tandem.errors import SandboxError
from tandem.sandbox.probe import Finding as Wall

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"].keys() - {"all", "test", "check"}


def test_it_knows_what_each_extra_brings() -> None:
    assert doctor.BRINGS.keys() == EXTRAS


def test_here_nothing_is_wrong() -> None:
    findings = {finding.what: finding for finding in doctor.examine()}
    assert findings.keys() >= {"Python", "torch", "law 5", "/dev/shm", "disk"}
    assert "wrong" not in {finding.verdict for finding in findings.values()}


@pytest.mark.parametrize(
    ("walls", "verdict", "advice"),
    [
        ([Wall("no network", True)], "ok", ""),
        ([Wall("no network", True), Wall("few processes", False)], "note", "does not hold: few processes"),
        (SandboxError("unshare ns: EPERM"), "note", "unshare ns: EPERM"),
    ],
)
def test_it_says_which_walls_of_the_sandbox_hold(
    walls: list[Wall] | SandboxError, verdict: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tried(*_: object) -> list[Wall]:
        if isinstance(walls, SandboxError):
            raise walls
        return walls

    monkeypatch.setattr(doctor, "sandboxed", tried)
    found = {finding.what: finding for finding in doctor.examine()}["sandbox"]
    assert (found.verdict, found.advice) == (verdict, advice)
    assert found.found == (
        "not to be had: reward code judges nothing here" if isinstance(walls, SandboxError) else "holds: no network"
    )


def test_a_missing_extra_is_a_note_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "extras", lambda: {"wandb": ("wandb",)})
    monkeypatch.setattr(metadata, "version", version)
    found = {finding.what: finding for finding in doctor.examine()}
    assert (found["wandb"].verdict, found["wandb"].advice) == ("note", "pip install 'tandem-rl[wandb]'")
    assert found["torch"].verdict == "wrong"


def test_the_extra_all_brings_all_of_them_but_one_that_gets_on_with_none() -> None:
    """What TransferQueue brings along makes the verifier of maths read formulas wrongly."""
    brought = {line.removeprefix("tandem-rl[").removesuffix("]") for line in PROJECT["optional-dependencies"]["all"]}
    assert brought == EXTRAS - {"transferqueue"}
