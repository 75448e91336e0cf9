"""What is looked at before a run begins. That each mistake is one message is tested with the command line."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.assemble import first_tasks
from tandem.assemble.first_tasks import check_tasks
from tandem.data.files import FileDataset
from tandem.errors import ConfigError, DataError
from tandem.ports import LLM, StepResult
from tandem.recipe import AgentSection, DataSection, DatasetSection, ModelSection, Recipe, ShapeSection
from tandem.rewards.config import RewardConfig
from tandem.rollout.native import NativeConfig
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import character_tokenizer
from tandem.types import Episode, Key, Message, Task

RENDERER = TemplateRenderer(character_tokenizer("0123456789+-=x", template=PLAIN_TEMPLATE))
LONG = "1+" * 40


def recipe(agent: AgentSection, reward: str = "environment") -> Recipe:
    data = DataSection(DatasetSection(task="arithmetic"))
    engine = NativeConfig(max_context=64)
    return Recipe(
        model=ModelSection(new=ShapeSection()), data=data, agent=agent, reward=RewardConfig(function=reward), engine=engine
    )


def dataset(path: Path, *prompts: str, answers: Mapping[int, str] | None = None) -> FileDataset:
    rows = [{"prompt": prompt, "answer": (answers or {}).get(i, "7")} for i, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileDataset(path)


def look(agent: AgentSection, data: FileDataset, most: int = 4096, reward: str = "environment", judged: bool = True) -> None:
    asyncio.run(check_tasks(data, recipe(agent, reward), RENDERER, judged=judged, max_tokens=8, most=most))


class Opening:
    """An environment that asks more than the task says; `made` counts how many there were, and `closed` those that ended."""

    made = 0
    closed = 0

    def __init__(self, task: Task) -> None:
        self.task = task
        Opening.made += 1

    async def start(self) -> tuple[Message, ...]:
        return (Message("tool", LONG if self.task.messages[0].content == "3" else "x"),)

    async def step(self, action: Message) -> StepResult:
        raise AssertionError("nothing is answered")

    async def close(self) -> None:
        Opening.closed += 1


class Slow:
    """An agent that takes its time before it asks."""

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        await asyncio.sleep(60)
        raise AssertionError


class Stubborn:
    """An agent that asks by tokens, and takes every exception for an answer."""

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        with suppress(Exception, asyncio.CancelledError):
            await llm.complete([1] * (64 if task.messages[0].content == "2" else 3))
        return Episode(key, task, (), task.messages, "stop")


class Broken:
    """An agent that fails where a task is a zero."""

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        _ = 1 / int(task.messages[0].content)
        reply = await llm.chat(task.messages)
        return Episode(key, task, (), (*task.messages, reply.message), "stop")


def of(agent: type) -> AgentSection:
    return AgentSection(name=f"{__name__}:{agent.__name__}")


def test_an_environment_is_asked_what_it_adds_and_is_closed(tmp_path: Path) -> None:
    own = AgentSection(name="env", env=f"{__name__}:Opening")
    Opening.made = Opening.closed = 0
    look(own, dataset(tmp_path / "a.jsonl", "1", "2"))
    assert (Opening.made, Opening.closed) == (2, 2)
    with pytest.raises(DataError, match="task 'a-2' of 'a': the prompt has 81 tokens and the context 64"):
        look(own, dataset(tmp_path / "a.jsonl", "1", "2", "3"))
    look(own, dataset(tmp_path / "a.jsonl", "1", "2", "3"), most=2)


def test_of_ones_own_the_first_few_are_looked_at_and_of_built_in_ones_all(tmp_path: Path) -> None:
    late = dataset(tmp_path / "a.jsonl", *["1"] * 20, "3", LONG)
    look(AgentSection(name="env", env=f"{__name__}:Opening"), late)
    for built_in in (AgentSection(), AgentSection(name="env", env="calculator")):
        with pytest.raises(DataError, match="task 'a-21' of 'a': the prompt has 80 tokens"):
            look(built_in, late)


def test_an_agent_that_takes_its_time_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_tasks, "_ASKS_S", 0.05)
    began_s = time.monotonic()
    look(of(Slow), dataset(tmp_path / "a.jsonl", "1", "2"))
    assert time.monotonic() - began_s < 5


def test_an_agent_that_asks_by_tokens_and_forgives_everything_is_heard(tmp_path: Path) -> None:
    look(of(Stubborn), dataset(tmp_path / "a.jsonl", "1"))
    with pytest.raises(DataError, match="task 'a-1' of 'a': the prompt has 64 tokens and the context 64"):
        look(of(Stubborn), dataset(tmp_path / "a.jsonl", "1", "2"))


def test_an_agent_that_fails_with_every_task_is_refused_and_one_that_fails_with_some_is_not(tmp_path: Path) -> None:
    look(of(Broken), dataset(tmp_path / "a.jsonl", "0", "1"))
    with pytest.raises(ConfigError, match=r"Broken' asks the policy nothing: .* first 2 tasks of 'a' it raised ZeroDivisionError"):
        look(of(Broken), dataset(tmp_path / "a.jsonl", "0", "0"))


def test_answers_are_looked_at_by_who_judges_them(tmp_path: Path) -> None:
    words = dataset(tmp_path / "a.jsonl", "1", "2", answers={1: "none"})
    with pytest.raises(DataError, match=r"task 'a-1', 'none', has no number .*\(reward.function=numeric compares with it\)"):
        look(AgentSection(), words, reward="numeric")
    look(AgentSection(), words, reward="numeric", most=1)
    look(AgentSection(), words, reward="numeric", judged=False)
    look(AgentSection(), words, reward="exact_match")
    asyncio.run(check_tasks(words, replace(recipe(AgentSection()), reward=None), RENDERER, judged=True, max_tokens=8))
