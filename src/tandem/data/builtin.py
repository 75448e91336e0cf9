"""Datasets of built-in problems: tasks to train on or to be held out, demonstrations to warm up with, pairs to compare.

Which split a problem is in is a property of the problem, so that the splits cannot overlap whatever the seeds. Every
item is a function of (seed, split, position) alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import ClassVar, Literal, Protocol

from tandem.errors import DataError
from tandem.types import Json, Message, Task

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 8  # one problem of so many is held out
REFUSAL = "?"
_MAX_DRAWS = 20_000  # in a row without a new problem: the split has no more


class Problem(Protocol):
    """One question with one verifiable answer; a class of them is a task.

    characters: all that prompts, solutions, mistakes, refusals and observations are written with. canonical: the same for problems
    that must not be apart in train and held-out data.
    """

    name: ClassVar[str]
    characters: ClassVar[str]

    @classmethod
    def draw(cls, rng: Random) -> Problem: ...
    @property
    def canonical(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> Json: ...
    def solution(self) -> tuple[Message, ...]: ...
    def mistake(self, rng: Random) -> tuple[Message, ...]: ...


def split_of(problem: Problem) -> Split:
    return split_of_text(f"{problem.name}:{problem.canonical}")


def split_of_text(text: str) -> Split:
    """Of a problem that this text names."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest) % HELDOUT_SHARE == 0 else "train"


class TaskSet:
    """`size` different problems of one split. Implements the Dataset port.

    Item i does not depend on `size`. Raises DataError where the split has fewer problems than asked for.
    """

    def __init__(self, kind: type[Problem], split: Split, *, seed: int = 0, size: int) -> None:
        if size < 1:
            raise DataError(f"the dataset {kind.name}/{split} is empty: size is {size} and must be at least 1")
        self.name = f"{kind.name}/{split}"
        problems: dict[str, Problem] = {}
        for i in range(size):
            problem = next((p for p in _draws(kind, split, f"tasks:{seed}", i) if p.prompt not in problems), None)
            if problem is None:
                raise DataError(f"{self.name} has about {i} different problems and size={size} are asked for: ask for fewer")
            problems[problem.prompt] = problem
        self._tasks = tuple(
            Task(f"{self.name}/{seed}/{i}", (Message("user", problem.prompt),), problem.answer, kind.name)
            for i, problem in enumerate(problems.values())
        )

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]


@dataclass(frozen=True, slots=True)
class NoiseConfig:
    """How bad demonstrations are.

    bad_frac: of all, those that do not solve their problem. refusal_frac: of those, the ones that answer "?" and nothing
    else; the others make a mistake of the task's own. A model warmed up with more refusals than solutions knows how to
    solve its task and does not do it when it is greedy.
    """

    bad_frac: float = 0.75
    refusal_frac: float = 0.8

    def __post_init__(self) -> None:
        for name in ("bad_frac", "refusal_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not between 0 and 1")


class Demonstrations:
    """`size` solved, refused or failed problems of one split, repeats allowed. Implements the Dataset port.

    Each task's messages are the whole conversation; it has no answer to judge.
    """

    def __init__(
        self, kind: type[Problem], split: Split = "train", *, seed: int = 0, size: int, noise: NoiseConfig | None = None
    ) -> None:
        if size < 1:
            raise DataError(f"the demonstrations of {kind.name} are empty: size is {size} and must be at least 1")
        self.name = f"{kind.name}/{split}/demonstrations"
        self._kind = kind
        self._split: Split = split
        self._seed = seed
        self._size = size
        self._noise = noise or NoiseConfig()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        i = range(self._size)[index]
        problem = next(_draws(self._kind, self._split, f"demonstrations:{self._seed}", i))
        rng = _random(f"noise:{self._seed}", self._kind, self._split, i)
        messages = (Message("user", problem.prompt), *self._turns(problem, rng))
        return Task(f"{self.name}/{self._seed}/{i}", messages, source=self._kind.name)

    def _turns(self, problem: Problem, rng: Random) -> tuple[Message, ...]:
        if rng.random() >= self._noise.bad_frac:
            return problem.solution()
        if rng.random() < self._noise.refusal_frac:
            return (Message("assistant", REFUSAL),)
        return problem.mistake(rng)


class Pairs:
    """`size` problems of one split, each with its solution and a mistake, repeats allowed. Implements the Dataset port.

    refusal_frac: of the mistakes, how many are a refusal.
    """

    def __init__(self, kind: type[Problem], split: Split, *, seed: int = 0, size: int, refusal_frac: float = 0.0) -> None:
        if size < 1:
            raise DataError(f"the pairs of {kind.name} are empty: size is {size} and must be at least 1")
        self.name = f"{kind.name}/{split}/pairs"
        self._refusal_frac = refusal_frac
        self._kind = kind
        self._split: Split = split
        self._seed = seed
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        i = range(self._size)[index]
        problem = next(_draws(self._kind, self._split, f"pairs:{self._seed}", i))
        rng = _random(f"mistakes:{self._seed}", self._kind, self._split, i)
        rejected = problem.mistake(rng)
        if rng.random() < self._refusal_frac:
            rejected = (Message("assistant", REFUSAL),)
        prompt = (Message("user", problem.prompt),)
        return Task(
            f"{self.name}/{self._seed}/{i}", prompt, problem.answer, self._kind.name, chosen=problem.solution(), rejected=rejected
        )


def _random(stream: str, kind: type[Problem], split: Split, i: int) -> Random:
    return Random(f"{stream}:{kind.name}:{split}:{i}")


def _draws(kind: type[Problem], split: Split, stream: str, i: int) -> Iterator[Problem]:
    """Candidates for item i: problems of the split, as they are drawn."""
    rng = _random(stream, kind, split, i)
    return (problem for problem in (kind.draw(rng) for _ in range(_MAX_DRAWS)) if split_of(problem) == split)
