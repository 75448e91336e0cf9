"""The generating side: engine, agent, rewards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import cast

from tandem.agents.env_loop import EnvLoop
from tandem.assemble.engines import Engine, build_engine, cache_bytes
from tandem.assemble.model import Model, check_memory
from tandem.assemble.rewards import open_reward
from tandem.checkpoint.journal import Journal
from tandem.errors import RegistryError
from tandem.models.decoder import Decoder
from tandem.ports import LLM, AgentLoop, Env, Reward
from tandem.recipe import AgentSection, Recipe
from tandem.registry import resolve
from tandem.rollout.session import Session
from tandem.trainer.source import MakeLLM
from tandem.types import Key, SamplingParams, Task

AGENTS = {"single_turn": "tandem.agents.single_turn:SingleTurn"}
ENVS = {"calculator": "tandem.agents.calculator:CalculatorEnv"}


def build_agent(section: AgentSection) -> AgentLoop:
    if section.env is not None:
        make_env = cast("Callable[[Task], Env]", resolve(section.env, ENVS, kind="environment"))
        return EnvLoop(make_env, section.max_turns)
    make_agent = cast("Callable[[], AgentLoop]", resolve(section.name, AGENTS, kind="agent"))
    if not callable(make_agent):
        raise RegistryError(f"agent {section.name!r} is {make_agent!r}; name a class or function that makes an AgentLoop")
    return make_agent()


@dataclass(frozen=True)
class Rollout:
    """The generating side, shared by training and evaluation, with a reward for each; without one where nothing is judged, or,
    in training, a reward model judges.

    A judgement of training that depended on a clock is journalled, so that a resumed run repeats it.
    """

    engine: Engine
    agent: AgentLoop
    make_llm: MakeLLM
    reward: Reward | None
    eval_reward: Reward | None


@asynccontextmanager
async def open_rollout(recipe: Recipe, model: Model, journal: Journal | None = None) -> AsyncGenerator[Rollout]:
    """Starts what generates and judges, and ends all of it. Raises RewardError for a reward that cannot be loaded."""
    assert isinstance(model.decoder, Decoder), "check_recipe"
    check_memory({"weights": 4 * model.sizes[0], "rollout KV cache": cache_bytes(recipe, model.decoder)})
    engine = build_engine(recipe, model)

    def make_llm(key: Key, seed: int, params: SamplingParams) -> LLM:
        return Session(engine, model.renderer, key, params, seed=seed, max_context=recipe.engine.max_context)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        reward = eval_reward = None
        if recipe.reward is not None and recipe.reward_model is None:
            reward = await stack.enter_async_context(open_reward(recipe.reward, journal))
        if recipe.reward is not None:
            eval_reward = await stack.enter_async_context(open_reward(recipe.reward, start=reward is None))
        yield Rollout(engine, build_agent(recipe.agent), make_llm, reward, eval_reward)
