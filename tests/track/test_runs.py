"""`tandem runs`, `show` and `why` on directories as runs leave them."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tandem.config import Resolved, dump
from tandem.durable import AppendLog
from tandem.errors import ConfigError
from tandem.recipe import AlgorithmSection, DataSection, DatasetSection, ModelSection, Recipe, TrainerSection
from tandem.track.jsonl import Series
from tandem.track.life import find, life
from tandem.track.runs import find_runs, last_samples, read_run, show, sparkline, table_of
from tandem.track.samples import SampleRecord, read_samples
from tandem.track.summary import Summary, read_summary, write_summary
from tandem.types import Key, PolicyRef

RECIPE = Recipe(
    model=ModelSection(path=Path("model")),
    data=DataSection(DatasetSection(task="sorting")),
    algorithm=AlgorithmSection("grpo"),
    trainer=TrainerSection(steps=4),
)


def record(ordinal: int, member: int, reward: float | None = 1.0, **more: object) -> SampleRecord:
    values = {
        "task": f"task/{ordinal}",
        "prompt": "what?",
        "text": "that",
        "stop": "stop",
        "policy": PolicyRef(version=0),
        "tokens": 3,
    }
    return SampleRecord(key=Key("train", ordinal, member), reward=reward, **values | more)  # type: ignore[arg-type]


def run_in(directory: Path, *, ended: bool = False, losses: bool = False) -> Path:
    directory.mkdir(parents=True)
    recipe = replace(RECIPE, trainer=TrainerSection(steps=2)) if ended else RECIPE
    (directory / "config.yaml").write_text(dump(Resolved(recipe, {})))
    metrics, samples = AppendLog(directory / "metrics.jsonl"), AppendLog(directory / "samples.jsonl")
    metrics.append({"step": 0, "time": 1.0, "eval/loss" if losses else "eval/pass@1": 0.25})
    for step in (1, 2):
        of = {"train/loss": 2.0 / step} if losses else {"reward/mean": step / 4, "train/loss": 0.5, "train/entropy": 1.0 / step}
        metrics.append({"step": step, "time": 1.0 + step, **of})
        for member, reward in enumerate((1.0, 0.0, None)):
            line = record(step, member, reward, advantage=reward and 0.5, ratio=1.0).line()
            samples.append({"step": step, **line})
    samples.append({"step": 2, **record(3, 0, 0.0, dropped="filtered").line()})
    metrics.close()
    samples.close()
    if ended:
        write_summary(directory / "summary.json", Summary({"pass@1": 0.25, "n": 8}, {"pass@1": 0.75, "n": 8}, 2, 61.0))
    return directory


def said(what: Callable[[Console], None], width: int = 160) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    what(console)
    console.file.close()
    return console.export_text()


def test_runs_are_found_wherever_they_lie_and_their_phases_are_not(tmp_path: Path) -> None:
    one, two = run_in(tmp_path / "b"), run_in(tmp_path / "deep/a")
    (one / "warmup").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (one / "warmup" / name).write_text((one / name).read_text())
    (tmp_path / "none").mkdir()
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.yaml").write_text("a: 1")
    assert find_runs(tmp_path) == [one, two]
    with pytest.raises(ConfigError, match="there is no directory"):
        find_runs(tmp_path / "nowhere")


def test_a_run_that_has_just_begun_is_one(tmp_path: Path) -> None:
    """In its warm-up, also where that was killed, and before its first step."""
    for name in ("killed", "measuring"):
        (run_in(tmp_path / name) / "metrics.jsonl").unlink()
    (tmp_path / "killed" / "warmup").mkdir()
    assert find_runs(tmp_path) == [tmp_path / "killed"]
    descriptor = os.open(tmp_path / "measuring", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert find_runs(tmp_path) == [tmp_path / "killed", tmp_path / "measuring"]
    os.close(descriptor)


OTHER = {
    "e": ("config.yaml", "- 1"),
    "f[bold]": ("summary.json", "[]"),
    "g": ("metrics.jsonl", '{"loss": 1}\n'),
}


def test_the_table_says_where_each_run_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = [run_in(Path("a")), run_in(Path("b"), ended=True), run_in(Path("c"), losses=True), run_in(Path("d"))]
    (places[3] / "config.yaml").write_text("[")
    for name, (file, content) in OTHER.items():
        places.append(run_in(Path(name)))
        (places[-1] / file).write_text(content)
    places.append(run_in(Path("h"), ended=True))
    (places[-1] / "error.txt").write_text("RunError: it went on and failed\n")
    descriptor = os.open(places[2], os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    lines = said(lambda console: console.print(table_of(places))).splitlines()
    os.close(descriptor)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert rows[0] == ["a", "grpo", "0", "stopped", "2/4", "25.0%", "25.0%", "▁█"]
    assert rows[1] == ["b", "grpo", "0", "finished", "2/2", "25.0%", "75.0%", "▁█"]
    assert rows[2] == ["c", "grpo", "0", "running", "2/4", "0.25", "0.25", "█▁"]
    assert rows[3][0] == "d"
    assert rows[-1][:4] == ["h", "grpo", "0", "failed"]
    text = " ".join(row[3] for row in rows[3:])
    assert [
        words for words in ("not YAML", "is no mapping", "f[bold]", "is not the summary", "has no step") if words not in text
    ] == []


def test_the_table_is_read_in_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_in(Path("runs/experiment"), ended=True)
    metrics = AppendLog(run / "metrics.jsonl")
    for step in range(3, 1001):
        metrics.append({"step": step, "time": 1.0, "reward/mean": step / 1000})
    metrics.close()
    lines = said(lambda console: console.print(table_of([run])), width=80).splitlines()
    assert [cell.strip() for cell in lines[1].split("┃")[1:3]] == ["run", "algorithm"]
    cells = [cell.strip() for cell in next(line for line in lines if "grpo" in line).split("│")[1:-1]]
    assert cells[:7] == ["runs/experiment", "grpo", "0", "finished", "1000/2", "25.0%", "75.0%"]
    assert len(cells[7]) == 8


@pytest.mark.parametrize(
    ("values", "drawn"), [((), ""), ((3.0,), "▁"), ((1.0, 2.0), "▁█"), (tuple(map(float, range(8))), "▁▂▃▄▅▆▇█")]
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest(values: tuple[float, ...], drawn: str) -> None:
    assert sparkline(Series(tuple(range(len(values))), values), width=24) == drawn


def test_many_steps_share_a_bar() -> None:
    drawn = sparkline(Series(tuple(range(1000)), tuple(map(float, range(1000)))), width=8)
    assert drawn == "▁▂▃▄▅▆▇█"


def test_show_prints_what_there_is(tmp_path: Path) -> None:
    text = said(lambda console: show(read_run(run_in(tmp_path / "a", ended=True)), console, samples=2, metrics=()))
    assert "finished, 2 of 2 steps" in text
    assert "+50.0 pts" in text
    assert re.search(r"│ reward/mean +│ +0\.25 │ +0\.5 │", text)
    assert "train/entropy" in text
    assert text.count("(reward") == 2
    with pytest.raises(ConfigError, match=r"logged train/nothing; known: eval/pass@1, reward/mean"):
        show(read_run(tmp_path / "a"), Console(), samples=0, metrics=["train/nothing"])


def test_a_finished_run_that_went_on_is_not_finished(tmp_path: Path) -> None:
    """It was asked for four steps after two, and killed; what it was worth after two is not what it is worth now."""
    run = run_in(tmp_path / "a", ended=True)
    (run / "config.yaml").write_text(dump(Resolved(RECIPE, {})))
    text = said(lambda console: show(read_run(run), console, samples=0, metrics=()))
    assert "stopped, 2 of 4 steps" in text
    assert "75.0%" not in text


def test_show_says_why_a_run_failed(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a")
    (run / "error.txt").write_text("RunError: [the disk] is full\n")
    text = said(lambda console: show(read_run(run), console, samples=0, metrics=()))
    assert "failed, 2 of 4 steps\nRunError: [the disk] is full\n" in text


def test_no_name_and_no_number_that_show_prints_is_cut_in_80_columns(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a")
    named = {"train/entropy": -2.345e-07, "time/tokens_per_s": 12345.6, "critic/explained_variance": 1.0}
    metrics = AppendLog(run / "metrics.jsonl")
    for step in range(3, 60):
        metrics.append({"step": step, "time": 1.0, **named})
    metrics.close()
    text = said(lambda console: show(read_run(run), console, samples=0, metrics=tuple(named)), width=80)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert "".join(row[0] for row in rows) == "".join(named)
    assert [row[1] for row in rows if row[1]] == ["1", "1.235e+04", "1"]
    assert [row[2] for row in rows if row[2]] == ["-2.345e-07", "1.235e+04", "1"]
    assert {len(row[5]) for row in rows if row[5]} == {8}


def test_the_samples_shown_are_the_last_step_s_best_and_worst(tmp_path: Path) -> None:
    found = last_samples(run_in(tmp_path / "a"), 2)
    assert [each.reward for each in found] == [1.0, None]
    assert {each.key.ordinal for each in found} <= {2, 3}


def test_records_and_summaries_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a", ended=True)
    written = record(1, 0, 1.0, advantage=0.5, ratio=1.0)
    assert next(read_samples(run / "samples.jsonl")) == (1, written)
    assert SampleRecord.read(written.line()) == written
    summary = read_summary(run / "summary.json")
    assert summary is not None
    assert summary.eval_after == {"pass@1": 0.75, "n": 8}
    assert read_summary(run / "nothing.json") is None


def test_the_life_of_an_episode_that_was_trained_on(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path / "a"))
    step, found, group = find(run, "2.0")
    text = said(lambda console: console.print(life(run, step, found, group)))
    for told in ("train:2.0.0", "1 version before", "[1] 0 none   mean 0.5", "+0.5", "in step 2: train/loss 0.5"):
        assert told in text


def test_the_life_of_an_episode_that_was_dropped(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path / "a"))
    text = said(lambda console: console.print(life(run, *find(run, "train:3.0.0"))))
    assert "filtered, before step 2 ended" in text
    assert "in step" not in text


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("2.9", r"no episode train:2\.9\.0 .* train:2\.0\.0, train:2\.1\.0, train:2\.2\.0"),
        ("77.0", "not admitted yet, or is under way"),
        ("0.0", "waited for its batch"),
        ("twelve", "is not the key of an episode"),
    ],
)
def test_a_key_that_tells_nothing_is_answered_with_what_is_known(tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(read_run(run_in(tmp_path / "a")), key)
