"""Rewards from a language model that grades each answer, behind any endpoint with OpenAI's chat completions.

It is sent one message a judged episode, and ends what it says with a line "Score: N". A score of 0 is worth 0 and one of
`best` is worth 1; what is no score, or is outside, fails the episode. What it said is journalled, since it need not say it twice.

What the policy wrote is part of what the judge reads, and a policy that is trained on its scores will find what pleases it: measure
with something else.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from tandem.errors import RewardError
from tandem.rewards.calls import Caller, NoAnswerError, shown
from tandem.rewards.config import PartConfig, RewardConfig
from tandem.rewards.replay import Journal, recorded, replayed
from tandem.types import Episode, RewardResult, Task

_SCORE = re.compile(r"score\W*?\s*[:=]\W*?(-?\d+(?:\.\d+)?)", re.IGNORECASE)


class JudgeReward:
    """Implements the Reward port with `config.judge`; see the module's docstring. Belongs to one event loop.

    journal: results are recorded there before they are returned, and a group that is all in it is answered from it.
    """

    def __init__(self, config: RewardConfig | PartConfig, journal: Journal | None = None) -> None:
        """Raises RewardError for a URL that nothing can be sent to, and where the environment lacks the key."""
        assert config.judge is not None
        self._config, self._judge, self._journal = config, config.judge, journal
        self._name = f"judge {config.judge.model} at {config.judge.url}"
        self._caller = Caller(self._name, f"{config.judge.url.rstrip('/')}/chat/completions", config)

    async def start(self) -> None:
        """Lets it grade one right answer, once. Raises RewardError where that gives no score."""
        try:
            self._score(await self._caller.once(self._message("What is 1 + 1?", "2", "2")))
        except NoAnswerError as problem:
            raise RewardError(f"{self._name} {problem}; correct reward.judge before the run") from None

    async def __call__(self, task: Task, group: Sequence[Episode]) -> Sequence[RewardResult]:
        if (known := replayed(self._journal, group)) is not None:
            return known
        return recorded(self._journal, group, await asyncio.gather(*(self._graded(task, episode) for episode in group)))

    async def close(self) -> None:
        await self._caller.close()

    async def _graded(self, task: Task, episode: Episode) -> RewardResult:
        talk = episode.messages
        last = max((i for i, message in enumerate(talk) if message.role == "assistant"), default=len(talk))
        before = talk[:last]
        question = before[0].content if len(before) == 1 else "\n".join(f"{each.role}: {each.content}" for each in before)
        reference = task.answer if isinstance(task.answer, str) else json.dumps(task.answer, ensure_ascii=False)
        try:
            return RewardResult(self._score(await self._caller.answer(self._message(question, reference, episode.completion))))
        except NoAnswerError as problem:
            return RewardResult.failed(f"{self._name} {problem}")

    def _message(self, question: str, reference: str, answer: str) -> bytes:
        parts = {"{question}": question, "{reference}": reference, "{answer}": answer}
        prompt = re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], self._judge.prompt)
        body = {"model": self._judge.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0.0}
        return json.dumps(body | self._config.params).encode()

    def _score(self, answer: Any) -> float:
        """Of the last line that has one, as a share of the best. Raises NoAnswerError."""
        match answer:
            case {"choices": [{"message": {"content": str(said)}}, *_]}:
                pass
            case _:
                raise NoAnswerError(f"answered {shown(answer)}, which is no chat completion with a text")
        scores = _SCORE.findall(said)
        if not scores:
            raise NoAnswerError(f"said no score: {shown(said[-200:])}; its last line must be 'Score: N'")
        score = float(scores[-1])
        if not 0 <= score <= self._judge.best:
            raise NoAnswerError(f"gave the score {score:g}, which is not between 0 and best={self._judge.best:g}")
        return score / self._judge.best
