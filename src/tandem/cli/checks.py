"""Commands that look at data, a reward and the sandbox before anything is trained on them."""

from __future__ import annotations

from pathlib import Path

import click

from tandem.cli.options import debug_option, load, overrides_argument, recipe_argument
from tandem.errors import ConfigError


@click.group()
def data() -> None:
    """Look at data before it is trained on."""


@data.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--heldout", type=click.Path(path_type=Path), help="The held-out file: prompts that are in both are told.")
@click.option("--column", "columns", multiple=True, metavar="OURS=THEIRS", help="As data.train.columns in a recipe; repeatable.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A Hugging Face directory; lengths are then in tokens.")
@click.option("--max-tokens", type=click.IntRange(1), help="Count the prompts that are longer; needs --tokenizer.")
@debug_option
def check_data(file: Path, heldout: Path | None, columns: tuple[str, ...], tokenizer: Path | None, max_tokens: int | None) -> None:
    """Say what is understood of a data file.

    FILE is a .jsonl, .parquet or .csv file. Shown are its columns, the first task as it is read, lengths, and what is twice.

    \b
    Examples:
      tandem data check train.jsonl
      tandem data check train.parquet --heldout test.parquet --tokenizer path/to/model --max-tokens 512
      tandem data check train.csv --column prompt=question --column answer=solution
    """
    if max_tokens is not None and tokenizer is None:
        raise ConfigError(f"--max-tokens {max_tokens} counts tokens: give --tokenizer a Hugging Face directory too")
    if wrong := [column for column in columns if not all(column.partition("="))]:
        raise ConfigError(f"--column {wrong[0]} is not of the form OURS=THEIRS, as in --column prompt=question")
    from tandem.data.check import inspect, show
    from tandem.text.renderer import TemplateRenderer
    from tandem.text.tokenizer import load_tokenizer
    from tandem.track.console import Console

    renderer = None if tokenizer is None else TemplateRenderer(load_tokenizer(tokenizer))
    names = {ours: theirs for ours, _, theirs in (column.partition("=") for column in columns)}
    train, other = (None if path is None else inspect(path, names, renderer, max_tokens) for path in (file, heldout))
    assert train is not None
    show(train, other, max_tokens, Console())


@data.command("prepare")
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--train", type=click.Path(path_type=Path), help="A file of the data set's own layout, and not the hub's.")
@click.option("--heldout", type=click.Path(path_type=Path), help="The same for the held-out split.")
@debug_option
def prepare_data(name: str, directory: Path, train: Path | None, heldout: Path | None) -> None:
    """Write a known data set as train.jsonl and heldout.jsonl.

    NAME is gsm8k, math, aime, humaneval, mbpp or preferences. Without files it is fetched from the Hugging Face hub.

    \b
    Examples:
      tandem data prepare gsm8k data/gsm8k
      tandem data prepare mbpp data/mbpp --train mbpp-train.parquet --heldout mbpp-test.parquet
    """
    from tandem.data.prepare import PREPARATIONS, prepare

    given = {split: path for split, path in (("train", train), ("heldout", heldout)) if path is not None}
    for written in prepare(name, directory, given):
        out = f"; {written.left_out} rows could not be used" if written.left_out else ""
        click.echo(f"{written.tasks} tasks in {written.path}{out}")
    if PREPARATIONS[name].reward is not None:
        click.echo(f"judge them with reward.function={PREPARATIONS[name].reward}")


@click.command()
@debug_option
def sandbox() -> None:
    """Say what the sandbox for generated code holds on this machine.

    Small hostile programs are run in it, as the reward `code` does it. Exit code 2 where it cannot be had.
    """
    import asyncio

    from tandem.sandbox.isolated import IsolatedSandbox
    from tandem.sandbox.probe import probe

    found = asyncio.run(probe(IsolatedSandbox(), str(Path(__file__).resolve())))
    for finding in found:
        click.echo(f"{'holds' if finding.held else 'DOES NOT HOLD':<14} {finding.name}")


@click.group()
def reward() -> None:
    """Look at a reward before it is trained on."""


@reward.command("check")
@recipe_argument
@overrides_argument
@click.option(
    "--answers", type=click.Path(path_type=Path), help="JSON lines with task (its id) and text, as a run's samples.jsonl."
)
@click.option("-n", "count", type=click.IntRange(1), default=8, show_default=True, help="Tasks to look at, from the first.")
@debug_option
def check_reward(recipe: Path, overrides: tuple[str, ...], answers: Path | None, count: int) -> None:
    """Judge sample answers by a recipe's reward.

    RECIPE's section reward judges answers to tasks of data.train: those of --answers, or else of each task the reference
    answer and an empty one. No model is loaded.

    \b
    Examples:
      tandem reward check recipe.yaml
      tandem reward check recipe.yaml reward.function=my_reward.py:compute_score
      tandem reward check recipe.yaml --answers runs/mine/samples.jsonl -n 100
    """
    resolved = load(recipe, overrides)
    from tandem.assemble.reward_check import check
    from tandem.track.console import Console

    check(resolved.value, answers, count, Console())
