from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.rewards.config import JudgeConfig, PartConfig, RewardConfig

URL = "http://localhost:8000/score"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give one of function .*, url .*, judge .* and parts"),
        ({"function": "exact_match", "url": URL}, "give one of function .*, url .*, judge .* and parts"),
        ({"function": "exact_match", "parts": {"a": PartConfig(function="exact_match")}}, "give one of function"),
        ({"parts": {"a": PartConfig(function="exact_match")}, "params": {"x": 1}}, "params belong to each of the parts"),
        ({"function": "exact_match", "workers": 0}, "workers is 0"),
        ({"function": "exact_match", "limit_s": 0}, "limit_s is 0"),
        ({"function": "exact_match", "limit_s": float("nan")}, "limit_s is nan"),
        ({"function": "exact_match", "try_limit_s": 1.0}, r"try_limit_s=1\.0 is of calls over HTTP"),
        ({"function": "exact_match", "per_minute": 1.0}, r"per_minute=1\.0 is of calls over HTTP"),
        ({"function": "exact_match", "key_env": "KEY"}, "key_env=KEY is of calls over HTTP"),
        (
            {"function": "environment", "workers": 1},
            "workers=1 is of functions in worker processes, and environment .* leave workers",
        ),
        ({"function": "environment", "limit_s": 5.0}, r"limit_s=5\.0 is of functions in worker processes"),
        ({"url": URL, "try_limit_s": 31.0}, r"try_limit_s=31\.0 is above limit_s=30\.0"),
        ({"url": URL, "per_minute": 0.0}, r"per_minute is 0\.0"),
        ({"url": URL, "try_limit_s": 0.0}, r"try_limit_s is 0\.0"),
        ({"url": URL, "components": ("a", "a")}, "names one part twice"),
        *(
            ({"url": url}, "is no address of a judge")
            for url in ("", "localhost:8000", "ftp://host/x", "http://", "http://h:x/", "http://h:0")
        ),
        ({"url": "http://me:secret@host/score"}, "^url names a user, and would be written to config.yaml"),
    ],
)
def test_configs_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RewardConfig(**options)


def test_how_much_at_once_and_how_long_follow_from_what_judges() -> None:
    assert RewardConfig(function="exact_match").at_once == 2
    assert (RewardConfig(url=URL).at_once, RewardConfig(url=URL).one_try_s) == (32, 10.0)
    assert (RewardConfig(url=URL, workers=1).at_once, RewardConfig(url=URL, try_limit_s=25.0).one_try_s) == (1, 25.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PartConfig(), "give one of function .*, url .* and judge"),
        (lambda: PartConfig(function="regex", weight=float("nan")), "weight is nan"),
        (lambda: PartConfig(function="environment", workers=2), "workers=2 is of functions in worker processes"),
        (lambda: JudgeConfig("localhost", "m"), "is no address of a judge"),
        (lambda: JudgeConfig("http://localhost/v1", "m", prompt="Is it good?"), r"prompt has no \{answer\} in it"),
        (lambda: JudgeConfig("http://localhost/v1", "m", best=0.0), r"best is 0\.0"),
    ],
)
def test_parts_and_judges_that_cannot_be(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_parts_are_the_components_unless_others_are_named() -> None:
    parts = {"right": PartConfig(function="exact_match"), "form": PartConfig(function="regex", weight=0.5)}
    assert RewardConfig(parts=parts).promised == ("right", "form")
    assert RewardConfig(parts=parts, components=("form",)).promised == ("form",)


def test_functions_run_apart_unless_they_are_called_where_the_loop_runs() -> None:
    here, apart = PartConfig(function="environment"), PartConfig(function="regex")
    assert RewardConfig(function="regex").apart
    assert RewardConfig(parts={"a": here, "b": apart}).apart
    assert not RewardConfig(parts={"a": here, "b": PartConfig(url=URL)}).apart
    assert not RewardConfig(function="environment").apart
