"""The nouns of the system: tasks, requests, samples, episodes, policies, handles, metrics.

Everything here is frozen and free of torch; invariants are checked when an object is made. Per-token facts are
read-only numpy arrays. What moves between Workers as tensors is a `DataProto` (data_proto.py).

Legend: T tokens of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tandem.errors import ColumnError, NonFiniteError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Role = Literal["system", "user", "assistant", "tool"]
Stop = Literal["stop", "length", "abort", "tool_limit", "error"]
Scope = Literal["row", "group", "batch"]
Unit = Literal["row", "group"]
WeightUse = Literal["none", "frozen", "current"]
Reduction = Literal["mean", "sum", "max", "min"]


# --------------------------------------------------------------------------------------------------- identity


class GroupKey(NamedTuple):
    """One admission: all episodes sampled for one task share it."""

    space: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.space}:{self.ordinal}"


class Key(NamedTuple):
    """Run-unique name of a row; every join is by key and never by position.

    space: the stream of admissions it belongs to ("train", "eval", ...), so that their ordinals cannot collide.
    ordinal: admission ordinal within the space; member: episode within the group; branch: sample within the episode.
    Keys sort in admission order.
    """

    space: str
    ordinal: int
    member: int = 0
    branch: int = 0

    @property
    def group(self) -> GroupKey:
        return GroupKey(self.space, self.ordinal)

    @property
    def place(self) -> Key:
        """The key of the episode that this row belongs to (branch 0): what a queue reserves a place for."""
        return self._replace(branch=0) if self.branch else self

    def __str__(self) -> str:
        return f"{self.space}:{self.ordinal}.{self.member}.{self.branch}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """Inverse of `str(key)`; raises ValueError on anything else."""
        space, _, numbers = text.rpartition(":")
        ordinal, member, branch = map(int, numbers.split("."))
        if str(key := cls(space, ordinal, member, branch)) != text:
            raise ValueError(f"{text!r} is not a key; keys read like {key}")
        return key


@dataclass(frozen=True, slots=True, order=True)
class PolicyRef:
    """Which weights: v7 before a crash is not v7 after it, hence the incarnation."""

    name: str = "policy"
    incarnation: int = 0
    version: int = 0

    def next(self) -> PolicyRef:
        return PolicyRef(self.name, self.incarnation, self.version + 1)

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation}.{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyRef:
        """Inverse of `str(policy)`; raises ValueError on anything else."""
        name, _, numbers = text.rpartition("@")
        incarnation, version = map(int, numbers.split("."))
        return cls(name, incarnation, version)


# ------------------------------------------------------------------------------------------------ conversation


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy asked for: `arguments` as the policy wrote them, parsed by the tool's owner."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, as text: a view of tokens for people, templates and rewards."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What the policy is asked, and what a reward needs to judge the answer.

    id: unique within its dataset; messages: the conversation so far (for supervised data it includes the assistant
    turns to imitate); answer and info: whatever the reward reads; source: the dataset's name, for metrics. chosen and
    rejected: two ways in which `messages` may go on, of which the first is the better one; for preference data only.
    chat: the dataset holds messages and not a text; some reward functions want the same back. It makes no other task.
    """

    id: str
    messages: tuple[Message, ...]
    answer: Json = None
    source: str = ""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    chat: bool = field(default=False, compare=False)

    def asked(self) -> Task:
        """The task as the policy is asked it: without the assistant turns at its end, which are there to be imitated."""
        end = len(self.messages)
        while end and self.messages[end - 1].role == "assistant":
            end -= 1
        return self if end == len(self.messages) else replace(self, messages=self.messages[:end])


# -------------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    max_tokens: new tokens at most, earlier parts of a continued sample included. stop_ids end a sample and stay in
    it; stop strings are matched on the decoded text of the new tokens, and the tokens that made them stay in it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature == 0 or 1e-6 <= self.temperature < math.inf, "must be 0 (greedy) or at least 1e-6"),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1 (all)"),
            "top_k": (self.top_k >= 0, "must be at least 0 (all)"),
            "min_p": (0 <= self.min_p < 1, "must be at least 0 (all) and below 1"),
            "max_tokens": (self.max_tokens >= 1, "must be at least 1"),
            "stop": (all(self.stop), "must not hold an empty text"),
        }
        for name, (good, need) in checks.items():
            if not good:
                raise ValueError(f"sampling parameter {name}={getattr(self, name)!r} {need}")

    @property
    def full_support(self) -> bool:
        """True where every token can be sampled, so that logprobs are those of the sampling distribution."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and self.min_p == 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Token in, token out: continue `tokens` under `params`.

    seed, key, turn and the position of a token in its stream determine its randomness, and nothing else does.
    sampled: how many trailing `tokens` were sampled before (a continued sample); they count towards max_tokens.
    deadline_s: seconds from submission after which the engine ends the request with what it has, as "abort".
    extra: engine-specific parameters, passed on as they are.
    """

    key: Key
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    turn: int = 0
    sampled: int = 0
    adapter: str | None = None
    min_policy: PolicyRef | None = None
    deadline_s: float | None = None
    extra: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Newly sampled tokens of one request. `stop` is set on the last chunk, which may carry no token.

    logprobs: of each token under the engine's full temperature-scaled distribution (temperature 1 when greedy).
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy: PolicyRef
    stop: Stop | None = None


# ----------------------------------------------------------------------------------------------------- samples


def _frozen_array(value: npt.ArrayLike, dtype: type[np.generic]) -> npt.NDArray[Any]:
    array = np.array(value, dtype=dtype)  # a copy: nobody else can write to it
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One token stream with per-token facts: what the policy is trained on, byte for byte.

    tokens: int64 [T]. mask: bool [T], true exactly where the policy sampled tokens[t] (in supervised data: where the
    demonstration is imitated). logprobs: float32 [T], meaningful where mask is true and 0 elsewhere.
    policy: run-length coded over the masked tokens in order, ((ref, count), ...).
    temperature: at which the masked tokens were sampled. full_support: False where top-p, top-k, min-p or greedy
    decoding cut the distribution, so that logprobs are not those of the sampler: the sample is off-policy.
    columns: further arrays [T, ...].
    """

    key: Key
    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    policy: tuple[tuple[PolicyRef, int], ...]
    stop: Stop
    temperature: float = 1.0
    full_support: bool = True
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int64), ("mask", np.bool_), ("logprobs", np.float32)):
            object.__setattr__(self, name, _frozen_array(getattr(self, name), dtype))
        object.__setattr__(
            self, "columns", {name: _frozen_array(column, column.dtype.type) for name, column in self.columns.items()}
        )
        num = len(self.tokens)
        for name, column in {"mask": self.mask, "logprobs": self.logprobs, **self.columns}.items():
            if len(column) != num:
                raise ColumnError(f"sample {self.key}: column {name!r} has {len(column)} entries for {num} tokens")
        if num == 0:
            raise ColumnError(f"sample {self.key} has no token")
        if (self.logprobs[~self.mask] != 0).any():
            raise ColumnError(f"sample {self.key}: a token that the policy did not sample carries a logprob")
        bad = np.flatnonzero(self.mask & ~(np.isfinite(self.logprobs) & (self.logprobs <= 0)))
        if len(bad):
            raise NonFiniteError(f"sample {self.key}: logprob {self.logprobs[bad[0]]} at position {bad[0]} is not in (-inf, 0]")
        counted = sum(count for _, count in self.policy)
        if counted != int(self.mask.sum()):
            raise ColumnError(f"sample {self.key}: policies are given for {counted} of {int(self.mask.sum())} sampled tokens")

    @property
    def oldest_policy(self) -> PolicyRef | None:
        return min((ref for ref, _ in self.policy), default=None)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A judgement: a finite value, or a failure with its reason; never a silent 0. components: named parts, for metrics.
    token_rewards: (position, value) pairs within the episode's last sample. raised: it failed since the judge's own code raised.
    """

    value: float | None
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    token_rewards: tuple[tuple[int, float], ...] = ()
    reason: str = ""
    raised: bool = False

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ColumnError("a failed reward needs a reason")
        numbers = [self.value if self.value is not None else 0.0, *self.components.values(), *(v for _, v in self.token_rewards)]
        if not all(math.isfinite(number) for number in numbers):
            raise NonFiniteError(f"reward {self.value} with components {dict(self.components)} is not finite")

    @classmethod
    def failed(cls, reason: str, *, raised: bool = False) -> RewardResult:
        return cls(None, reason=reason, raised=raised)

    @property
    def ok(self) -> bool:
        return self.value is not None


@dataclass(frozen=True, slots=True)
class Episode:
    """What an agent loop returns and a reward judges.

    samples: one, or several for branches and compaction. messages: the whole conversation as text. stop: how the
    episode ended, which is the stop of its last sample unless the agent loop ended it otherwise ("tool_limit", "error").
    env_rewards: what an environment gave, step by step. Group statistics count episodes, not samples.
    """

    key: Key
    task: Task
    samples: tuple[Sample, ...]
    messages: tuple[Message, ...]
    stop: Stop
    env_rewards: tuple[float, ...] = ()
    reward: RewardResult | None = None
    error: str = ""

    @property
    def completion(self) -> str:
        """Text of the last assistant turn ("" if there is none)."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A handle: what the controller holds instead of tensors. Parallel tuples, one entry a row.

    unit: what stays together where the batch is split over ranks; "group" for an objective that compares a group's rows.
    """

    keys: tuple[Key, ...]
    columns: frozenset[str]
    lengths: tuple[int, ...]
    policies: tuple[PolicyRef | None, ...]
    unit: Unit = "row"

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.lengths) == len(self.policies):
            raise ColumnError(
                f"batch handle with {len(self.keys)} keys, {len(self.lengths)} lengths, {len(self.policies)} policies"
            )

    @property
    def groups(self) -> tuple[GroupKey, ...]:
        """The groups of the rows, each once, in row order."""
        return tuple(dict.fromkeys(key.group for key in self.keys))

    def select(self, rows: Sequence[int]) -> BatchRef:
        """The handle of the rows at these positions, in this order."""
        return replace(
            self,
            keys=tuple(self.keys[i] for i in rows),
            lengths=tuple(self.lengths[i] for i in rows),
            policies=tuple(self.policies[i] for i in rows),
        )


# -------------------------------------------------------------------------------------------------- algorithms


@dataclass(frozen=True, slots=True)
class LossRef:
    """A loss by name with its parameters: what goes over a wire instead of a function."""

    name: str
    params: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the algorithm table: data, no code.

    source: the paper. params: everything a recipe may set, with defaults. advantage: name of the estimator, or None
    where the objective needs none (SFT). loss: the policy loss. needs: columns the update reads, found from the loss when
    the row is configured; the pipeline is derived from them. keep: name of the group filter of dynamic sampling, or None.
    min_episodes: how many judged episodes of a group the estimator needs; a smaller group is dropped.
    """

    name: str
    source: str
    params: Mapping[str, Json]
    advantage: str | None
    loss: str
    needs: frozenset[str] = frozenset()
    keep: str | None = None
    min_episodes: int = 1


BatchT = TypeVar("BatchT")


@dataclass(frozen=True, slots=True)
class Stage(Generic[BatchT]):
    """A step of the pipeline: reads columns `needs`, writes columns `gives`.

    scope: the smallest unit `run` may be given; weights: whether it runs a model, and which.
    """

    name: str
    needs: frozenset[str]
    gives: frozenset[str]
    run: Callable[[BatchT], Awaitable[tuple[BatchT, Metrics]]]
    scope: Scope
    weights: WeightUse = "none"


# ----------------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """One statistic, mergeable without loss: a mean keeps (total, count) and is divided once, when it is read."""

    total: float
    count: float = 1.0
    reduction: Reduction = "mean"

    def __add__(self, other: Metric) -> Metric:
        if self.reduction != other.reduction:
            raise ColumnError(f"a {self.reduction} and a {other.reduction} of one metric cannot be merged")
        match self.reduction:
            case "mean" | "sum":
                total = self.total + other.total
            case "max":
                total = max(self.total, other.total)
            case "min":
                total = min(self.total, other.total)
        return Metric(total, self.count + other.count, self.reduction)

    @property
    def value(self) -> float:
        """The reduced number; NaN for a mean of nothing."""
        if self.reduction != "mean":
            return self.total
        return self.total / self.count if self.count else math.nan


class Metrics(Mapping[str, Metric]):
    """Named metrics, immutable; `+` merges by name, so that partial results of micro-batches and ranks add up.

    >>> (Metrics.mean({"loss": 3.0}) + Metrics.mean({"loss": 1.0}))["loss"].value
    2.0
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Metric] | Iterable[tuple[str, Metric]] = ()) -> None:
        self._items = dict(items)

    @classmethod
    def mean(cls, values: Mapping[str, float], count: float = 1.0) -> Metrics:
        """Each value is the mean over `count` units."""
        return cls({name: Metric(value * count, count, "mean") for name, value in values.items()})

    @classmethod
    def sum(cls, values: Mapping[str, float]) -> Metrics:
        return cls({name: Metric(float(value), 1.0, "sum") for name, value in values.items()})

    @classmethod
    def max(cls, values: Mapping[str, float]) -> Metrics:
        return cls({name: Metric(float(value), 1.0, "max") for name, value in values.items()})

    def __getitem__(self, name: str) -> Metric:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __add__(self, other: Metrics) -> Metrics:
        merged = dict(self._items)
        for name, metric in other.items():
            merged[name] = merged[name] + metric if name in merged else metric
        return Metrics(merged)

    def __repr__(self) -> str:
        return f"Metrics({self.values_by_name()})"

    def state(self) -> dict[str, Json]:
        """What `restored` makes the same metrics of."""
        return {name: [metric.total, metric.count, metric.reduction] for name, metric in self.items()}

    @classmethod
    def restored(cls, state: Mapping[str, Json]) -> Metrics:
        return cls({name: Metric(*cast("tuple[float, float, Reduction]", values)) for name, values in state.items()})

    def prefixed(self, prefix: str) -> Metrics:
        """The same metrics named `prefix/name`."""
        return Metrics({f"{prefix}/{name}": metric for name, metric in self.items()})

    def values_by_name(self) -> dict[str, float]:
        return {name: metric.value for name, metric in self.items()}
