"""Calls over HTTP that are tried again, with limits: a POST of JSON that is answered with JSON.

    call -> try -> JSON                                                         the answer
             |  -> not reached, no answer in time, 408, 425, 429 or 5xx         pause, and tried again until limit_s is used up
             `  -> another status, no JSON, more than 8 MiB                     no answer

No more of them at once than `config.at_once`; no more begin in a minute than `config.per_minute`.
"""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count

import httpx2

from tandem.errors import RewardError
from tandem.rewards.config import PartConfig, RewardConfig
from tandem.rewards.patience import within

_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0  # between tries, doubled each time
_AGAIN = frozenset({408, 425, 429})
LARGEST_ANSWER_BYTES = 8 << 20


class NoAnswerError(Exception):
    """There is no judgement: the message says why, as the end of a sentence about the URL."""


class _AgainError(Exception):
    """There is none this time. after_s: for how long the URL wants to be left alone."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Caller:
    """Calls of one URL. name: what messages call it. Belongs to one event loop."""

    def __init__(self, name: str, url: str, config: RewardConfig | PartConfig) -> None:
        """Raises RewardError for a URL that nothing can be sent to, and where the environment lacks the secret."""
        self._config = config
        self._places = asyncio.Semaphore(config.at_once)
        self._next_s = 0.0  # when the next call may begin
        connections = httpx2.Limits(max_connections=config.at_once, max_keepalive_connections=config.at_once)
        headers = {"content-type": "application/json", "accept": "application/json"}
        if config.key_env is not None:
            if not os.environ.get(config.key_env):
                raise RewardError(f"{name}: key_env names the environment variable {config.key_env}, which is not set: export it")
            headers["authorization"] = f"Bearer {os.environ[config.key_env]}"
        try:
            self._url = httpx2.URL(url)
        except httpx2.InvalidURL as problem:
            raise RewardError(f"{name} is no address: {problem}") from None
        self._client = httpx2.AsyncClient(timeout=None, limits=connections, headers=headers)

    async def answer(self, message: bytes) -> object:
        """Of as many tries as there is time for. Raises NoAnswerError."""
        async with self._places:
            return await self._answer(message)

    async def once(self, message: bytes) -> object:
        """Of one try. Raises NoAnswerError."""
        try:
            return await self._try(message)
        except _AgainError as problem:
            raise NoAnswerError(str(problem)) from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, message: bytes) -> object:
        config, clock, spent_s = self._config, asyncio.get_running_loop().time, 0.0
        for tries in count(1):
            await self._turn()
            began_s = clock()
            try:
                return await self._try(message)
            except _AgainError as again:
                spent_s += min(clock() - began_s, config.one_try_s)  # the rest is the loop's, which was busy
                pause_s = max(again.after_s, min(_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S))
                if spent_s + pause_s >= config.limit_s:
                    asked = f" and asked for {again.after_s:g} s" if again.after_s else ""
                    raise NoAnswerError(f"{again}{asked}; tries until limit_s={config.limit_s:g}: {tries}") from None
            await asyncio.sleep(pause_s)
            spent_s += pause_s
        raise AssertionError

    async def _turn(self) -> None:
        """Waits until a call may begin, which uses up no limit."""
        if self._config.per_minute is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._next_s, begin_s = max(now_s, self._next_s) + 60 / self._config.per_minute, max(now_s, self._next_s)
        await asyncio.sleep(begin_s - now_s)

    async def _try(self, message: bytes) -> object:
        """The JSON of one answer. Raises _AgainError where another try may have one, and NoAnswerError where not."""
        try:
            response, content = await within(self._config.one_try_s, self._post(message))
        except TimeoutError:
            raise _AgainError(f"gave no answer within {self._config.one_try_s:g} s") from None
        except httpx2.RequestError as problem:
            raise _AgainError(f"cannot be reached: {str(problem) or type(problem).__name__}") from None
        text = content.decode(errors="replace")
        if response.is_success:
            try:
                return json.loads(content)
            except (ValueError, RecursionError):
                raise NoAnswerError(f"answered what is not JSON: {shown(text)}") from None
        said = f"answered {response.status_code} {response.reason_phrase}: {shown(text)}"
        if response.status_code in _AGAIN or response.is_server_error:
            raise _AgainError(said, _seconds(response.headers.get("retry-after", "")))
        raise NoAnswerError(said)

    async def _post(self, message: bytes) -> tuple[httpx2.Response, bytes]:
        content = bytearray()
        async with self._client.stream("POST", self._url, content=message) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > LARGEST_ANSWER_BYTES:
                    raise NoAnswerError(f"answered with more than {LARGEST_ANSWER_BYTES >> 20} MiB, which is no judgement")
        return response, bytes(content)


def _seconds(retry_after: str) -> float:
    """What a Retry-After header asks for: seconds, or the time until a date; 0 where it says neither."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max((date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)


def shown(answer: object) -> str:
    """For a message: the beginning of it, in one line."""
    text = " ".join((answer if isinstance(answer, str) else json.dumps(answer)).split())
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
