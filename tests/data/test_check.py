import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.data.check import Checked, inspect, show
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import character_tokenizer


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(train: Checked, heldout: Checked | None = None, max_tokens: int | None = None) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        show(train, heldout, max_tokens, console)
    return capture.get()


def test_lengths_truncations_and_repeats_are_counted(tmp_path: Path) -> None:
    path = written(
        tmp_path / "train.jsonl",
        {"prompt": "ab", "answer": "1"},
        {"prompt": "abcd", "completion": "xy", "level": 2},
        {"prompt": " AB ", "chosen": "c", "rejected": "def"},
    )
    checked = inspect(path, {})
    assert checked.lengths == {"prompt": [2, 4, 4], "conversation": [6], "with chosen": [5], "with rejected": [7]}
    assert (checked.unit, checked.again, checked.too_long) == ("characters", 1, 0)
    assert checked.columns == ("prompt", "answer", "completion", "level", "chosen", "rejected")
    renderer = TemplateRenderer(character_tokenizer("abcdefxyAB ", template=PLAIN_TEMPLATE))
    tokens = inspect(path, {}, renderer, max_tokens=len(renderer.opening(checked.tasks[0].messages)))
    assert (tokens.unit, tokens.too_long) == ("tokens", 2)
    assert tokens.lengths["prompt"] == [len(renderer.opening(task.asked().messages)) for task in tokens.tasks]
    assert tokens.lengths["with rejected"][0] > tokens.lengths["with chosen"][0]


def test_what_is_shown_says_what_was_understood_and_what_is_wrong(tmp_path: Path) -> None:
    verl = {"data_source": "s", "prompt": "What?", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 1}}
    train = inspect(written(tmp_path / "train.jsonl", verl, verl | {"prompt": "[bold]Why?"}), {})
    heldout = inspect(written(tmp_path / "heldout.jsonl", {"prompt": "what?"}, {"prompt": "How?"}), {})
    text = said(train, heldout)
    assert "train.jsonl: 2 tasks" in text
    assert "verl's: the answer is reward_model.ground_truth" in text
    assert 'first answer  "4"' in text
    assert "warning: 1 of 2 held-out prompts are in" in text
    assert "warning: 2 tasks have neither answer nor anything to imitate" in text
    assert f"no prompt of {train.path} is in" in said(heldout, inspect(written(tmp_path / "b.jsonl", {"prompt": "x"}), {})).replace(
        str(tmp_path / "b.jsonl"), str(train.path)
    )


def test_tasks_that_ask_nothing_are_told(tmp_path: Path) -> None:
    silent = {"messages": [{"role": "assistant", "content": "a"}], "answer": "1"}
    checked = inspect(written(tmp_path / "a.jsonl", silent, {"prompt": " ", "answer": 1}, {"prompt": "b", "answer": 1}), {})
    assert "warning: 2 tasks ask nothing" in said(checked)


def test_prompts_over_the_limit_are_told(tmp_path: Path) -> None:
    renderer = TemplateRenderer(character_tokenizer("ab", template=PLAIN_TEMPLATE))
    checked = inspect(written(tmp_path / "a.jsonl", {"prompt": "ab" * 50, "answer": 1}), {}, renderer, max_tokens=20)
    assert "warning: 1 prompts have more than 20 tokens: data.train.max_tokens leaves them out" in said(checked, max_tokens=20)
