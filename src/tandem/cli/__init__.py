"""The command line: reads arguments, calls `launch`, and turns errors into one message and an exit code.

0: done. 1: the run failed. 2: the input is wrong. 130: interrupted. Nothing heavy is imported before a command needs it,
and no command does work of its own.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

import click

from tandem import __version__
from tandem.cli.checks import data, reward, sandbox
from tandem.cli.options import Invocation, debug_option, load, overrides_argument, recipe_argument
from tandem.errors import ConfigError, StalledError, TandemError, WorkerError

if TYPE_CHECKING:
    from tandem.assemble.imports import Dtype


def main() -> None:
    """The `tandem` command."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported; spinning threads starve the others
    invocation = Invocation()
    sys.excepthook = _unexpected(invocation)
    sys.exit(run(sys.argv[1:], invocation))


def run(arguments: Sequence[str], invocation: Invocation) -> int:
    """Runs one command line and returns its exit code; an exception that nobody foresaw passes through."""
    try:
        code = tandem.main(list(arguments), prog_name="tandem", standalone_mode=False, obj=invocation)
    except click.exceptions.NoArgsIsHelpError as error:  # a group alone
        error.show()
        return error.exit_code
    except (TandemError, OSError, click.ClickException, click.Abort, BaseExceptionGroup) as error:
        known = _known(error)
        if known is None:
            raise
        if invocation.debug:
            traceback.print_exception(error)
        return _say(known, invocation)
    return code if isinstance(code, int) else 0


def _known(error: BaseException) -> BaseException | None:
    """The foreseen error in `error`; the first one in a group of tasks that failed together."""
    if isinstance(error, BaseExceptionGroup):
        found = (_known(member) for member in cast("BaseExceptionGroup[BaseException]", error).exceptions)
        return next((member for member in found if member is not None), None)
    foreseen = isinstance(error, TandemError | OSError | KeyboardInterrupt | click.ClickException | click.Abort)
    return error if foreseen else None


def _say(error: BaseException, invocation: Invocation) -> int:
    resume = f"; go on with: {invocation.resume}" if invocation.resume else ""
    match error:
        case WorkerError() | StalledError():
            message, code = f"{error}{resume}", error.exit_code
        case TandemError():
            message, code = str(error), error.exit_code
        case click.ClickException():
            message, code = _misused(error), error.exit_code
        case OSError(errno=errno.ENOSPC):
            where = f" while writing {error.filename}" if error.filename else ""
            message, code = f"no space left on the disk{where}; free some space{resume}", 1
        case BrokenPipeError():  # nobody reads what a command prints: that is no news to anybody
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        case OSError():
            where = f": {error.filename}" if error.filename else ""
            message, code = f"{error.strerror or error}{where}", 1
        case _:
            click.echo(f"interrupted{resume}", err=True)
            return 130
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True)
    return code


def _misused(error: click.ClickException) -> str:
    """What click says of arguments, as Tandem says what is wrong, and where to look."""
    message = " ".join(error.format_message().split()).rstrip(".")
    message = f"{message[0].lower()}{message[1:]}"
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    takes_values = any(parameter.name == "overrides" for parameter in context.command.params)
    values = (
        "; values of the recipe have no dashes: trainer.steps=10" if isinstance(error, click.NoSuchOption) and takes_values else ""
    )
    return f"{message} (see `{context.command_path} --help`{values})"


def _unexpected(
    invocation: Invocation,
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """The hook for what no one foresaw: one line, or the traceback with --debug; Python then exits with 1."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if invocation.debug:
            traceback.print_exception(kind, error, trace)
            return
        frames = traceback.extract_tb(trace)
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        message = " ".join(str(error).split())
        click.echo(f"error: unexpected {kind.__name__}{where}: {message}\nrun again with --debug to see the traceback", err=True)

    return hook


# -------------------------------------------------------------------------------------------------------- commands


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tandem")
@debug_option
def tandem() -> None:
    """Reinforcement-learning post-training for language models.

    \b
    Examples:
      tandem train recipes/quickstart.yaml
      tandem config recipes/quickstart.yaml
      tandem COMMAND --help
    """


@tandem.command()
@recipe_argument
@overrides_argument
@click.option("--resume", is_flag=True, help="Go on from the last good snapshot in the run's directory.")
@click.option("--dry-run", is_flag=True, help="Build everything, print the plan, and stop before the first step.")
@debug_option
@click.pass_obj
def train(invocation: Invocation, recipe: Path, overrides: tuple[str, ...], resume: bool, dry_run: bool) -> None:
    """Train a model as a recipe says.

    RECIPE is a YAML file. KEY=VALUE overrides a value of it, with dots in the key.

    \b
    Examples:
      tandem train recipes/quickstart.yaml
      tandem train recipes/quickstart.yaml seed=1 run.dir=runs/seed1
      tandem train recipes/quickstart.yaml --dry-run
      tandem train recipes/quickstart.yaml --resume
    """
    resolved = load(recipe, overrides)
    from tandem import launch

    def begun() -> None:
        invocation.resume = shlex.join(["tandem", "train", str(recipe), *overrides, "--resume"])

    launch.run(resolved, resume=resume, dry_run=dry_run, begun=begun)


@tandem.command("eval")
@click.argument("recipe", metavar="RECIPE_OR_RUN", type=click.Path(path_type=Path))
@overrides_argument
@click.option("--model", type=click.Path(path_type=Path), help="A Hugging Face model directory; a run's own is its final/.")
@debug_option
def evaluate(recipe: Path, overrides: tuple[str, ...], model: Path | None) -> None:
    """Measure a model on held-out tasks.

    RECIPE_OR_RUN is a recipe, or the directory of a run: then its config.yaml and its final/ model are taken.

    \b
    Examples:
      tandem eval runs/quickstart
      tandem eval recipes/quickstart.yaml --model runs/quickstart/final
    """
    if not recipe.exists():
        raise ConfigError(f"there is no recipe and no run {recipe}: give a recipe's file, or the directory of a run")
    if recipe.is_dir():
        from tandem.track.runs import config_of

        run, recipe = recipe, config_of(recipe)
        model = model or _final_of(run)
    resolved = load(recipe, overrides)
    from tandem import launch

    launch.measure(resolved, model)


@tandem.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="The snapshot of this step, and not the latest.")
@click.option("--best", is_flag=True, help="The snapshot of the best score, and not the latest.")
@click.option("--role", default="policy", show_default=True, help="Or the name of a model trained beside it, e.g. critic.")
@debug_option
def export(run: Path, directory: Path, step: int | None, best: bool, role: str) -> None:
    """Write a Hugging Face directory from a snapshot of a run.

    RUN is the directory of a run, however many processes trained it; DIRECTORY is made.

    \b
    Examples:
      tandem export runs/ppo exported
      tandem export runs/ppo exported-critic --role critic --best
    """
    if step is not None and best:
        raise ConfigError("--step and --best name two snapshots: give one of them")
    from tandem.track.runs import config_of

    resolved = load(config_of(run), ())
    from dataclasses import replace

    from tandem.assemble.export import export as write

    recipe = replace(resolved.value, run=replace(resolved.value.run, dir=run))
    which = "best" if best else "latest" if step is None else step
    snapshot = write(recipe, which, role, directory)
    for warning in snapshot.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{role} of {snapshot.path} is in {directory}")


@tandem.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0 is greedy.")
@click.option("--max-tokens", type=int, default=512, show_default=True, help="Of one answer.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--system", help="A message before the first turn.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Of products.")
@debug_option
def chat(model: Path, temperature: float, max_tokens: int, seed: int, system: str | None, dtype: str) -> None:
    """Talk with a model.

    MODEL is a Hugging Face directory, or the directory of a run: then its final/ model is taken. A line is a turn, /new begins
    another conversation; lines may also come from a pipe.

    \b
    Examples:
      tandem chat models/smollm2
      echo 'Which is the largest: 37, 82, 15?' | tandem chat runs/demo --temperature 0
    """
    from tandem.assemble.chat import Chat
    from tandem.assemble.chat import chat as talk
    from tandem.track.console import Console

    path = _final_of(model) if (model / "config.yaml").is_file() else model
    talk(path, Chat(temperature, max_tokens, seed, system, dtype), Console())


@tandem.command("import")
@click.argument("source")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@debug_option
def import_(source: str, directory: Path, dtype: Dtype) -> None:
    """Write a Hugging Face directory from a model of another form.

    SOURCE is a GGUF file, a Hugging Face directory, or the id of a model on the hub; DIRECTORY is made. The model is checked,
    and its weights are written with the given type.

    \b
    Examples:
      tandem import SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
      tandem import path/to/model models/smaller --dtype bfloat16
      tandem import HuggingFaceTB/SmolLM2-135M-Instruct models/smollm2
    """
    from tandem.assemble.imports import import_model

    click.echo(f"{directory}: {import_model(source, directory, dtype)}")


@tandem.command()
@recipe_argument
@overrides_argument
@debug_option
def config(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Print every value of a recipe and its origin.

    The origin is a line of the file, the command line, or the default. Values that contradict each other are an error.

    \b
    Examples:
      tandem config recipes/quickstart.yaml
      tandem config recipes/quickstart.yaml train.lr=1e-3
    """
    resolved = load(recipe, overrides)
    from tandem import launch
    from tandem.config import explain

    launch.check(resolved)
    click.echo("\n".join(explain(resolved)))


@tandem.command()
@click.argument("name", required=False)
@debug_option
def algos(name: str | None) -> None:
    """List the algorithms, or explain one.

    NAME is that of an algorithm or of a correction: then its formula, its parameters with their defaults, the settings of
    other frameworks, and when to choose it.

    \b
    Examples:
      tandem algos
      tandem algos gspo
      tandem algos icepop
    """
    from tandem.algos import describe

    click.echo("\n".join(describe.listing() if name is None else describe.description(name)))


@tandem.command()
@click.argument("place", default="runs", type=click.Path(path_type=Path))
@debug_option
def runs(place: Path) -> None:
    """List the runs below a directory: where each stands, and what became of its held-out value.

    \b
    Examples:
      tandem runs
      tandem runs path/to/experiments
    """
    from tandem.track.console import Console
    from tandem.track.runs import find_runs, table_of

    if not (found := find_runs(place)):
        raise ConfigError(f"there is no run in {place}: a run has a config.yaml, and a metrics.jsonl when it has made a step")
    Console().print(table_of(found))


@tandem.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--samples", type=click.IntRange(0), default=4, show_default=True, help="So many of the last step's, best and worst.")
@click.option("--metric", "metrics", multiple=True, help="A metric to show, and not the usual ones; repeatable.")
@debug_option
def show(run: Path, samples: int, metrics: tuple[str, ...]) -> None:
    """Show a run, also one that is going on: before and after, its curve, its metrics, its last samples.

    \b
    Examples:
      tandem show runs/quickstart
      tandem show runs/quickstart --metric train/entropy --metric rollout/length --samples 0
    """
    from tandem.track import runs as of_runs
    from tandem.track.console import Console

    of_runs.show(of_runs.read_run(run), Console(), samples=samples, metrics=metrics)


@tandem.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("key")
@debug_option
def why(run: Path, key: str) -> None:
    """Tell the life of one episode: who sampled it, what it got and why, and the step that trained on it or why none did.

    KEY is that of a line of samples.jsonl: train:12.3.0, or 12.3 for short.

    \b
    Examples:
      tandem why runs/quickstart train:12.3.0
      tandem why runs/quickstart 12.3
    """
    from tandem.track.console import Console
    from tandem.track.life import find, life
    from tandem.track.runs import read_run

    record = read_run(run)
    Console().print(life(record, *find(record, key)))


@tandem.command()
@debug_option
def doctor() -> int:
    """Say what is installed, what this machine can do, and what each missing extra would bring.

    The exit code is 1 where something that Tandem needs is missing.
    """
    from tandem import doctor as of_doctor
    from tandem.track.console import Console

    findings = of_doctor.examine()
    of_doctor.show(findings, Console())
    return int(any(finding.verdict == "wrong" for finding in findings))


for _group in (data, reward, sandbox):
    tandem.add_command(_group)


def _final_of(run: Path) -> Path:
    from tandem.track.runs import in_use

    if not (run / "final").is_dir():
        if in_use(run):
            raise ConfigError(
                f"{run} has no final/ yet, which a run leaves at its end: it is going on, `tandem show {run}` has how"
            )
        raise ConfigError(
            f"{run} has no final/, which a run leaves at its end: go on with it (--resume), or write the model of a snapshot with "
            f"`tandem export {run} DIRECTORY`"
        )
    return run / "final"
