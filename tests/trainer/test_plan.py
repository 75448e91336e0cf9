"""plan: order, minimality and the errors, for any pipeline that can be drawn."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tandem.errors import PlanError
from tandem.trainer.plan import BatchStage, Plan, plan
from tandem.types import BatchRef, Key, Metrics, Scope, Stage, WeightUse


def stage(
    name: str, needs: str, gives: str, scope: Scope = "batch", weights: WeightUse = "none", *, honest: bool = True
) -> BatchStage:
    """Needs and gives: one-letter columns."""

    async def run(batch: BatchRef) -> tuple[BatchRef, Metrics]:
        assert set(needs) <= batch.columns
        return replace(batch, columns=batch.columns | set(gives if honest else "")), Metrics.sum({f"ran/{name}": 1})

    return Stage(name, frozenset(needs), frozenset(gives), run, scope, weights)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[BatchStage], str, str]:
    """Stages where each needs columns that come before those it gives; columns had; columns needed."""
    letters = "abcdefghijkl"
    have = letters[: draw(st.integers(1, 3))]
    stages: list[BatchStage] = []
    at = len(have)
    while at < len(letters):
        width = draw(st.integers(1, 2))
        needs = draw(st.sets(st.sampled_from(letters[:at]), max_size=3))
        stages.append(stage(f"s{at}", "".join(sorted(needs)), letters[at : at + width]))
        at += width
    return stages, have, "".join(sorted(draw(st.sets(st.sampled_from(letters), max_size=4))))


@given(drawn=pipelines(), seed=st.integers(0, 99))
def test_each_stage_finds_its_columns_all_are_useful_and_their_listing_does_not_matter(
    drawn: tuple[list[BatchStage], str, str], seed: int
) -> None:
    stages, have, needs = drawn
    made = plan(needs, have, stages)
    known = set(have)
    for step in made.stages:
        assert step.needs <= known
        known |= step.gives
    assert set(needs) <= known
    used = set(needs).union(*(step.needs for step in made.stages))
    assert all(step.gives & used for step in made.stages)
    assert made.reads == used & set(have)
    shuffled = random.Random(seed).sample(stages, len(stages))
    assert plan(needs, have, shuffled).stages == made.stages

    batch = BatchRef((Key("train", 0),), frozenset(have), (1,), (None,))
    metrics = asyncio.run(made.run(batch))
    assert {name for name in metrics if name.startswith("ran/")} == {f"ran/{step.name}" for step in made.stages}


def test_what_is_had_or_not_needed_runs_nothing() -> None:
    assert str(plan("ab", "abc", [stage("more", "a", "b"), stage("other", "a", "z")])) == "nothing"


def test_a_column_without_a_stage_names_the_chain_that_wants_it() -> None:
    stages = [stage("gae", "rv", "A"), stage("reward", "t", "r")]
    with pytest.raises(PlanError, match=r"no stage gives column 'v' \('v' <- gae <- update\)"):
        plan("A", "t", stages)


def test_two_givers_and_circles_are_refused() -> None:
    with pytest.raises(PlanError, match="given by stages one, two"):
        plan("x", "t", [stage("one", "t", "x"), stage("two", "t", "x")])
    with pytest.raises(PlanError, match="needs what it gives itself"):
        plan("x", "t", [stage("one", "y", "x"), stage("two", "x", "y")])


def test_a_stage_that_does_not_keep_its_promise_is_caught() -> None:
    made = Plan((stage("liar", "t", "x", honest=False),))
    with pytest.raises(PlanError, match="'liar' promised"):
        asyncio.run(made.run(BatchRef((Key("train", 0),), frozenset("t"), (1,), (None,))))


def test_what_needs_no_batch_and_no_current_weights_is_split_off() -> None:
    """A reference, what depends on it alone, and a group's own sums run ahead; a policy, a batch and what needs them do not."""
    made = plan(
        "fgh",
        "ab",
        [
            stage("reference", "a", "c", "row", "frozen"),
            stage("policy", "a", "d", "row", "current"),
            stage("kl", "bc", "e", "group"),
            stage("ratio", "d", "f", "row"),
            stage("whitened", "e", "g"),
            stage("late", "g", "h", "row", "frozen"),
        ],
    )
    ahead, rest = made.split()
    assert (str(ahead), str(rest)) == ("reference -> kl", "policy -> ratio -> whitened -> late")
    assert (ahead.gives, ahead.reads, rest.reads) == ({"c", "e"}, made.reads, made.reads)
