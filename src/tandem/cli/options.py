"""What the commands share: the options that each of them has, and how a recipe is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tandem.config import Resolved
    from tandem.recipe import Recipe


@dataclass
class Invocation:
    """What error handling has to know about the command that runs. resume: the command that goes on with the run that began."""

    debug: bool = False
    resume: str | None = None


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.ensure_object(Invocation).debug |= value

    return click.option("--debug", is_flag=True, expose_value=False, callback=note, help="Show tracebacks.")(command)


recipe_argument = click.argument("recipe", type=click.Path(path_type=Path))
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


def load(path: Path, overrides: Sequence[str]) -> Resolved[Recipe]:
    """Raises ConfigError with every problem of the file and the overrides."""
    from tandem.recipe import load_recipe

    return load_recipe(path, overrides)
