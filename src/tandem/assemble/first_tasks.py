"""What can be known of tasks before a run begins: that the policy can be asked them, and that a reward can read their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from tandem.assemble.rollout import AGENTS, ENVS, build_agent
from tandem.errors import ConfigError, DataError, RewardError
from tandem.ports import AgentLoop, Dataset, Renderer, Reply
from tandem.recipe import AgentSection, Recipe
from tandem.rewards.child import load
from tandem.rewards.config import PartConfig, RewardConfig
from tandem.rewards.functions import FUNCTIONS
from tandem.rewards.workers import FunctionReward
from tandem.rollout.session import check_prompt
from tandem.types import Json, Key, Message, SamplingParams, Stop, Task

CHECKED = 4096  # tasks that are looked at, in a second or two
_OWN = 8  # of an agent or an environment of somebody's own, of which nobody knows what an episode costs
_ASKS_S = 10.0  # in which each of those has to ask
_ANSWERS_S = 2.0  # for looking at answers


async def check_tasks(
    dataset: Dataset, recipe: Recipe, renderer: Renderer, *, judged: bool, max_tokens: int, most: int = CHECKED
) -> None:
    """Raises DataError for one of the first `most` tasks that the policy cannot be asked, or whose answer cannot be compared with;
    ConfigError for an agent that asks nothing; others are looked at when they come.

    judged: whether `recipe.reward` is who judges them. max_tokens: of an answer, for which the prompt must leave room.
    """
    tasks = [dataset[index].asked() for index in range(min(most, len(dataset)))]
    if judged and recipe.reward is not None:
        _check_answers(tasks, recipe.reward)
        await _check_columns(tasks, recipe.reward)
    await _check_prompts(tasks, dataset.name, recipe, renderer, max_tokens)


def _check_answers(tasks: Sequence[Task], config: RewardConfig) -> None:
    """Of built-in functions, which read an answer before they look at episodes."""
    for where, part in _parts(config).items():
        if part.function not in FUNCTIONS:
            continue
        function, until_s = load(part.function, part.params), time.monotonic() + _ANSWERS_S
        for task in tasks:
            try:
                function(task, ())
            except RewardError:
                raise
            except ValueError as problem:
                raise DataError(
                    f"{problem} ({where}.function={part.function} compares with it): correct the data, leave such tasks out, or "
                    f"choose another reward"
                ) from None
            if time.monotonic() > until_s:
                break


async def _check_columns(tasks: Sequence[Task], config: RewardConfig) -> None:
    """Of functions of somebody's own, in a process of theirs, which judges nobody."""
    for part in _parts(config).values():
        if part.function is None or part.function in FUNCTIONS:
            continue
        until_s = time.monotonic() + _ANSWERS_S
        async with AsyncExitStack() as stack:
            reward = FunctionReward(part)
            stack.push_async_callback(reward.close)
            await reward.start()
            for task in tasks:
                try:
                    await reward(task, ())
                except RewardError as problem:
                    raise RewardError(f"task {task.id!r}: {problem}") from None
                if time.monotonic() > until_s:
                    break


def _parts(config: RewardConfig) -> dict[str, PartConfig | RewardConfig]:
    return {f"reward.parts.{name}": part for name, part in config.parts.items()} or {"reward": config}


async def _check_prompts(tasks: Sequence[Task], name: str, recipe: Recipe, renderer: Renderer, max_tokens: int) -> None:
    agent, own = build_agent(recipe.agent), _is_own(recipe.agent)
    mute: list[str] = []
    looked_at = tasks[:_OWN] if own else tasks
    for index, task in enumerate(looked_at):
        asked = _Asked(renderer, recipe.engine.max_context, max_tokens, f"task {task.id!r} of {name!r}: the prompt")
        said = await _asked_by(agent, task, asked, Key("check", index))
        if asked.problem is not None:
            raise asked.problem
        mute += [said] if said and not asked.heard else []
    if mute and len(mute) == len(looked_at):
        raise ConfigError(
            f"agent {recipe.agent.env or recipe.agent.name!r} asks the policy nothing: with each of the first {len(mute)} tasks of "
            f"{name!r} it raised {mute[0]}"
        )


def _is_own(section: AgentSection) -> bool:
    return (section.name if section.env is None else section.env) not in (AGENTS if section.env is None else ENVS)


async def _asked_by(agent: AgentLoop, task: Task, asked: _Asked, key: Key) -> str:
    """What the agent raised before it asked, or nothing."""
    episode = asyncio.ensure_future(agent(task, asked, key))
    try:
        await asyncio.wait({episode}, timeout=_ASKS_S)
    finally:
        episode.cancel()
        (ended,) = await asyncio.gather(episode, return_exceptions=True)
    return f"{type(ended).__name__}: {ended}" if isinstance(ended, Exception) else ""


class _Asked:
    """Implements the LLM port for an episode's first turn: looks at what it is asked, and ends the episode as a run's end would."""

    def __init__(self, renderer: Renderer, max_context: int, max_tokens: int, where: str) -> None:
        self._renderer, self._max_context, self._max_tokens, self._where = renderer, max_context, max_tokens, where
        self.heard = False
        self.problem: DataError | None = None

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Json]] = (), params: SamplingParams | None = None
    ) -> Reply:
        try:
            tokens = self._renderer.opening(messages, tools)
        except DataError as problem:
            self.problem = self.problem or DataError(f"{self._where}: {problem}")
            raise asyncio.CancelledError from None
        self._look(tokens, params)
        raise asyncio.CancelledError

    async def complete(self, tokens: Sequence[int], params: SamplingParams | None = None) -> tuple[tuple[int, ...], Stop]:
        self._look(tokens, params)
        raise asyncio.CancelledError

    def samples(self) -> tuple[()]:
        return ()

    def _look(self, tokens: Sequence[int], params: SamplingParams | None) -> None:
        self.heard = True
        most, context = params.max_tokens if params is not None else self._max_tokens, self._max_context
        try:
            check_prompt(tokens, context, self._where)
            if len(tokens) + most > context:
                raise DataError(
                    f"{self._where} has {len(tokens)} tokens, which with max_tokens={most} of an answer are {len(tokens) + most}, "
                    f"above engine.max_context={context}, so that the answer would be cut off: raise engine.max_context, lower "
                    f"max_tokens of sampling (or evaluation), or leave such tasks out by max_tokens of data.train (or data.heldout)"
                )
        except DataError as problem:
            self.problem = self.problem or problem
