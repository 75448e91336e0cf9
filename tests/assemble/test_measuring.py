"""What a run tells of what was measured."""

from tandem.assemble.measuring import lines_of, told


def test_a_mean_reward_is_told_where_it_is_not_the_pass_rate() -> None:
    before, after = {"pass@1": 0.0, "reward": 0.0, "n": 8}, {"pass@1": 0.25, "reward": 0.55, "n": 8}
    assert told(before, after) == [before, after]
    assert told(before, {**after, "reward": 0.25}) == [{"pass@1": 0.0, "n": 8}, {"pass@1": 0.25, "n": 8}]


def test_sums_in_another_order_are_the_same_mean() -> None:
    assert told({"pass@1": 0.1 + 0.2, "reward": 0.3}) == [{"pass@1": 0.1 + 0.2}]


def test_both_limits_tell_it_or_neither_does() -> None:
    wide, narrow = {"pass@1": 0.5, "reward": 0.5}, {"training_limit/pass@1": 0.0, "training_limit/reward": 0.2}
    assert told(wide | narrow) == [wide | narrow]
    assert told(wide | narrow | {"training_limit/reward": 0.0}) == [{"pass@1": 0.5, "training_limit/pass@1": 0.0}]


def test_losses_have_no_mean_reward() -> None:
    assert told({"loss": 0.5, "reward_chosen": 1.0}, {}) == [{"loss": 0.5, "reward_chosen": 1.0}, {}]


def test_lines_have_counts_as_whole_numbers() -> None:
    found = {"pass@1": 0.25, "n": 8, "failed": 1, "max_tokens": 24, "training_limit/pass@1": 0.125, "training_limit/max_tokens": 8}
    assert lines_of(found) == [
        "pass@1               0.250",
        "n                    8",
        "failed               1  episodes that could not be judged; they are in no rate",
        "max_tokens           24",
        "training_limit/pass@1 0.125",
        "training_limit/max_tokens 8",
    ]
