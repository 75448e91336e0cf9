from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ColumnError, NonFiniteError
from tandem.types import (
    BatchRef,
    Episode,
    GroupKey,
    Key,
    Message,
    Metric,
    Metrics,
    PolicyRef,
    RewardResult,
    Sample,
    SamplingParams,
    Task,
)

KEYS = st.builds(Key, st.text(), st.integers(0), st.integers(0), st.integers(0))


@given(KEYS)
def test_key_text_round_trips(key: Key) -> None:
    assert Key.parse(str(key)) == key


@pytest.mark.parametrize("text", ["", "train", "train:1", "train:1.2", "train:1.2.3.4", "train:a.b.c", "1.2.3", "train: 1.2.3"])
def test_key_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Key.parse(text)


def test_key_sorts_in_admission_order_and_knows_its_group_and_place() -> None:
    keys = [Key("train", 2), Key("train", 10), Key("train", 1, 1), Key("train", 1, 0, 1), Key("train", 1)]
    assert sorted(keys) == [Key("train", 1), Key("train", 1, 0, 1), Key("train", 1, 1), Key("train", 2), Key("train", 10)]
    assert Key("train", 1, 2, 3).group == GroupKey("train", 1)
    assert Key("train", 1, 2, 3).place == Key("train", 1, 2)


def test_policy_of_a_later_incarnation_is_newer() -> None:
    assert PolicyRef("policy", 0, 7).next() == PolicyRef("policy", 0, 8)
    assert PolicyRef("policy", 1, 0) > PolicyRef("policy", 0, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e-50},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"min_p": 1.0},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_sampling_params_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_full_support_is_untruncated_sampling() -> None:
    assert SamplingParams(temperature=0.5).full_support
    for cut in (SamplingParams(temperature=0), SamplingParams(top_p=0.9), SamplingParams(top_k=5), SamplingParams(min_p=0.1)):
        assert not cut.full_support


def sample(**changes: object) -> Sample:
    facts: dict[str, object] = {
        "key": Key("train", 0),
        "tokens": [1, 2, 3],
        "mask": [False, True, True],
        "logprobs": [0.0, -0.5, -1.0],
        "policy": ((PolicyRef(), 2),),
        "stop": "stop",
    }
    return Sample(**(facts | changes))  # type: ignore[arg-type]


def test_sample_holds_copies_that_nobody_can_write_to() -> None:
    tokens, extra = np.array([1, 2, 3]), np.array([0.0, 1.0, 2.0])
    made = sample(tokens=tokens, columns={"extra": extra})
    tokens[0] = extra[0] = 9
    assert made.tokens.tolist() == [1, 2, 3]
    assert made.columns["extra"].tolist() == [0.0, 1.0, 2.0]
    assert (made.tokens.dtype, made.mask.dtype, made.logprobs.dtype) == (np.int64, np.bool_, np.float32)
    for array in (made.tokens, made.mask, made.logprobs, made.columns["extra"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"mask": [True, True]}, ColumnError, "'mask' has 2 entries for 3 tokens"),
        ({"columns": {"extra": np.zeros(4)}}, ColumnError, "'extra' has 4 entries"),
        ({"tokens": [], "mask": [], "logprobs": [], "policy": ()}, ColumnError, "no token"),
        ({"logprobs": [-1.0, -0.5, -1.0]}, ColumnError, "did not sample"),
        ({"logprobs": [math.nan, -0.5, -1.0]}, ColumnError, "did not sample"),
        ({"logprobs": [0.0, math.nan, -1.0]}, NonFiniteError, "nan at position 1"),
        ({"logprobs": [0.0, -math.inf, -1.0]}, NonFiniteError, "position 1"),
        ({"logprobs": [0.0, 0.5, -1.0]}, NonFiniteError, "0.5 at position 1"),
        ({"policy": ((PolicyRef(), 1),)}, ColumnError, "1 of 2 sampled tokens"),
    ],
)
def test_sample_checks_its_invariants(wrong: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        sample(**wrong)


def test_oldest_policy_of_a_sample() -> None:
    new, old = PolicyRef(version=2), PolicyRef(version=1)
    assert sample(policy=((new, 1), (old, 1))).oldest_policy == old
    assert sample(mask=[False] * 3, logprobs=[0.0] * 3, policy=()).oldest_policy is None


def test_reward_is_finite_or_failed_with_a_reason() -> None:
    assert RewardResult(0.0).ok
    assert not RewardResult.failed("timeout").ok
    with pytest.raises(ColumnError, match="reason"):
        RewardResult(None)
    for wrong in (
        lambda: RewardResult(math.nan),
        lambda: RewardResult(0.0, components={"format": math.inf}),
        lambda: RewardResult(0.0, token_rewards=((3, math.nan),)),
    ):
        with pytest.raises(NonFiniteError, match="not finite"):
            wrong()


def test_completion_is_the_last_assistant_turn() -> None:
    messages = (
        Message("user", "q"),
        Message("assistant", "a"),
        Message("tool", "t"),
        Message("assistant", "b"),
        Message("user", "x"),
    )
    episode = Episode(Key("train", 0), Task("1", messages[:1]), (sample(),), messages, "stop")
    assert episode.completion == "b"
    assert Episode(Key("train", 0), Task("1", ()), (), (), "error").completion == ""


def test_batch_ref_lists_groups_once_and_checks_its_lengths() -> None:
    keys = (Key("train", 1, 0), Key("train", 1, 1), Key("train", 0, 0))
    ref = BatchRef(keys, frozenset({"tokens"}), (1, 2, 3), (None, None, None))
    assert ref.groups == (GroupKey("train", 1), GroupKey("train", 0))
    with pytest.raises(ColumnError, match="2 lengths"):
        BatchRef(keys, frozenset(), (1, 2), (None, None, None))


FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1, max_size=8), st.data())
def test_metrics_merge_without_loss_in_any_grouping(values: list[float], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(values)))

    def merged(part: list[float]) -> Metrics:
        return sum((Metrics.mean({"a": v}) + Metrics.sum({"b": v}) + Metrics.max({"c": v}) for v in part), Metrics())

    whole = (merged(values[:cut]) + merged(values[cut:])).values_by_name()
    assert whole["a"] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert whole["b"] == pytest.approx(sum(values), abs=1e-6)
    assert whole["c"] == max(values)


def test_metric_of_nothing_and_of_different_kinds() -> None:
    assert math.isnan(Metric(0.0, 0.0).value)
    assert Metric(3.0, reduction="min") + Metric(1.0, reduction="min") == Metric(1.0, 2.0, "min")
    with pytest.raises(ColumnError, match="mean and a sum"):
        Metric(1.0) + Metric(1.0, reduction="sum")
    assert Metrics.mean({"a": 1.0}).prefixed("train").values_by_name() == {"train/a": 1.0}


def test_nouns_pickle() -> None:
    for noun in (Key("train", 1, 2, 3), PolicyRef(version=3), Metrics.mean({"a": 1.0}), RewardResult.failed("x")):
        assert repr(pickle.loads(pickle.dumps(noun))) == repr(noun)
    assert pickle.loads(pickle.dumps(sample())).tokens.tolist() == [1, 2, 3]
