"""The life of one episode, from the files of its run: asked, sampled, judged, credited, trained on or dropped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tandem.errors import ConfigError
from tandem.track.runs import RunRecord
from tandem.track.samples import SampleRecord, read_samples
from tandem.types import Json, Key


def find(run: RunRecord, name: str) -> tuple[int, SampleRecord, list[SampleRecord]]:
    """The step of the episode that `name` names (a key, or "ordinal.member"), its record, and those of its group in order.

    Raises ConfigError where there is no such episode, with what is known of its group.
    """
    key, path = _key(name), run.directory / "samples.jsonl"
    told = list(read_samples(path)) if path.is_file() else []
    group = [(step, record) for step, record in told if record.key.group == key.group]
    for step, record in group:
        if record.key == key:
            return step, record, [each for _, each in group]
    if group:
        members = ", ".join(str(record.key) for _, record in group)
        raise ConfigError(f"there is no episode {key} in {run.directory}; of its group there are {members}")
    last = max((record.key.ordinal for _, record in told), default=-1)
    raise ConfigError(
        f"{run.directory} has no record of group {key.group}: {_whereabouts(key.ordinal, last)}; its records end with step "
        f"{run.steps_done} (keys are those of samples.jsonl, e.g. train:{max(last, 0)}.0.0)"
    )


def _whereabouts(ordinal: int, last: int) -> str:
    if ordinal > last:
        return f"the last group that was trained on or dropped is number {last}, so it was not admitted yet, or is under way"
    return "it was under way, or waited for its batch, when the run stopped"


def _key(name: str) -> Key:
    whole = name if ":" in name else f"train:{name}"
    whole = whole if whole.count(".") == 2 else f"{whole}.0"
    try:
        return Key.parse(whole)
    except ValueError:
        raise ConfigError(f"{name!r} is not the key of an episode; keys read like train:12.3.0, or 12.3 for short") from None


def life(run: RunRecord, step: int, record: SampleRecord, group: Sequence[SampleRecord]) -> Table:
    """A row for each thing that happened to it."""
    table = Table(show_header=False, box=None, title=f"{record.key} of {run.directory}", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("task", Text(f"{record.task}\n{record.prompt}"))
    if record.answer is not None:
        table.add_row("answer", Text(str(record.answer)))
    table.add_row("admitted", f"as number {record.key.ordinal} of its space, member {record.key.member} of {len(group)}")
    if record.policy is not None:
        age = step - 1 - record.policy.version
        behind = "the policy that was trained" if not age else f"{age} version{'s' * (age > 1)} before the one that was trained"
        table.add_row("sampled", f"by {record.policy}" + ("" if record.dropped else f": {behind}"))
    table.add_row("wrote", Text(record.text))
    table.add_row("ended", f"{record.stop}, after {record.tokens} tokens")
    parts = "".join(f", {name} {value:g}" for name, value in record.components.items())
    value = "none" if record.reward is None else f"{record.reward:g}"
    table.add_row("reward", Text(f"{value}{parts}{': ' * bool(record.reason)}{record.reason}"))
    table.add_row("its group", Text(_of_group(record, group)))
    if record.advantage is not None:
        table.add_row("advantage", f"{record.advantage:+.4g}{'' if record.advantage else ': it teaches nothing'}")
    if record.ratio is not None:
        table.add_row("ratio", f"{record.ratio:.6g} of the policy to its sampler, mean over its tokens")
    if record.dropped:
        table.add_row("dropped", Text(f"{record.dropped}, before step {step} ended: nothing was trained on it", "red"))
    else:
        lines = [line for line in run.lines if line["step"] == step and "train/loss" in line]
        metrics = lines[0] if lines else dict[str, Json]()
        told = ", ".join(f"{name} {metrics[name]:.4g}" for name in ("train/loss", "train/grad_norm") if name in metrics)
        table.add_row("trained on", Text(f"in step {step}{': ' * bool(told)}{told}", "green"))
    return table


def _of_group(record: SampleRecord, group: Sequence[SampleRecord]) -> str:
    rewards = [each.reward for each in group if each.reward is not None]
    told = [(each is record, "none" if each.reward is None else f"{each.reward:g}") for each in group]
    shown = " ".join(f"[{value}]" if itself else value for itself, value in told)
    return f"{shown}   mean {sum(rewards) / len(rewards):.3g}" if rewards else shown
