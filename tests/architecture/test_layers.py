"""The layer contract: it covers every module, it is what the architecture page shows, and the code keeps it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/tandem"
CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"][0]
LAYERS: list[list[str]] = [re.findall(r"\w+", layer) for layer in CONTRACT["layers"]]
LEVEL = {name: len(LAYERS) - index for index, names in enumerate(LAYERS) for name in names}


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, by the first name below `tandem`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "tandem" else {node.module or ""}
    return {name.split(".")[1] for name in found if name.startswith("tandem.")} & LEVEL.keys()


def illegal(module: str, imported: set[str]) -> set[str]:
    return {name for name in imported if name != module and LEVEL[name] >= LEVEL[module]}


def test_every_module_has_its_layer() -> None:
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}
    assert modules - LEVEL.keys() == set()
    assert CONTRACT["exhaustive"]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_lower_layers(path: Path) -> None:
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if module == "__init__":
        assert imports(path) == set()
    else:
        assert illegal(module, imports(path)) == set()


def test_the_check_has_teeth() -> None:
    assert illegal("rollout", {"train", "types", "rollout"}) == {"train"}
    assert illegal("types", {"ports", "errors"}) == {"ports"}


def test_the_architecture_page_shows_the_contract() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- layers -->\n```\n(.*?)```", page, re.DOTALL)
    assert block.splitlines() == CONTRACT["layers"]
