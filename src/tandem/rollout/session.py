"""The session: what an agent talks to, and what records the tokens it causes.

    chat(a, b)        opening: [a b header]  -> turn                                 branch 0
    chat(a, b, A, c)  following: [closing c header] -> turn                          the same sample goes on
    chat(x, c)        not what was recorded: [x c header] -> turn                    branch 1, a sample of its own

Tokens that exist are never made again from text: only messages that are new are rendered, so a sample is the
concatenation of what was rendered and what was sampled, byte for byte. `mask` is provenance: true where the engine
sampled the token, an end token included, and false for an end token that the renderer wrote. Column `turns` says in which
assistant turn of the sample a token was sampled, or which one it leads to. It neither judges nor retries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.errors import DataError, EngineError
from tandem.ports import Renderer, Reply, RolloutEngine
from tandem.types import GenerateRequest, Json, Key, Message, PolicyRef, Sample, SamplingParams, Stop

Tools = Sequence[Mapping[str, Json]]


@dataclass(slots=True)
class _Branch:
    """One sample while it grows. full: its budget is spent, and later messages are not recorded."""

    key: Key
    params: SamplingParams
    tools: Tools = ()
    history: list[Message] = field(default_factory=list[Message])
    tokens: list[int] = field(default_factory=list[int])
    mask: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    policy: list[tuple[PolicyRef, int]] = field(default_factory=list[tuple[PolicyRef, int]])
    turn_of: list[int] = field(default_factory=list[int])
    stop: Stop = "error"
    turn: int = -1
    full: bool = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None, policy: PolicyRef | None = None) -> None:
        """Sampled tokens with their logprobs and policy, or rendered ones without."""
        self.tokens += tokens
        self.mask += [policy is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.turn_of += [self.turn] * len(tokens)
        if policy is not None and tokens:
            if self.policy and self.policy[-1][0] == policy:
                self.policy[-1] = (policy, self.policy[-1][1] + len(tokens))
            else:
                self.policy.append((policy, len(tokens)))

    def extends_to(self, messages: Sequence[Message], tools: Tools, params: SamplingParams) -> bool:
        """Whether a call with these goes on with this sample."""
        same = (self.tools, self.params.temperature, self.params.full_support) == (tools, params.temperature, params.full_support)
        return same and self.history == list(messages[: len(self.history)])

    def sample(self) -> Sample:
        return Sample(
            key=self.key,
            tokens=np.array(self.tokens),
            mask=np.array(self.mask),
            logprobs=np.array(self.logprobs),
            policy=tuple(self.policy),
            stop=self.stop,
            temperature=self.params.temperature,
            full_support=self.params.full_support,
            columns={"turns": np.array(self.turn_of, np.int32)},
        )


def check_prompt(tokens: Sequence[int], max_context: int, what: str) -> None:
    """Raises DataError for a prompt after which nothing can be sampled."""
    if not tokens:
        raise DataError(f"{what} has no tokens, and nothing can be sampled after nothing; leave such tasks out")
    if len(tokens) >= max_context:
        raise DataError(
            f"{what} has {len(tokens)} tokens and the context {max_context}, which leaves none to "
            "sample; leave such tasks out or raise the engine's max_context"
        )


class Session:
    """Implements ports.LLM for one episode.

    key: the episode's (branch 0); each branch has the next. params: how to sample; the renderer's stop ids are added.
    `max_tokens` bounds what is sampled in a whole sample, all its turns together, and max_context (the engine's) the
    sample's length: where nothing is left, `chat` gives an empty turn that stopped for "length". seed: the run's. heard: what is
    told of sampled tokens as they come.

    A turn that the engine fails or a cancelled caller leaves half sampled is in the sample, whose stop is then "error".
    All turns of a sample have one temperature and one support; a call with others starts a branch.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        key: Key,
        params: SamplingParams,
        *,
        seed: int,
        max_context: int,
        heard: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._engine, self._renderer = engine, renderer
        self._key, self._params = key, params
        self._seed, self._max_context, self._heard = seed, max_context, heard
        self._branches: list[_Branch] = []
        self._current: _Branch | None = None  # the one that `chat` may go on with

    async def chat(self, messages: Sequence[Message], *, tools: Tools = (), params: SamplingParams | None = None) -> Reply:
        """The next assistant turn. Raises DataError for a conversation that alone fills the context."""
        params = params or self._params
        tools = tuple(tools)
        branch, self._current = self._current, None  # nothing to go on with, should this turn fail
        rendered: tuple[int, ...] | None = None
        if branch is not None and branch.extends_to(messages, tools, params):
            closed = branch.mask[-1] and branch.tokens[-1] in self._renderer.stop_ids
            new = messages[len(branch.history) :]
            rendered = () if branch.full else self._renderer.following(branch.history, new, closed=closed, tools=tools)
        if branch is None or rendered is None:
            branch, rendered = self._branch(params, tools), self._renderer.opening(messages, tools)
            self._check(branch, rendered)
        room = min(params.max_tokens - sum(branch.mask), self._max_context - len(branch.tokens) - len(rendered))
        if branch.full or room < 1:
            branch.full, branch.stop, turn = True, "length", []
        else:
            stop_ids = tuple(dict.fromkeys(params.stop_ids + self._renderer.stop_ids))
            turn = await self._sample(branch, rendered, replace(params, max_tokens=room, stop_ids=stop_ids))
        message = Message("assistant", self._renderer.text(turn))
        branch.history = [*messages, message]
        self._current = branch
        return Reply(message, branch.stop)

    async def complete(self, tokens: Sequence[int], params: SamplingParams | None = None) -> tuple[tuple[int, ...], Stop]:
        """Raw: no stop id but those of `params`. Raises DataError for tokens that alone fill the context."""
        params = params or self._params
        branch = self._branch(params, ())
        self._check(branch, tokens)
        room = min(params.max_tokens, self._max_context - len(tokens))
        return tuple(await self._sample(branch, tokens, replace(params, max_tokens=room))), branch.stop

    def samples(self) -> tuple[Sample, ...]:
        return tuple(branch.sample() for branch in self._branches)

    def _branch(self, params: SamplingParams, tools: Tools) -> _Branch:
        return _Branch(self._key._replace(branch=self._key.branch + len(self._branches)), params, tools)

    def _check(self, branch: _Branch, tokens: Sequence[int]) -> None:
        check_prompt(tokens, self._max_context, f"the prompt of {branch.key}")

    async def _sample(self, branch: _Branch, rendered: Sequence[int], params: SamplingParams) -> list[int]:
        """Adds `rendered` and what the engine samples after it; returns the latter and sets the branch's stop."""
        if not branch.tokens:
            self._branches.append(branch)
        branch.turn += 1
        branch.add(rendered)
        branch.stop, start = "error", len(branch.tokens)
        request = GenerateRequest(branch.key, tuple(branch.tokens), params, self._seed, branch.turn)
        stop: Stop | None = None
        async for chunk in self._engine.generate(request):
            branch.add(chunk.tokens, chunk.logprobs, chunk.policy)
            stop = chunk.stop
            if self._heard is not None:
                self._heard(chunk.tokens)
        if stop is None:
            raise EngineError(f"request {branch.key}: the engine's last chunk has no stop; its adapter breaks the port")
        branch.stop = stop
        return branch.tokens[start:]
