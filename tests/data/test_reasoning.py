"""reasoning-gym is an extra: where it is not installed, what is left is its message."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tandem.data.reasoning import ReasoningTasks
from tandem.errors import DataError
from tandem.rewards.child import load
from tandem.types import Episode, Key, Message, Task


def test_the_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"reasoning_gym/chain_sum is made by .*: pip install 'tandem-rl\[reasoning\]'"):
        ReasoningTasks("reasoning_gym/chain_sum", "train", size=4)


def answered(task: Task, *texts: str) -> list[Episode]:
    return [Episode(Key("a", 0, i), task, (), (*task.messages, Message("assistant", text)), "stop") for i, text in enumerate(texts)]


def test_splits_do_not_overlap_and_answers_are_scored_by_their_generator() -> None:
    pytest.importorskip("reasoning_gym")
    name = "reasoning_gym/chain_sum"
    train, heldout = (ReasoningTasks(name, split, seed=3, size=40) for split in ("train", "heldout"))
    questions = [{dataset[i].messages[0].content for i in range(40)} for dataset in (train, heldout)]
    assert [len(each) for each in questions] == [40, 40]
    assert not questions[0] & questions[1]
    again = ReasoningTasks(name, "train", seed=3, size=40)
    assert [again[i] for i in range(40)] == [train[i] for i in range(40)]
    task = heldout[7]
    reward = load("reasoning_gym", {})
    texts = (str(task.answer), f"I think <answer> {task.answer}\n</answer>", "seven", "<answer>seven</answer>")
    assert reward(task, answered(task, *texts)) == [1, 1, 0, 0]
    assert reward(task, [replace(each, stop="length") for each in answered(task, texts[0])]) == [0]
    with pytest.raises(ValueError, match=r"is none of reasoning_gym/"):
        reward(Task("t", task.messages, "4"), answered(task, "4"))


def test_what_cannot_be_made_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=r"reasoning_gym/chain_summ cannot be made: .*chain_summ.* see reasoning-gym's gallery"):
        ReasoningTasks("reasoning_gym/chain_summ", "train", size=4)
    with pytest.raises(DataError, match="size is 0"):
        ReasoningTasks("reasoning_gym/chain_sum", "train", size=0)
