"""What is measured on held-out tasks, before, during and after a run: a dataset's objective, and episodes that a reward judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose

from tandem.assemble.rollout import Rollout
from tandem.ports import Dataset
from tandem.recipe import Recipe
from tandem.track.summary import TRAINING_LIMIT
from tandem.trainer.evaluate import EvalResult, evaluate
from tandem.trainer.heldout import HeldOutLoss
from tandem.types import Metrics, PolicyRef

_REWARD, _CUT = "reward", f"{TRAINING_LIMIT}/"
_WHOLE = ("n", "failed", "max_tokens")  # numbers that are counts


@dataclass(frozen=True)
class Measured:
    """What was measured on held-out tasks: for the trackers, for summary.json, and for the snapshot that is kept as the best.
    values: by name, the limits under which they were measured and the mean reward among them, which `told` may leave out. result:
    of the episodes, where there was a reward to judge them.
    """

    metrics: Metrics
    values: Mapping[str, float]
    score: float
    result: EvalResult | None


async def measured(
    recipe: Recipe, loss: HeldOutLoss | None, policy: PolicyRef, rollout: Rollout | None, heldout: Dataset | None
) -> Measured:
    """The loss of a dataset's objective, and episodes where there is a reward to judge them; the latter make the score."""
    metrics, values, score, result = Metrics(), dict[str, float](), 0.0, None
    if loss is not None:
        metrics = await loss.measure(policy)
        values = {name.removeprefix("eval/"): value for name, value in metrics.values_by_name().items()}
        score = -values["loss"]
    if rollout is not None and heldout is not None:
        tokens = recipe.evaluation.max_tokens or recipe.sampling.max_tokens
        result = await _evaluated(recipe, rollout, heldout, tokens)
        metrics = Metrics({**metrics, **result.metrics().prefixed("eval")})
        rest = {name: value for name, value in values.items() if name != "n"}
        values, score = {**_rates(result, tokens), **rest}, result.pass_at_1
        if tokens != recipe.sampling.max_tokens:
            cut = await _evaluated(recipe, rollout, heldout, recipe.sampling.max_tokens)
            metrics += cut.metrics().prefixed(f"eval/{TRAINING_LIMIT}")
            rates = _rates(cut, recipe.sampling.max_tokens)
            values |= {f"{TRAINING_LIMIT}/{name}": value for name, value in rates.items() if name != "n"}
    return Measured(metrics, values, score, result)


def told(*measured: Mapping[str, float]) -> list[dict[str, float]]:
    """Each without its mean rewards where all of them are the pass rates, as with rewards of 0 and 1 alone."""
    rewards = [(values, name) for values in measured for name in values if name.removeprefix(_CUT) == _REWARD]
    if any(not isclose(values[name], values[name.removesuffix(_REWARD) + "pass@1"]) for values, name in rewards):
        return [dict(values) for values in measured]
    return [{name: value for name, value in values.items() if name.removeprefix(_CUT) != _REWARD} for values in measured]


def lines_of(measured: Mapping[str, float]) -> list[str]:
    """One for each of what is told of it."""
    lines: list[str] = []
    for name, value in told(measured)[0].items():
        kind = name.removeprefix(_CUT)
        note = "  episodes that could not be judged; they are in no rate" if kind == "failed" and value else ""
        lines.append(f"{name:<20} {value:.{0 if kind in _WHOLE else 3}f}{note}")
    return lines


async def _evaluated(recipe: Recipe, rollout: Rollout, heldout: Dataset, max_tokens: int) -> EvalResult:
    reward, seed, params = rollout.eval_reward, recipe.seed, replace(recipe.sampling, max_tokens=max_tokens)
    assert reward is not None, "episodes are measured by a reward"
    return await evaluate(heldout, rollout.agent, reward, rollout.make_llm, params, recipe.evaluation, seed=seed)


def _rates(result: EvalResult, max_tokens: int) -> dict[str, float]:
    rates = {"pass@1": result.pass_at_1, **{f"pass@{k}": value for k, value in result.pass_at.items()}}
    if result.greedy is not None:
        rates["greedy"] = result.greedy
    counts = {"n": result.n, "failed": result.failed, "max_tokens": max_tokens}
    return {**rates, _REWARD: result.reward, "cut_off": result.cut_off, **counts}
