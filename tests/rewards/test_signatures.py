"""Reward functions as verl's and TRL's users have them, called with what they expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards.child import judge
from tandem.rewards.signatures import adapted
from tandem.types import Episode, Message, RewardResult, Task
from tests.rewards.episodes import group, task

VERL = Task("t", (Message("user", "2+2="),), "4", "openai/gsm8k", {"extra_info": {"index": 3}, "ability": "math"}, chat=True)


def values(function: Callable[..., Any], of: Task, *texts: str, **params: Any) -> Any:
    """As a worker answers."""
    kind, answer = judge(adapted(function, "f", params), "f", of, group(*texts))
    return answer if kind != "results" else [result.value for result in answer]


def test_ours() -> None:
    def f(task: Task, group: Sequence[Episode], scale: float = 1.0) -> list[float]:
        return [scale * (each.completion == task.answer) for each in group]

    assert values(f, task(), "4", "5", scale=0.5) == [0.5, 0]


def test_verls_is_called_once_an_episode_with_what_its_data_holds() -> None:
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)

    assert values(compute_score, VERL, "4", "5") == [1, 0]
    assert seen == [("openai/gsm8k", "4", "4", {"index": 3}), ("openai/gsm8k", "5", "4", {"index": 3})]
    seen.clear()
    values(compute_score, task(), "4")
    assert seen == [("test", "4", "4", {"level": 1})]  # other data: all of its info


def test_verls_may_leave_arguments_out_and_take_any() -> None:
    def short(solution_str: str, ground_truth: str, method: str = "strict") -> float:
        return float(solution_str == ground_truth) if method == "strict" else 0.5

    def wide(**kwargs: Any) -> float:
        return float(sorted(kwargs) == ["data_source", "extra_info", "ground_truth", "solution_str", "weight"])

    def named(solution_str: str, **kwargs: Any) -> float:
        return float(sorted(kwargs) == ["data_source", "extra_info", "ground_truth", "weight"])

    assert values(short, VERL, "4") == [1]
    assert values(short, VERL, "4", method="flexible") == [0.5]
    assert values(named, VERL, "4", weight=2) == [1]
    with pytest.raises(RewardError, match="has no argument that says how it is called"):
        adapted(wide, "f", {})


def test_verls_dict_becomes_a_value_with_components() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str}

    kind, (first, second) = judge(adapted(compute_score, "f", {}), "f", VERL, group("4", "5"))
    assert (kind, first, second) == ("results", RewardResult(0.5, {"acc": 1.0}), RewardResult(0.5, {"acc": 0.0}))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, [None]),
        ({"score": None}, [None]),
        ({"score": float("nan")}, [None]),
        ({"score": 1.0, "acc": float("inf")}, [None]),
        ({"acc": 1.0}, "reward function 'f' returned {'acc': 1.0}; a dict must have a score"),
        ({"score": "1"}, "reward function 'f' returned '1' for an episode"),
        ("1", "reward function 'f' returned '1' for an episode"),
    ],
)
def test_what_verls_must_not_return(returned: Any, expected: Any) -> None:
    def compute_score(solution_str: str) -> Any:
        return returned

    found = values(compute_score, VERL, "4")
    assert found == expected if isinstance(expected, list) else found.startswith(expected)


def test_verls_for_many_is_called_once_a_group() -> None:
    calls: list[Any] = []

    def compute_score(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[Any]:
        calls.append((data_sources, solution_strs, ground_truths, extra_infos))
        return [{"score": 1.0, "long": len(each)} for each in solution_strs]

    assert values(compute_score, VERL, "4", "55") == [1, 1]
    assert calls == [(["openai/gsm8k"] * 2, ["4", "55"], ["4", "4"], [{"index": 3}] * 2)]
    assert "returned 1 values for a group of 2" in values(lambda solution_strs: [1.0], VERL, "4", "5")


def test_an_answer_that_verls_cannot_do_without_is_missed_before_anything_is_judged() -> None:
    def one(solution_str: str, ground_truth: str) -> float:
        return float(solution_str in ground_truth)

    def many(solution_strs: Any, ground_truths: Any) -> list[float]:
        return [1.0 for _ in solution_strs]

    def without(solution_str: str, ground_truth: str | None = None) -> float:
        return float(ground_truth is None)

    unanswered = replace(VERL, answer=None)
    for function, argument in ((one, "ground_truth"), (many, "ground_truths")):
        assert adapted(function, "f", {})(VERL, ()) == []
        with pytest.raises(RewardError, match=rf"'f' takes {argument}, and the task has no answer: (?s:.*){argument}=None"):
            adapted(function, "f", {})(unanswered, ())
    assert values(without, unanswered, "4") == [1]
    assert values(lambda solution_str, **more: float(more["ground_truth"] is None), unanswered, "4") == [1]
    assert adapted(one, "f", {"ground_truth": "4"})(unanswered, ()) == []


def test_async_ones_wait_together() -> None:
    running = most = 0

    async def compute_score(solution_str: str) -> float:
        import asyncio

        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return float(solution_str)

    assert values(compute_score, VERL, "1", "2", "3") == [1, 2, 3]
    assert most == 3

    async def many(completions: Any) -> list[float]:
        return [float(each) for each in completions]

    assert values(many, task(), "1", "2") == [1, 2]


def test_trls_gets_texts_or_messages_as_the_data_has_them_and_columns_as_lists() -> None:
    seen: list[Any] = []

    def f(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
        seen.append((prompts, completions, answer, columns))
        return [1.0] * len(completions)

    assert values(f, task(), "4", "5") == [1, 1]
    prompts, completions, answer, columns = seen.pop()
    assert (prompts, completions, answer) == (["2+2=", "2+2="], ["4", "5"], ["4", "4"])
    assert columns["level"] == [1, 1]
    assert columns["completion_ids"] == [[2, ord("4")], [2, ord("5")]]
    values(f, replace(task(), chat=True), "4")
    prompts, completions, *_ = seen.pop()
    assert (prompts, completions) == ([[{"role": "user", "content": "2+2="}]], [[{"role": "assistant", "content": "4"}]])


def test_trls_column_that_the_data_has_not_is_named() -> None:
    def f(completions: Any, solution: Any) -> list[float]:
        return [0.0] * len(completions)

    assert "missing a required argument: 'solution'" in values(f, task(), "4")


def test_what_fits_two_forms_or_none_is_refused_with_all_of_them() -> None:
    def both(solution_str: str, completions: Any) -> float:
        return 0.0

    def neither(text: str, gold: str) -> float:
        return 0.0

    with pytest.raises(
        RewardError, match=r"'f' has arguments of verl's and TRL's, \(solution_str, completions\): name its arguments \(task"
    ):
        adapted(both, "f", {})
    with pytest.raises(RewardError, match=r"'f' has no argument that says how it is called, \(text, gold\): name its"):
        adapted(neither, "f", {})
    with pytest.raises(RewardError, match="does not say what it takes"):
        adapted(max, "f", {})
    with pytest.raises(RewardError, match="unexpected keyword argument 'colour'"):
        adapted(lambda solution_str: 1.0, "f", {"colour": "red"})
    with pytest.raises(RewardError, match="missing a required argument: 'colour'"):
        adapted(lambda solution_str, colour: 1.0, "f", {})
