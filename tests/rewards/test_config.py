from __future__ import annotations

from typing import Any

import pytest

from tandem.rewards.config import RewardConfig

URL = "http://localhost:8000/score"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "give one of function .* and url"),
        ({"function": "exact_match", "url": URL}, "give one of function .* and url"),
        ({"function": "exact_match", "workers": 0}, "workers is 0"),
        ({"function": "exact_match", "limit_s": 0}, "limit_s is 0"),
        ({"function": "exact_match", "limit_s": float("nan")}, "limit_s is nan"),
        ({"function": "exact_match", "try_limit_s": 1.0}, r"try_limit_s=1\.0 is of a url"),
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
