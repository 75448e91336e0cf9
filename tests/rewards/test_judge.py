"""A language model that grades: what it is asked, what its words are worth, and what is no score."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards.config import JudgeConfig, RewardConfig
from tandem.rewards.judge import JudgeReward
from tandem.types import RewardResult
from tests.rewards.episodes import group, task


class Endpoint(ThreadingHTTPServer):
    """Says what the graded answer says; `asked` holds path, headers and body of each call."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
        said = body["messages"][0]["content"].rpartition("ANSWER ")[2]
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]})
        if said == "nonsense":
            content = '{"error": "no such model"}'
        if said == "flood":
            content = json.dumps("x" * (9 << 20))
        self.send_response(404 if said == "gone" else 200)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Generator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


PROMPT = "Q {question} R {reference} ANSWER {answer}"


def config(endpoint: Endpoint, **more: Any) -> RewardConfig:
    return RewardConfig(judge=JudgeConfig(endpoint.url, "grader", PROMPT), **{"limit_s": 2.0, **more})


def graded(config: RewardConfig, *texts: str) -> list[RewardResult]:
    async def run() -> list[RewardResult]:
        reward = JudgeReward(config)
        results = list(await reward(task(), group(*texts)))
        await reward.close()
        return results

    return asyncio.run(run())


def test_the_last_score_counts_as_a_share_of_the_best(endpoint: Endpoint) -> None:
    texts = ["Score: 10", "Good, but.\nScore: 7.5", "**Score**: 0", "score = 2", "Score: 1 at first.\nScore: 4"]
    assert [result.value for result in graded(config(endpoint), *texts)] == [1, 0.75, 0, 0.2, 0.4]


def test_it_is_asked_with_question_reference_and_answer_and_what_the_recipe_adds(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    graded(config(endpoint, key_env="JUDGE_KEY", params={"max_tokens": 64, "temperature": 0.5}), "Score: 1 {question}")
    ((path, headers, body),) = endpoint.asked
    assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer s3cret")
    assert body == {
        "model": "grader",
        "messages": [{"role": "user", "content": "Q 2+2= R 4 ANSWER Score: 1 {question}"}],
        "temperature": 0.5,
        "max_tokens": 64,
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I like it", "said no score: 'I like it'; its last line must be 'Score: N'"),
        ("Score: 11", "gave the score 11, which is not between 0 and best=10"),
        ("Score: -1", "gave the score -1"),
        ("nonsense", "which is no chat completion with a text"),
        ("gone", "answered 404 Not Found"),
        ("flood", "answered with more than 8 MiB"),
    ],
)
def test_what_is_no_score_fails_that_answer_alone(endpoint: Endpoint, text: str, reason: str) -> None:
    first, second = graded(config(endpoint), text, "Score: 5")
    assert first.value is None
    assert f"judge grader at {endpoint.url} " in first.reason
    assert reason in first.reason
    assert second.value == 0.5


def test_calls_begin_no_faster_than_they_may(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr("tandem.rewards.calls.asyncio.sleep", note)
    graded(config(endpoint, per_minute=30.0), *["Score: 1"] * 4)
    assert [round(seconds) for seconds in paused] == [0, 2, 4, 6]


def test_before_a_run_it_grades_once(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(given: RewardConfig) -> None:
        reward = JudgeReward(given)
        try:
            await reward.start()
        finally:
            await reward.close()

    with pytest.raises(RewardError, match=r"judge grader at .* said no score: '2'; .*; correct reward.judge before the run"):
        asyncio.run(start(config(endpoint)))
    asyncio.run(start(RewardConfig(judge=JudgeConfig(endpoint.url, "m", "ANSWER Score: {answer}"))))
    with pytest.raises(RewardError, match="cannot be reached"):
        asyncio.run(start(RewardConfig(judge=JudgeConfig("http://127.0.0.1:1/v1", "m"))))
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(RewardError, match="the environment variable NO_KEY, which is not set: export it"):
        asyncio.run(start(config(endpoint, key_env="NO_KEY")))
