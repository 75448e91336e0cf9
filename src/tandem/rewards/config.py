"""Section `reward` of a recipe: who judges what the policy writes, and how long that may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tandem.types import Json

_AT_ONCE = {"function": 2, "url": 32}


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """Either function, a built-in's short name, "package.module:function" or "path/file.py:function"; or url, a judge over HTTP.

    workers: groups judged at the same time; null is 2 processes of a function, 32 calls of a URL. limit_s: seconds for one group,
    after which a function's worker is killed and a URL is not tried again. try_limit_s: seconds for one try of a URL; null is a
    third of limit_s. params: further arguments of the function, by name; what a URL is sent as they are. components: parts that
    each reward has, in the order in which an algorithm that credits them one by one (gdpo) takes them.
    """

    function: str | None = None
    url: str | None = None
    workers: int | None = None
    limit_s: float = 30.0
    try_limit_s: float | None = None
    params: dict[str, Json] = field(default_factory=dict[str, Json])
    components: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.function is None) == (self.url is None):
            raise ValueError(
                "give one of function (a name) and url (a judge over HTTP), and null for the other where it has a value"
            )
        if self.url is not None:
            _check_url(self.url)
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers} and must be at least 1")
        if not self.limit_s > 0:
            raise ValueError(f"limit_s is {self.limit_s} and must be greater than 0")
        if self.try_limit_s is not None and self.url is None:
            raise ValueError(f"try_limit_s={self.try_limit_s} is of a url, and a function is not tried again: leave it out")
        if self.try_limit_s is not None and not self.try_limit_s > 0:
            raise ValueError(f"try_limit_s is {self.try_limit_s} and must be greater than 0")
        if len(set(self.components)) < len(self.components):
            raise ValueError(f"components={list(self.components)} names one part twice")

    @property
    def at_once(self) -> int:
        """How many groups are judged at the same time."""
        return self.workers if self.workers is not None else _AT_ONCE["function" if self.url is None else "url"]

    @property
    def one_try_s(self) -> float:
        """Seconds for one try of a URL."""
        return self.try_limit_s if self.try_limit_s is not None else self.limit_s / 3


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"url={url!r} is no address of a judge; it reads like http://host:8000/score")
    if "@" in urlsplit(url).netloc:
        raise ValueError("url names a user, and would be written to config.yaml with the password: leave both out")
