"""Section `reward` of a recipe: who judges what the policy writes, and how long that may take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tandem.types import Json

HERE = frozenset({"environment"})
"""Built-in functions that are called where the loop runs, and not in a process of their own: see here.py."""

_AT_ONCE = {"function": 2, "url": 32}
_LIMIT_S = 30.0
TEMPLATE = """\
You grade an answer to a question.

Question:
{question}

Reference answer:
{reference}

Answer to grade:
{answer}

Say in a sentence or two how good the answer is. Then end with a line of the form
Score: N
where N is a number from 0 (wrong) to 10 (right and complete)."""


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """A language model that grades: any endpoint with OpenAI's chat completions.

    url: what clients call the base URL, as in http://localhost:8000/v1. prompt: what it is asked; {question}, {reference} and
    {answer} stand for the conversation so far, the task's answer and the policy's. best: the score that is worth 1.
    """

    url: str
    model: str
    prompt: str = TEMPLATE
    best: float = 10.0

    def __post_init__(self) -> None:
        _check_url(self.url)
        if "{answer}" not in self.prompt:
            raise ValueError("prompt has no {answer} in it, so that the judge would not see what it is to grade")
        if not 0 < self.best < math.inf:
            raise ValueError(f"best is {self.best} and must be greater than 0")


@dataclass(frozen=True)
class _JudgedBy:
    """One of function, a built-in's short name, "package.module:function" or "path/file.py:function"; url, a service over HTTP;
    and judge, a language model.

    workers: groups judged at the same time, or calls of a judge; null is 2 processes of a function, 32 calls over HTTP. limit_s:
    seconds for one group, or one answer of a judge, after which a function's worker is killed and a call is not tried again; a
    worker that is killed by others is replaced, and its group judged once more, with as much time.
    `environment` has neither: it is called where the loop runs.
    try_limit_s: seconds for one try of a call; null is a third of limit_s. per_minute: calls over HTTP that begin in a minute,
    evenly spaced. key_env: name of the environment variable with the secret that is sent as bearer token. params: further
    arguments of the function, by name; what a URL is sent as they are; further fields of what a judge is sent, as temperature.
    """

    function: str | None = None
    url: str | None = None
    judge: JudgeConfig | None = None
    workers: int | None = None
    limit_s: float = _LIMIT_S
    try_limit_s: float | None = None
    per_minute: float | None = None
    key_env: str | None = None
    params: dict[str, Json] = field(default_factory=dict[str, Json])

    def __post_init__(self) -> None:
        self._check_choice()
        if self.url is not None:
            _check_url(self.url)
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers} and must be at least 1")
        if not self.limit_s > 0:
            raise ValueError(f"limit_s is {self.limit_s} and must be greater than 0")
        for name, default in (("workers", None), ("limit_s", _LIMIT_S)):
            if self.function in HERE and (value := getattr(self, name)) != default:
                raise ValueError(
                    f"{name}={value} is of functions in worker processes, and {self.function} is called where the loop runs: "
                    f"leave {name} out"
                )
        for name in ("try_limit_s", "per_minute", "key_env"):
            value = getattr(self, name)
            if value is not None and self.url is None and self.judge is None:
                raise ValueError(f"{name}={value} is of calls over HTTP (a url, a judge), and here is none: leave it out")
            if isinstance(value, float) and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value} and must be greater than 0")
        if self.try_limit_s is not None and self.try_limit_s > self.limit_s:
            raise ValueError(f"try_limit_s={self.try_limit_s} is above limit_s={self.limit_s}, which is for all tries together")

    def _check_choice(self) -> None:
        if len(self._given()) != 1:
            raise ValueError(
                "give one of function (a name), url (a judge over HTTP) and judge (a language model), and null for the others "
                "where they have a value"
            )

    def _given(self) -> list[str]:
        return [name for name in ("function", "url", "judge") if getattr(self, name) is not None]

    @property
    def at_once(self) -> int:
        """How many groups are judged at the same time; of a judge, how many answers."""
        return self.workers if self.workers is not None else _AT_ONCE["function" if self.function is not None else "url"]

    @property
    def apart(self) -> bool:
        """Whether a function of it runs in worker processes."""
        return self.function is not None and self.function not in HERE

    @property
    def one_try_s(self) -> float:
        """Seconds for one try of a call."""
        return self.try_limit_s if self.try_limit_s is not None else self.limit_s / 3

    @property
    def promised(self) -> tuple[str, ...]:
        """Components that each of its results has."""
        return ()


@dataclass(frozen=True)
class PartConfig(_JudgedBy):
    """One of several parts of a reward. weight: what its value is multiplied with in the sum; 0 only logs it."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.weight):
            raise ValueError(f"weight is {self.weight} and must be a number")


@dataclass(frozen=True)
class RewardConfig(_JudgedBy):
    """One judge, or parts: several by name, whose weighted sum is the reward, and each of which is a component of it.

    components: parts that each reward has, in the order in which an algorithm that credits them one by one (gdpo) takes them;
    those of `parts` where they are not named.
    """

    components: tuple[str, ...] = ()
    parts: dict[str, PartConfig] = field(default_factory=dict[str, PartConfig])

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.components)) < len(self.components):
            raise ValueError(f"components={list(self.components)} names one part twice")
        if self.parts and self.params:
            raise ValueError("params belong to each of the parts: write them there")

    def _check_choice(self) -> None:
        if len(self._given()) + bool(self.parts) != 1:
            raise ValueError(
                "give one of function (a name), url (a judge over HTTP), judge (a language model) and parts (several of them), and "
                "null for the others where they have a value"
            )

    @property
    def apart(self) -> bool:
        """Whether a function of it, or of one of its parts, runs in worker processes."""
        return super().apart or any(part.apart for part in self.parts.values())

    @property
    def promised(self) -> tuple[str, ...]:
        """Components that each of its results has, in order."""
        return self.components or tuple(self.parts)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"url={url!r} is no address of a judge; it reads like http://host:8000/score")
    if "@" in urlsplit(url).netloc:
        raise ValueError("url names a user, and would be written to config.yaml with the password: name a variable in key_env")
