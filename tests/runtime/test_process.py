"""The process runtime: workers that die, hang, stop and fail, and what the caller and the machine see of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tandem.device import Hardware
from tandem.errors import RegistryError, RunError, StalledError, WorkerError
from tandem.runtime.forkserver import ForkServer, fork_server
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.pool import PoolGroup, Runtime
from tandem.runtime.process import Processes
from tandem.runtime.worker import Do
from tests.runtime.workers import Worker

FACTORY = "tests.runtime.workers:Worker"
T = TypeVar("T")
Use = Callable[[PoolGroup], Awaitable[T]]


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Callable[..., T]:
    """Uses a group of some ranks, and looks that none of its processes is left afterwards."""

    def run(use: Use[T], *, ranks: int = 2, limit_s: float = 60.0, collectives: bool = False) -> T:
        async def main() -> T:
            runtime = Processes(place([ResourcePool("pool", ranks)], Hardware(cores=ranks)), tmp_path, limit_s=limit_s)
            group = runtime.group("policy", "pool", FACTORY, collectives=collectives)
            async with runtime:
                pids = await group.call_each(Worker.pid)
                result = await use(group)
            assert not any(map(alive, pids))
            return result

        return asyncio.run(main())

    return run


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(pids: list[int], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_worker_that_is_killed_in_a_call_is_named_with_its_last_words_and_its_peers_end(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        pids = await group.call_each(Worker.pid)
        began = time.monotonic()
        with pytest.raises(WorkerError) as error:
            await group.call(Worker.die, 1, signal.SIGKILL)
        assert time.monotonic() - began < 5
        node = os.uname().nodename
        assert f"policy.die: rank 1 (process {pids[1]} on {node}) was killed by SIGKILL, and its peers were ended" in str(
            error.value
        )
        assert "pool-1.log:\n  my last word" in str(error.value)
        how = f"rank 1 (process {pids[1]} on {node}) of pool pool was killed by SIGKILL, and its peers were ended. The end of"
        assert group._pool.death.startswith(how)
        assert group._pool.death.endswith("pool-1.log:\n  my last word")
        assert not any(map(alive, pids))
        with pytest.raises(WorkerError, match=r"policy\.pid cannot be called: rank 1 .*SIGKILL"):
            await group.call(Worker.pid)

    run(use)


def test_a_worker_that_is_killed_while_nobody_calls_ends_its_peers(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        pids = await group.call_each(Worker.pid)
        os.kill(pids[0], signal.SIGKILL)
        assert await asyncio.to_thread(gone_within, pids, 5)
        with pytest.raises(WorkerError, match="SIGKILL"):
            await group.call(Worker.pid)

    run(use)


def test_a_worker_that_is_killed_in_a_collective_is_the_error_and_not_what_its_peers_say_of_it(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        assert await group.call_each(Worker.add) == [3.0, 3.0, 3.0]
        pids = await group.call_each(Worker.pid)
        adding = asyncio.ensure_future(group.call(Worker.sleep_and_add, 1))
        await asyncio.sleep(0.3)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"rank 1 \(process {pids[1]} .*SIGKILL"):
            await asyncio.wait_for(adding, 10)

    run(use, ranks=3, collectives=True)


def test_calls_that_are_under_way_together_meet_in_one_order_on_all_ranks(run: Callable[..., None]) -> None:
    """Small arguments arrive before large ones that were sent earlier, and not on every rank alike."""

    async def use(group: PoolGroup) -> None:
        sent = [torch.full((1 << 20 if number % 3 else 2,), float(number)) for number in range(30)]
        found = await asyncio.wait_for(asyncio.gather(*(group.call(Worker.add_first, values) for values in sent)), 60)
        assert found == [2.0 * number for number in range(30)]

    run(use, collectives=True)


def test_what_is_registered_beside_the_others_keeps_nobody_waiting(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        waiting = asyncio.create_task(group.call(Worker.until_begun))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(group.call(Worker.begin), 60)
        assert await waiting == 1.0

    run(use, collectives=True)


def test_ranks_that_have_met_can_meet_again_in_new_groups(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        for _ in range(2):
            assert await group.call_each(Worker.add_in_a_new_group) == [1.0, 1.0]

    run(use, collectives=True)


def test_all_ranks_meet_in_the_order_of_the_calls(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        sums = await asyncio.gather(group.call_each(Worker.add_later, 1.0, 0), group.call_each(Worker.add_later, 10.0, 1))
        assert sums == [[2.0, 2.0], [20.0, 20.0]]

    run(use, collectives=True)


def test_calls_that_wait_overlap_where_no_rank_meets_another(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        waiting = asyncio.ensure_future(group.call(Worker.wait))
        assert await group.call(Worker.echo, 1) == 1
        waiting.cancel()

    run(use)


def test_a_call_without_progress_shows_where_each_rank_stands(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        with pytest.raises(StalledError) as error:
            await group.call(Worker.sleep, 60.0, 1)
        text = str(error.value)
        assert text.startswith("policy.sleep: nothing moved for 1 s; 1 of 2 ranks have not answered")
        assert "rank 1 (process" in text
        assert "rank 0 (process" not in text
        assert "time.sleep(seconds)" in text
        assert not group._pool.death, "it was ended"
        with pytest.raises(WorkerError, match=r"policy\.sleep stalled"):
            await group.call(Worker.pid)

    run(use, limit_s=1.0)


def test_a_call_that_waits_shows_what_it_waits_for(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        with pytest.raises(StalledError, match=r"policy\.wait:\n(?s:.*)await self\.for_ever\(\)(?s:.*)await asyncio\.Event"):
            await group.call(Worker.wait)

    run(use, ranks=1, limit_s=1.0)


@pytest.mark.parametrize(("method", "shows"), [(Worker.stop, "stopped"), (Worker.keep_the_interpreter, "keep_the_interpreter")])
def test_a_worker_that_cannot_answer_is_no_hang(run: Callable[..., None], method: Callable[..., None], shows: str) -> None:
    async def use(group: PoolGroup) -> None:
        with pytest.raises(StalledError, match=rf"does not say where it stands(?s:.*){shows}"):
            await group.call(method)

    run(use, ranks=1, limit_s=1.0)


def test_progress_postpones_the_limit(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        await group.call(Worker.sleep_by_rank, 0.6)  # 0, 0.6 and 1.2 s: longer in all than the limit, but always moving

    run(use, ranks=3, limit_s=1.0)


def test_a_rank_that_fails_frees_the_peers_that_wait_for_it(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.runtime.pool._PEERS_LIMIT_S", 0.3)

    async def use(group: PoolGroup) -> None:
        with pytest.raises(ValueError, match="rank 0 cannot") as error:
            await group.call(Worker.fail_before_adding, 0)
        assert "raised in another process" in error.value.__notes__[0]
        assert "fail_before_adding" in error.value.__notes__[0]
        with pytest.raises(WorkerError, match="failed on a rank for which others waited: rank 0 cannot"):
            await group.call(Worker.pid)
        assert not group._pool.death, "it was ended"

    run(use, collectives=True)


def test_a_failure_that_nobody_waits_for_leaves_the_group_in_place(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        with pytest.raises(WorkerError, match=r"raised .*LocalError: no class of yours(?s:.*)in local_error"):
            await group.call(Worker.local_error)
        with pytest.raises(WorkerError, match="cannot be sent"):
            await group.call(Worker.echo, lambda: None)
        with pytest.raises(WorkerError, match="cannot be sent"):
            await group.call(Worker.lambda_back)
        with pytest.raises(SystemError, match="out of turn"):
            await group.call(Worker.fail_late)
        assert await group.call_each(Worker.echo, 3) == [3, 3]

    run(use)


def test_a_worker_that_exits_says_with_what(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            await group.call(Worker.exit, 3)

    run(use, ranks=1)


def test_tensors_arrive_as_they_were_and_stay_while_later_ones_come(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        sent = [
            torch.arange(5000),
            torch.randn(3, 4000).t(),
            torch.randn(3000).bfloat16(),
            torch.rand(9000) > 0.5,
            torch.zeros(0, 7),
            torch.tensor(2.5),
            torch.randn(2, 2, dtype=torch.complex64),
        ]
        first = await group.call(Worker.echo, sent)
        for number in range(5):
            other = await group.call(Worker.echo, torch.full((20000,), number))
            assert other.unique().tolist() == [number]
        for before, after in zip(sent, first, strict=True):
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert torch.equal(before, after)

    run(use)


def test_a_worker_sees_its_cores_and_devices(tmp_path: Path) -> None:
    async def main() -> None:
        pools = [ResourcePool("a", 1, cores=1), ResourcePool("b", 2, cores=2, devices=2)]
        runtime = Processes(place(pools, Hardware(5, "cuda", 4)), tmp_path)
        a, b = [runtime.group(f"in {pool.name}", pool.name, FACTORY) for pool in pools]
        async with runtime:
            assert await a.call_each(Worker.sees) == [(1, "")]
            assert await b.call_each(Worker.sees) == [(2, "0,1"), (2, "2,3")]

    asyncio.run(main())


def test_roles_of_one_pool_share_its_processes_and_a_factory_that_fails_is_the_callers(tmp_path: Path) -> None:
    async def main() -> None:
        runtime = Processes(place([ResourcePool("pool", 2)], Hardware(cores=2)), tmp_path)
        with pytest.raises(RunError, match=r"no pool 'other'.*there are pool"):
            runtime.group("policy", "other", FACTORY)
        with pytest.raises(RunError, match="2 ranks are not whole runs of 3"):
            runtime.group("policy", "pool", FACTORY, replicas=3)
        policy = runtime.group("policy", "pool", FACTORY)
        critic = runtime.group("critic", "pool", "tests/runtime/workers.py:Worker", replicas=2)
        with pytest.raises(WorkerError, match=r"policy\.pid cannot be called: the runtime of pool 'pool' has not started"):
            await policy.call(Worker.pid)
        async with runtime:
            assert await policy.call_each(Worker.pid) == await critic.call_each(Worker.pid)
            with pytest.raises(RunError, match="'third' comes too late"):
                runtime.group("third", "pool", FACTORY)
        with pytest.raises(RunError, match="was started before"):
            await runtime.__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("factory", "arguments", "error"),
    [("tests.runtime.workers:Wroker", (), RegistryError), (FACTORY, (1, 2, 3), TypeError)],
    ids=["no such factory", "too many arguments"],
)
def test_a_factory_that_fails_is_the_callers_and_leaves_no_process(
    tmp_path: Path, factory: str, arguments: tuple[int, ...], error: type[Exception]
) -> None:
    async def main() -> None:
        runtime = Processes(place([ResourcePool("pool", 2)], Hardware(cores=2)), tmp_path)
        first = runtime.group("first", "pool", FACTORY)
        runtime.group("second", "pool", factory, *arguments)
        with pytest.raises(error, match=r"Wroker|argument"):
            await runtime.__aenter__()
        assert not any(alive(process.pid) for process in first._pool._members)
        with pytest.raises(WorkerError, match="the runtime was closed"):
            await first.call(Worker.pid)

    asyncio.run(main())


def test_a_worker_takes_along_what_it_started(run: Callable[..., list[int]]) -> None:
    async def use(group: PoolGroup) -> list[int]:
        started = await group.call_each(Worker.child)
        os.kill((await group.call_each(Worker.pid))[0], signal.SIGKILL)
        assert await asyncio.to_thread(gone_within, started[:1], 5)
        return started

    started = run(use)
    assert len(started) == 2
    assert gone_within(started, 5)


def test_a_fork_server_that_dies_ends_its_workers_and_is_replaced(run: Callable[..., list[int]]) -> None:
    async def use(group: PoolGroup) -> list[int]:
        pids = await group.call_each(Worker.pid)
        waiting = asyncio.ensure_future(group.call(Worker.keep_the_interpreter))
        await asyncio.sleep(0.2)
        os.kill(fork_server()._process.pid, signal.SIGKILL)
        assert await asyncio.to_thread(gone_within, pids, 5)
        with pytest.raises(WorkerError, match="ended with the fork server, which died"):
            await waiting
        return pids

    first = run(use)
    assert set(first).isdisjoint(run(lambda group: group.call_each(Worker.pid)))


def test_a_fork_server_that_dies_before_it_has_forked_is_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*arguments: object) -> int:
        raise ConnectionResetError

    async def main() -> None:
        runtime = Processes(place([ResourcePool("pool", 1)], Hardware(cores=1)), tmp_path)
        assert not runtime.death
        with pytest.raises(WorkerError, match="the fork server died while it loaded torch or forked"):
            await runtime.__aenter__()
        assert runtime.death == "the fork server died while it loaded torch or forked; what it wrote to stderr says why"

    monkeypatch.setattr(ForkServer, "fork", gone)
    asyncio.run(main())


def test_a_worker_runs_registered_methods_only(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        for name in ("for_ever", "__init__", "no_such"):
            with pytest.raises(RunError, match=rf"Worker\.{name} is not registered"):
                await group._pool.order("mischief", [Do("policy", name, (), {})], stuck=False)

    run(use)


SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from tandem.device import Hardware
from tandem.runtime.forkserver import fork_server
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.process import Processes
from tests.runtime.workers import Worker

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no news
    runtime = Processes(place([ResourcePool("pool", 2)], Hardware(2)), Path(sys.argv[1]))
    group = runtime.group("policy", "pool", "tests.runtime.workers:Worker")
    async with runtime:
        print(*await group.call_each(Worker.pid), *await group.call_each(Worker.child), flush=True)
        if sys.argv[2] == "hang":
            await group.call(Worker.keep_the_interpreter)

asyncio.run(main())
"""


def test_nothing_is_said_at_the_interpreters_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-X",
        "dev",
        "-W",
        "error",
        "-W",
        "ignore::DeprecationWarning:torch",
        "-c",
        SCRIPT,
        str(tmp_path),
        "close",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert gone_within([int(pid) for pid in done.stdout.split()], 5)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """In native code that keeps the interpreter, so that no thread of theirs could notice."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), "hang"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 4
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert gone_within(pids, 10)


def test_pools_that_can_be_done_without_are_no_loss_until_the_last_of_them_dies(tmp_path: Path) -> None:
    pools = [ResourcePool(name, 1) for name in ("needed", "spare-0", "spare-1")]

    async def main() -> None:
        runtime = Processes(place(pools, Hardware(3)), tmp_path, limit_s=20, spare=["spare-0", "spare-1"])
        needed, *spare = (runtime.group(pool.name, pool.name, FACTORY) for pool in pools)
        async with runtime:
            lost = asyncio.create_task(runtime.lost())
            for number, group in enumerate(spare):
                assert runtime.death == ""
                assert not lost.done()
                with pytest.raises(WorkerError, match=f"spare-{number}.die: rank 0 .*killed by SIGKILL"):
                    await group.call(Worker.die, 0, signal.SIGKILL)
                await needed.call(Worker.pid)
            with pytest.raises(WorkerError, match=r"rank 0 .* of pool spare-1 was killed by SIGKILL"):
                await asyncio.wait_for(lost, 5)

    asyncio.run(main())


def test_a_spare_worker_that_dies_before_all_were_there_is_a_death(tmp_path: Path) -> None:
    pools = [ResourcePool(name, 1) for name in ("spare-0", "spare-1")]

    async def main() -> None:
        runtime = Processes(place(pools, Hardware(2)), tmp_path, limit_s=20, spare=["spare-0", "spare-1"])
        runtime.group("spare-0", "spare-0", FACTORY)
        runtime.group("spare-1", "spare-1", "tests.runtime.workers:unborn")
        with pytest.raises(WorkerError, match="SIGKILL"):
            await runtime.__aenter__()
        assert "of pool spare-1 was killed by SIGKILL" in runtime.death

    asyncio.run(main())


# --------------------------------------------------------------------------------------- a new pool for one that died


@asynccontextmanager
async def two_spare(
    logs: Path, factory: str = FACTORY, *arguments: object
) -> AsyncGenerator[tuple[Processes, list[PoolGroup], list[str]]]:
    """A runtime with two spare pools, of which the factory is the first one's; their groups; what is told."""
    pools, told = [ResourcePool(name, 1) for name in ("spare-0", "spare-1")], list[str]()
    runtime = Processes(place(pools, Hardware(2)), logs, limit_s=120, spare=["spare-0", "spare-1"])
    runtime.tell = told.append
    groups = [runtime.group("first", "spare-0", factory, *arguments), runtime.group("second", "spare-1", FACTORY)]
    async with runtime:
        yield runtime, groups, told


async def die(group: PoolGroup) -> None:
    with pytest.raises(WorkerError, match=r"\.die: rank 0 "):
        await group.call(Worker.die, 0, signal.SIGKILL)


def begun(lives: Path, num: int) -> None:
    """Waits until so many workers are being made."""
    while len(lives.read_text().split()) < num:
        time.sleep(0.01)


async def returned(runtime: Runtime[Any]) -> list[str]:
    """When all that is being started is there or is not to be."""
    await asyncio.wait(runtime._coming.values(), timeout=20)
    return runtime.returned()


def test_a_spare_pool_that_dies_is_started_again_and_takes_its_place_when_it_is_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_spare(tmp_path) as (runtime, (first, second), told):
            before = await first.call(Worker.pid)
            await die(first)
            assert await asyncio.wait_for(second.call(Worker.echo, 5), 5) == 5
            await asyncio.wait(runtime._coming.values(), timeout=20)
            with pytest.raises(WorkerError, match=rf"first\.pid cannot be called: rank 0 \(process {before} .*SIGKILL"):
                await first.call(Worker.pid)
            assert runtime.returned() == ["spare-0"]
            assert runtime.returned() == []
            after = await first.call(Worker.pid)
            assert after != before
            assert alive(after)
            assert told[0].startswith(
                "the run goes on without pool spare-0 while it is started again (try 1 of 3): rank 0 (process"
            )
            assert told[1:] == ["pool spare-0 is there again, with a new process"]
            await die(second)
            assert not runtime.death, "the first one lives"
            assert await returned(runtime) == ["spare-1"]
            pids = [await group.call(Worker.pid) for group in (first, second)]
        assert not any(map(alive, pids))

    asyncio.run(main())


def test_a_pool_whose_new_processes_die_as_they_start_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        lives = tmp_path / "lives"
        async with two_spare(tmp_path, "tests.runtime.workers:short_lived", lives) as (runtime, (first, second), told):
            await die(first)
            for _ in range(3):
                assert await returned(runtime) == []
            assert not runtime._coming
            assert len(lives.read_text().split()) == 4
            assert [said.partition(":")[0] for said in told] == [
                *(f"the run goes on without pool spare-0 while it is started again (try {number} of 3)" for number in (1, 2, 3)),
                "the run goes on without pool spare-0 for good, after 3 tries to start it again",
            ]
            assert "building the workers of first: rank 0 (process" in told[-1]
            assert not runtime.death
            await second.call(Worker.pid)

    asyncio.run(main())


@pytest.mark.parametrize("lives", [True, False])
def test_a_pool_that_dies_at_once_each_time_is_given_up_and_one_that_lives_a_while_is_not(lives: bool, tmp_path: Path) -> None:
    async def main() -> None:
        async with two_spare(tmp_path) as (runtime, (first, _), _):
            for _ in range(3):
                await die(first)
                assert await returned(runtime) == ["spare-0"]
                if lives:
                    runtime.returned()
            await die(first)
            assert bool(runtime._coming) is lives

    asyncio.run(main())


def test_a_new_process_that_dies_before_its_turn_is_no_return(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_spare(tmp_path) as (runtime, (first, _), told):
            await die(first)
            (coming,) = runtime._coming.values()
            (process,) = (await coming)._members
            os.kill(process.pid, signal.SIGKILL)
            await (await coming)._ended
            assert runtime.returned() == []
            assert f"(try 2 of 3): the new one did not live: rank 0 (process {process.pid}" in told[-1]
            assert await returned(runtime) == ["spare-0"]

    asyncio.run(main())


def test_the_end_waits_for_no_process_that_is_coming_and_leaves_none(tmp_path: Path) -> None:
    async def main() -> None:
        lives = tmp_path / "lives"
        async with two_spare(tmp_path, "tests.runtime.workers:late", lives) as (_, (first, _), _):
            await die(first)
            await asyncio.to_thread(begun, lives, 2)
        assert not any(alive(int(pid)) for pid in lives.read_text().split())

    asyncio.run(asyncio.wait_for(main(), 40))


def test_a_process_that_has_come_and_that_nobody_asked_for_ends_with_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_spare(tmp_path) as (runtime, (first, _), _):
            await die(first)
            (coming,) = runtime._coming.values()
            (process,) = (await coming)._members
            assert alive(process.pid)
        assert not alive(process.pid)

    asyncio.run(main())


def test_a_death_stays_one_also_where_a_new_process_has_come_meanwhile(tmp_path: Path) -> None:
    """Nobody could be sampled from, so that what was under way is lost; the new process must not make a riddle of it."""

    async def main() -> None:
        async with two_spare(tmp_path) as (runtime, (first, second), told):
            await die(first)
            await asyncio.wait(runtime._coming.values(), timeout=20)
            await die(second)
            assert runtime.returned() == []
            assert len(told) == 1
            assert "of pool spare-1 was killed by SIGKILL" in runtime.death
            with pytest.raises(WorkerError, match="of pool spare-1 was killed by SIGKILL"):
                await asyncio.wait_for(runtime.lost(), 5)

    asyncio.run(main())


def test_a_pool_that_has_stalled_is_none_that_lives(tmp_path: Path) -> None:
    pools = [ResourcePool(name, 1) for name in ("spare-0", "spare-1")]

    async def main() -> None:
        runtime = Processes(place(pools, Hardware(2)), tmp_path, limit_s=2, spare=["spare-0", "spare-1"])
        first, second = (runtime.group(pool.name, pool.name, FACTORY) for pool in pools)
        async with runtime:
            with pytest.raises(StalledError):
                await first.call(Worker.wait)
            assert not runtime.death
            await die(second)
            assert "of pool spare-1 was killed by SIGKILL" in runtime.death
            assert not runtime._coming

    asyncio.run(main())


def test_callers_and_the_end_wait_for_nobody_who_is_told_of_a_death(tmp_path: Path) -> None:
    """Here one that fails, as a console whose reader is gone does."""

    def tell(said: str) -> None:
        raise BrokenPipeError(said)

    async def main() -> None:
        async with two_spare(tmp_path) as (runtime, (first, _), _):
            runtime.tell = tell
            await die(first)
            (mourning,) = runtime._pools["spare-0"]._watchers
            with pytest.raises(BrokenPipeError):
                await mourning

    asyncio.run(asyncio.wait_for(main(), 40))
