"""Workers that hang, die and print: what is left of them, and what the others notice."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from tandem.errors import RewardError
from tandem.rewards.config import RewardConfig
from tandem.rewards.workers import FunctionReward
from tandem.types import Json, RewardResult
from tests.rewards.episodes import group, task

MODULE = "tests.rewards.user_functions"
T = TypeVar("T")


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def run(config: RewardConfig, use: Callable[[FunctionReward], Awaitable[T]], journal: "dict[str, RewardResult] | None" = None) -> T:
    """Uses a reward, closes it, and looks that nothing is left of it."""

    async def main() -> T:
        descriptors, processes = set(os.listdir("/proc/self/fd")), children()
        reward = FunctionReward(config, None if journal is None else DictJournal(journal))
        try:
            return await use(reward)
        finally:
            await reward.close()
            assert children() <= processes
            assert set(os.listdir("/proc/self/fd")) <= descriptors

    return asyncio.run(main())


class DictJournal:
    def __init__(self, entries: dict[str, RewardResult]) -> None:
        self._entries = entries
        self.get = entries.get

    def record(self, results: Mapping[str, RewardResult]) -> None:
        self._entries.update(results)


async def values(reward: FunctionReward, *texts: str) -> list[float | None]:
    return [result.value for result in await reward(task(), group(*texts))]


def test_what_is_sent_arrives_and_printing_disturbs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(RewardConfig(function=f"{MODULE}:sees"), lambda reward: values(reward, "a", "b")) == [1, 1]
    config = RewardConfig(function="tests/rewards/user_functions.py:length", params={"per_character": 0.5})
    assert run(config, lambda reward: values(reward, "abc", "")) == [1.5, 0]
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "hello\nmore\n"


def test_everything_that_travels_can_be_pickled() -> None:
    (before,) = group("a")
    after = pickle.loads(pickle.dumps(before))
    assert (after.key, after.task, after.messages, after.samples[0].policy) == (
        before.key,
        before.task,
        before.messages,
        before.samples[0].policy,
    )
    result = RewardResult(1.0, {"a": 0.5}, ((1, 0.5),))
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_hanging_function_is_killed_and_its_group_fails_while_others_go_on() -> None:
    async def use(reward: FunctionReward) -> None:
        hung, *others = await asyncio.gather(reward(task(), group("hang", "b")), *(values(reward, "a") for _ in range(4)))
        assert [result.reason for result in hung] == [f"reward function '{MODULE}:reads' gave no answer within 2 s"] * 2
        assert all(result.value is None for result in hung)
        assert len({worker for result in others for worker in result}) == 1  # the other worker judged all the others
        assert await values(reward, "a") != [None]

    sleeping = subprocess.run(["pgrep", "-f", "^sleep 1000$"], capture_output=True, check=False).stdout
    run(RewardConfig(function=f"{MODULE}:reads", workers=2, limit_s=2.0), use)
    assert subprocess.run(["pgrep", "-f", "^sleep 1000$"], capture_output=True, check=False).stdout == sleeping


@pytest.mark.parametrize(("first", "how"), [("die", "ended with exit code 3"), ("killed", "was killed by SIGKILL")])
def test_a_worker_that_dies_fails_its_group_and_is_replaced(first: str, how: str) -> None:
    async def use(reward: FunctionReward) -> None:
        (result,) = await reward(task(), group(first))
        assert result.reason == f"reward function '{MODULE}:reads' lost its worker, which {how}"
        assert await values(reward, "a") != [None]

    run(RewardConfig(function=f"{MODULE}:reads", workers=1), use)


@pytest.mark.parametrize(("times", "value"), [(1, 1.0), (3, None)])
def test_a_group_whose_worker_is_killed_by_a_signal_is_judged_once_more(times: int, value: float | None, tmp_path: Path) -> None:
    """By another worker; where that one is killed, too, the group fails, and is not judged a third time."""
    journal: dict[str, RewardResult] = {}

    async def use(reward: FunctionReward) -> None:
        assert await values(reward, "a") == [value]

    params: dict[str, Json] = {"marks": str(tmp_path), "times": times}
    run(RewardConfig(function=f"{MODULE}:killed", params=params, workers=1), use, journal)
    assert len(list(tmp_path.iterdir())) == min(times, 2)
    assert [result.reason for result in journal.values()] == (
        [] if value else [f"reward function '{MODULE}:killed' lost its worker, which was killed by SIGKILL"]
    )


def test_a_group_does_not_fail_since_all_workers_were_killed_while_they_had_nothing_to_do() -> None:
    async def use(reward: FunctionReward) -> None:
        await asyncio.gather(values(reward, "slow"), values(reward, "slow"))
        killed = [worker._process.pid for worker in reward._idle]
        assert len(killed) == 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        for _ in killed:
            (pid,) = await values(reward, "a")
            assert pid is not None
            assert pid not in killed

    run(RewardConfig(function=f"{MODULE}:reads", workers=2), use)


def test_failures_of_one_group_leave_the_worker_in_place() -> None:
    async def use(reward: FunctionReward) -> None:
        before = await values(reward, "a")
        (result,) = await reward(task(), group("raise"))
        assert "KeyError: 'missing\\nand more'" in result.reason
        with pytest.raises(RewardError, match=r"returned 1 values for a group of 2 episodes"):
            await reward(task(), group("short", "b"))
        assert await values(reward, "a") == before

    run(RewardConfig(function=f"{MODULE}:reads", workers=1), use)


def test_as_many_groups_at_once_as_there_are_workers_in_order() -> None:
    finished: list[int] = []

    async def one(reward: FunctionReward, number: int) -> list[float | None]:
        pids = await values(reward, "slow")
        finished.append(number)
        return pids

    async def use(reward: FunctionReward) -> set[float | None]:
        return {pid for pids in await asyncio.gather(*(one(reward, number) for number in range(6))) for pid in pids}

    assert len(run(RewardConfig(function=f"{MODULE}:reads", workers=2), use)) == 2
    earlier = [set(range(number)) - {*finished[:place]} for place, number in enumerate(finished)]
    assert all(len(others) < 2 for others in earlier), f"the other worker has at most one of those before: {finished}"


def test_a_busy_event_loop_does_not_use_up_the_limit() -> None:
    async def use(reward: FunctionReward) -> None:
        await reward.start()
        judging = asyncio.ensure_future(values(reward, "slow", "x" * 4_000_000))  # more than a socket takes at once
        await asyncio.sleep(0)
        time.sleep(1)  # noqa: ASYNC251 as a training step does
        assert None not in await judging

    run(RewardConfig(function=f"{MODULE}:reads", limit_s=0.6), use)


def test_a_cancelled_call_ends_its_worker() -> None:
    async def use(reward: FunctionReward) -> None:
        (before,) = await values(reward, "a")
        hanging = asyncio.ensure_future(values(reward, "hang"))
        await asyncio.sleep(0.05)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert int(before or 0) not in children()
        assert await values(reward, "a") != [None]

    run(RewardConfig(function=f"{MODULE}:reads", workers=1), use)


def test_closing_ends_a_call_that_is_running() -> None:
    async def use(reward: FunctionReward) -> None:
        await reward.start()
        hanging = asyncio.ensure_future(values(reward, "hang"))
        await asyncio.sleep(0.05)
        await reward.close()
        assert await hanging == [None]

    run(RewardConfig(function=f"{MODULE}:reads"), use)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("exact_mach", "unknown reward function 'exact_mach'; did you mean 'exact_match'"),
        (f"{MODULE}:NUMBER", "is 3, which cannot be called"),
        ("broken.py:f", r"lost its worker, which ended with exit code 1 while its module was imported"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(
    name: str, match: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')")
    config = RewardConfig(function=name.replace("broken.py", str(tmp_path / "broken.py")))
    with pytest.raises(RewardError, match=match):
        run(config, lambda reward: reward.start())
    assert ("no licence" in capfd.readouterr().err) == (name == "broken.py:f")


def test_what_a_clock_decided_is_recorded_and_replayed(tmp_path: Path) -> None:
    journal: dict[str, RewardResult] = {}
    config = RewardConfig(function=f"{MODULE}:hangs_once", limit_s=0.3, params={"mark": str(tmp_path / "mark")})

    async def judge(reward: FunctionReward) -> list[RewardResult]:
        return list(await reward(task(), group("a", "b")))

    first = run(config, judge, journal)
    assert [result.ok for result in first] == [False, False]
    assert list(journal) == ["train:7.0.0", "train:7.1.0"]
    assert run(config, judge, journal) == first  # although the function would answer now
    assert [result.value for result in run(config, judge, {})] == [1, 1]


def test_what_a_function_decided_is_not_recorded() -> None:
    journal: dict[str, RewardResult] = {}
    run(RewardConfig(function=f"{MODULE}:reads"), lambda reward: values(reward, "raise"), journal)
    assert journal == {}


SCRIPT = """
import asyncio, sys, time
from tandem.rewards.config import RewardConfig
from tandem.rewards.workers import FunctionReward
from tests.rewards.episodes import group, task

async def main():
    reward = FunctionReward(RewardConfig(function="tests.rewards.user_functions:reads", workers=1))
    await reward(task(), group("a"))
    (worker,) = reward._workers
    print(worker._process.pid, flush=True)
    if sys.argv[1] == "hang":
        await reward(task(), group("hang"))
    if sys.argv[1] == "read nothing":
        asyncio.ensure_future(reward(task(), group("a")))
        await asyncio.sleep(0)
        time.sleep(60)
    await reward.close()

asyncio.run(main())
"""


def test_nothing_is_said_at_the_interpreters_end() -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", SCRIPT, "close"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("way", ["hang", "read nothing"])
def test_workers_end_with_a_process_that_is_killed(way: str) -> None:
    """In the middle of a group, or with an answer that is not read."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, way], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while (state := Path(f"/proc/{worker}/stat")).exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"worker {worker} lives on"
        time.sleep(0.02)
