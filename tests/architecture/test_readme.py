"""What the README shows is read by the program: its recipes, the overrides of its commands, its links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tandem import cli
from tandem.recipe import load_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for line in re.findall(r"^\$ tandem (.*)$", README, re.MULTILINE)]


@pytest.mark.parametrize("text", RECIPES)
def test_its_recipes_load(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    load_recipe(tmp_path / "recipe.yaml", ())


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_its_commands_parse(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, *arguments = command
    assert name in cli.tandem.commands
    cli.tandem.commands[name].make_context(name, list(arguments))
    if arguments and arguments[0].endswith(".yaml"):
        load_recipe(Path(arguments[0]), [argument for argument in arguments[1:] if not argument.startswith("-")])


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_its_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^\$ make (\S+)", README, re.MULTILINE)
    assert targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
