"""`old_logprobs` are computed by a pass of the policy, unless they are known before it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.assemble.model import build_model
from tandem.assemble.phases import main_phase
from tandem.assemble.rollout import open_rollout
from tandem.recipe import load_recipe

RECIPE = """
model: {new: {hidden_size: 8, intermediate_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, max_positions: 64}}
data: {train: {task: arithmetic, size: 8}}
reward: {function: arithmetic}
rollout: {groups_per_step: 2, group_size: 2}
engine: {slots: 4, max_context: 32}
"""


def planned(tmp_path: Path, *overrides: str, exact: bool = True) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(path, overrides).value
    model = build_model(recipe)
    assert model.probed is not None
    model = replace(model, probed=replace(model.probed, exact=exact))

    async def stages() -> list[str]:
        async with open_rollout(recipe, model) as rollout:
            return [stage.name for stage in main_phase(recipe, model, rollout, tmp_path).plan.stages]

    return asyncio.run(stages())


def test_on_policy_they_are_the_samplers(tmp_path: Path) -> None:
    assert planned(tmp_path) == ["advantages", "on_policy"]


@pytest.mark.parametrize(
    "overrides",
    [["learner.minibatches=2"], ["learner.epochs=2"], ["trainer.mode=colocate_async"], ["runtime=process"]],
    ids=["more steps", "more epochs", "older samples", "other processes"],
)
def test_elsewhere_a_pass_computes_them(tmp_path: Path, overrides: list[str]) -> None:
    assert planned(tmp_path, *overrides) == ["advantages", "old_logprobs"]


def test_and_where_the_numbers_are_not_exact(tmp_path: Path) -> None:
    assert planned(tmp_path, exact=False) == ["advantages", "old_logprobs"]


def test_and_whoever_bypasses_it_says_so(tmp_path: Path) -> None:
    assert planned(tmp_path, "algorithm.bypass=true") == ["advantages", "bypass"]
