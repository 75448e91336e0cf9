"""registry: names become objects, and a name that does not says what exists and what to install."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tandem.errors import RegistryError, StalledError
from tandem.registry import resolve

TABLE = {"stalled": "tandem.errors:StalledError", "parse": "tandem.types:Key.parse", "gone": "tandem.errors:Gone"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a file of the user's into the current directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        Path(name).write_text(text, encoding="utf-8")

    return write


def message(name: str) -> str:
    with pytest.raises(RegistryError) as caught:
        resolve(name, TABLE, kind="reward")
    return str(caught.value)


def test_short_names_modules_and_attributes() -> None:
    assert resolve("stalled", TABLE) is StalledError
    assert resolve("tandem.errors:StalledError", {}) is StalledError
    parse = resolve("parse", TABLE)
    assert callable(parse)
    assert str(parse("train:3.1.0")) == "train:3.1.0"


def test_a_file_is_imported_once_and_what_it_defines_pickles(own: Callable[[str, str], None]) -> None:
    own("my_rewards.py", "class Score:\n    pass\n\ndef score(): return 1\n")
    score = resolve("my_rewards.py:score", TABLE)
    assert callable(score)
    assert score() == 1
    assert resolve(f"{Path.cwd()}/my_rewards.py:score", {}) is score
    assert pickle.loads(pickle.dumps(score)) is score


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "staled",
            "unknown reward 'staled'; did you mean 'stalled'? Known: gone, parse, stalled; your own is written 'package",
        ),
        ("qqqqqq", "unknown reward 'qqqqqq'. Known: gone, parse, stalled"),
        (":score", "reward ':score' is not of the form"),
        ("tandem.errors:", "reward 'tandem.errors:' is not of the form"),
        (
            "tandem.errors:StaledError",
            "reward 'tandem.errors:StaledError': tandem.errors has no attribute 'StaledError'; did you mean 'StalledError'?",
        ),
        ("gone", "reward 'gone': tandem.errors has no attribute 'Gone'; it has ClassVar, TandemError"),
        (
            "no_such_package.rewards:score",
            "reward 'no_such_package.rewards:score': there is no module 'no_such_package'; is it installed",
        ),
        ("no/such.py:score", "reward 'no/such.py:score': there is no file no/such.py (looked in "),
    ],
)
def test_names_that_stand_for_nothing(name: str, expected: str) -> None:
    assert message(name).startswith(expected)


def test_a_module_in_this_directory_is_pointed_out(own: Callable[[str, str], None]) -> None:
    own("my_own_rewards.py", "")
    assert "my_own_rewards.py is a file: write 'my_own_rewards.py:...'" in message("my_own_rewards:score")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def score(:\n", "importing broken.py failed: SyntaxError: invalid syntax ("),
        ("x = y\n", "importing broken.py failed: NameError: name 'y' is not defined"),
        (
            "import no_such_package.deep\n",
            "needs the package 'no_such_package', which is not installed: install the package that provides",
        ),
        ("from os import no_such_name\n", "importing broken.py failed: ImportError: cannot import name"),
    ],
)
def test_files_that_do_not_import(own: Callable[[str, str], None], text: str, expected: str) -> None:
    own("broken.py", text)
    assert expected in message("broken.py:score")
    own("broken.py", "score = 1\n")
    assert resolve("broken.py:score", {}) == 1


def test_a_missing_package_of_an_extra_is_named(own: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    own("adapter.py", "import no_such_engine\n")
    requirements = ["torch>=2", *(f"no-such.engine<3,>=2; extra == '{extra}'" for extra in ("check", "test", "engine"))]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    assert message("adapter.py:Engine").endswith("which is not installed: pip install 'tandem-rl[engine]'")


def test_the_module_of_an_extra_may_be_written_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["TransferQueue==0.1.11; extra == 'transferqueue'"])
    monkeypatch.setitem(sys.modules, "transfer_queue.storage.simple_storage", None)
    monkeypatch.delitem(sys.modules, "tandem.queue.units", raising=False)
    with pytest.raises(
        RegistryError, match=r"queue 'ray' needs the package 'transfer_queue.*pip install 'tandem-rl\[transferqueue\]'"
    ):
        resolve("ray", {"ray": "tandem.queue.units:start"}, kind="queue")


def test_letters_that_changed_places_come_first() -> None:
    with pytest.raises(RegistryError, match="did you mean 'grpo'"):
        resolve("gpro", {"gspo": "a:b", "grpo": "a:b", "gpo": "a:b"})
