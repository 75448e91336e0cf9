"""The Ray runtime: placement, workers that die, hang and fail, a cluster that shrinks, and what is left of it all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray
import torch

from tandem.data_proto import DataProto
from tandem.errors import DeviceError, RegistryError, RunError, StalledError, WorkerError
from tandem.ports import Consumer
from tandem.queue.memory import MemoryQueue, QueueConfig
from tandem.registry import resolve
from tandem.runtime import objects
from tandem.runtime.placement import ResourcePool, table
from tandem.runtime.pool import PoolGroup
from tandem.runtime.queue_service import shared
from tandem.runtime.ray import RayCluster
from tandem.runtime.ray_queue import RayQueueClient, RayQueueServer
from tandem.types import GroupKey, Key
from tests.runtime.ray_cluster import cluster
from tests.runtime.served import far, near
from tests.runtime.test_process import alive, die, gone_within, returned
from tests.runtime.workers import Worker

pytestmark = pytest.mark.ray

FACTORY = "tests.runtime.workers:Worker"
T = TypeVar("T")
Use = Callable[[PoolGroup], Awaitable[T]]


@pytest.fixture(autouse=True)
def _ray() -> None:
    cluster()


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Callable[..., T]:
    """Uses a group of some ranks, and looks that none of its processes is left afterwards."""

    def run(use: Use[T], *, ranks: int = 2, limit_s: float = 60.0, collectives: bool = False) -> T:
        async def main() -> T:
            runtime = RayCluster([ResourcePool("pool", ranks)], tmp_path, limit_s=limit_s)
            group = runtime.group("policy", "pool", FACTORY, collectives=collectives)
            async with runtime:
                pids = await group.call_each(Worker.pid)
                result = await use(group)
            assert gone_within(pids, 5)
            return result

        return asyncio.run(main())

    return run


def test_a_worker_that_is_killed_in_a_call_is_named_with_its_last_words_and_its_peers_end(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        pids = await group.call_each(Worker.pid)
        children = await group.call_each(Worker.child)
        assert all(map(alive, children))
        began = time.monotonic()
        with pytest.raises(WorkerError) as error:
            await group.call(Worker.die, 1, signal.SIGKILL)
        assert time.monotonic() - began < 10
        text = str(error.value)
        assert f"policy.die: rank 1 (process {pids[1]} on {os.uname().nodename}) died (Ray: Worker unexpectedly exits" in text
        assert "its peers were ended" in text
        assert "pool-1.log:\n  my last word" in text
        assert group._pool.death.startswith(f"rank 1 (process {pids[1]} on {os.uname().nodename}) of pool pool died (Ray: Worker")
        assert group._pool.death.endswith("pool-1.log:\n  my last word")
        assert gone_within([*pids, *children], 5)
        with pytest.raises(WorkerError, match=r"policy\.pid cannot be called: rank 1 .*died"):
            await group.call(Worker.pid)

    run(use)


def test_collectives_meet_and_a_death_in_one_is_the_error_and_not_what_its_peers_say_of_it(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        assert await group.call_each(Worker.add) == [1.0, 1.0]
        assert await group.call_each(Worker.add_in_a_new_group) == [1.0, 1.0]
        sums = await asyncio.gather(group.call_each(Worker.add_later, 1.0, 0), group.call_each(Worker.add_later, 10.0, 1))
        assert sums == [[2.0, 2.0], [20.0, 20.0]]
        pids = await group.call_each(Worker.pid)
        adding = asyncio.ensure_future(group.call(Worker.sleep_and_add, 1))
        await asyncio.sleep(0.3)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"rank 1 \(process {pids[1]} .*died"):
            await asyncio.wait_for(adding, 10)

    run(use, collectives=True)


def test_calls_that_are_under_way_together_meet_in_one_order_on_all_ranks(run: Callable[..., None]) -> None:
    """Small arguments arrive before large ones that were sent earlier, and not on every rank alike."""

    async def use(group: PoolGroup) -> None:
        sent = [torch.full((1 << 20 if number % 3 else 2,), float(number)) for number in range(30)]
        found = await asyncio.wait_for(asyncio.gather(*(group.call(Worker.add_first, values) for values in sent)), 60)
        assert found == [2.0 * number for number in range(30)]

    run(use, collectives=True)


def test_a_call_without_progress_shows_where_each_rank_stands(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        await group.call(Worker.sleep_by_rank, 0.7)  # longer in all than the limit, but always moving
        with pytest.raises(StalledError) as error:
            await group.call(Worker.sleep, 60.0, 1)
        text = str(error.value)
        assert text.startswith("policy.sleep: nothing moved for 1 s; 1 of 3 ranks have not answered")
        assert "rank 1 (process" in text
        assert "rank 0 (process" not in text
        assert "time.sleep(seconds)" in text
        with pytest.raises(WorkerError, match=r"policy\.sleep stalled"):
            await group.call(Worker.pid)

    run(use, ranks=3, limit_s=1.0)


@pytest.mark.parametrize(("method", "shows"), [(Worker.stop, "stopped"), (Worker.keep_the_interpreter, "keep_the_interpreter")])
def test_a_worker_that_cannot_answer_is_no_hang(run: Callable[..., None], method: Callable[..., None], shows: str) -> None:
    async def use(group: PoolGroup) -> None:
        with pytest.raises(StalledError, match=rf"does not say where it stands(?s:.*){shows}"):
            await group.call(method)

    run(use, ranks=1, limit_s=2.0)


def test_what_a_worker_raises_arrives_as_its_own_and_frees_the_peers_that_wait(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.runtime.pool._PEERS_LIMIT_S", 0.3)

    async def use(group: PoolGroup) -> None:
        with pytest.raises(WorkerError, match=r"raised .*LocalError: no class of yours(?s:.*)in local_error"):
            await group.call(Worker.local_error)
        with pytest.raises(WorkerError, match="cannot be sent"):
            await group.call(Worker.echo, lambda: None)
        with pytest.raises(WorkerError, match="cannot be sent"):
            await group.call(Worker.lambda_back)
        assert await group.call_each(Worker.echo, 3) == [3, 3]
        with pytest.raises(ValueError, match="rank 0 cannot") as error:
            await group.call(Worker.fail_before_adding, 0)
        assert type(error.value) is ValueError
        assert "fail_before_adding" in error.value.__notes__[0]
        with pytest.raises(WorkerError, match="failed on a rank for which others waited: rank 0 cannot"):
            await group.call(Worker.pid)

    run(use, collectives=True)


def test_a_worker_that_exits_is_dead(run: Callable[..., None]) -> None:
    async def use(group: PoolGroup) -> None:
        with pytest.raises(WorkerError, match=r"rank 0 .* died"):
            await group.call(Worker.exit, 3)

    run(use, ranks=1)


def test_tensors_arrive_as_they_were_are_stored_once_and_are_read_where_they_lie(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[int] = []
    put = ray.put

    def counted(value: objects.Packed) -> objects.Ref:
        puts.append(sum(piece.nbytes for piece in value[1]))
        return put(value)

    monkeypatch.setattr(ray, "put", counted)

    async def use(group: PoolGroup) -> None:
        sent = [
            torch.randn(3, 4000).t(),
            torch.randn(3000).bfloat16(),
            torch.rand(9000) > 0.5,
            torch.zeros(0, 7),
            torch.tensor(2.5),
            torch.arange(200_000),
        ]
        first, second = await group.call_each(Worker.echo, sent)
        assert puts == [sum(tensor.nbytes for tensor in sent if tensor.nbytes > 4096)]
        for number in range(5):
            other = await group.call(Worker.echo, torch.full((200_000,), number))
            assert other.unique().tolist() == [number]
        for results in (first, second):
            for before, after in zip(sent, results, strict=True):
                assert (after.dtype, after.shape) == (before.dtype, before.shape)
                assert torch.equal(before, after)
        assert in_shared_memory(first[-1])

    run(use)


def in_shared_memory(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return "plasma" in line or "/dev/shm" in line
    return False


def test_roles_of_one_pool_share_its_actors_and_a_factory_that_fails_is_the_callers(tmp_path: Path) -> None:
    async def main() -> None:
        pools = [ResourcePool("pool", 2), ResourcePool("other", 1)]
        runtime = RayCluster(pools, tmp_path)
        policy = runtime.group("policy", "pool", FACTORY)
        critic = runtime.group("critic", "pool", "tests/runtime/workers.py:Worker", replicas=2)
        with pytest.raises(RunError, match=r"no pool 'third'.*there are pool, other"):
            runtime.group("third", "third", FACTORY)
        async with runtime:
            assert await policy.call_each(Worker.pid) == await critic.call_each(Worker.pid)
            seats = table(runtime.seats, {"policy": "pool", "critic": "pool"}).splitlines()
            node = os.uname().nodename
            assert [line.split() for line in seats] == [
                ["pool", "rank", "node", "cores", "devices", "roles"],
                ["pool", "0", node, "1", "-", "policy,", "critic"],
                ["pool", "1", node, "1", "-", "policy,", "critic"],
                ["other", "0", node, "1", "-", "-"],
            ]
        wrong = RayCluster([ResourcePool("pool", 1)], tmp_path)
        wrong.group("policy", "pool", "tests.runtime.workers:Wroker")
        with pytest.raises(RegistryError, match="Wroker"):
            await wrong.__aenter__()
        with pytest.raises(RunError, match="started before"):
            await wrong.__aenter__()

    asyncio.run(main())


def test_what_the_cluster_does_not_have_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*pools: ResourcePool) -> str:
        with pytest.raises(DeviceError) as error:
            async with RayCluster(pools, tmp_path / "none"):
                raise AssertionError("it is not entered")
        return str(error.value)

    async def main() -> None:
        text = await refused(ResourcePool("trainer", 4, cores=2), ResourcePool("critic", 2))
        node = os.uname().nodename
        assert text.startswith(f"10 cores are asked for and the cluster ({node} ")
        assert "8) has 8: trainer 8 (4 x 2), critic 2 (2 x 1)" in text
        assert "2 accelerators are asked for" in await refused(ResourcePool("trainer", 1, devices=2))
        async with RayCluster([ResourcePool("first", 1, cores=7)], tmp_path):
            monkeypatch.setattr("tandem.runtime.ray._PLACE_LIMIT_S", 0.5)
            text = await refused(ResourcePool("trainer", 2))
        assert "trainer 2 x (1 cores, 0 devices)" in text
        assert re.search(r"[01] CPU, .* are free", text), text  # Ray counts what the last ones had a moment longer
        assert not (tmp_path / "none").exists()

    asyncio.run(main())


def test_a_spare_pool_that_dies_is_started_again_in_its_place(tmp_path: Path) -> None:
    """Whoever listens hears of the new actor, too."""

    async def main() -> None:
        pools, heard = [ResourcePool(name, 1) for name in ("spare-0", "spare-1")], list[Any]()
        runtime = RayCluster(pools, tmp_path, limit_s=60, spare=["spare-0", "spare-1"])
        first, second = (runtime.group(pool.name, pool.name, FACTORY) for pool in pools)
        runtime.listen(heard.append)
        async with runtime:
            before = await first.call(Worker.pid)
            await die(first)
            await second.call(Worker.pid)
            assert await returned(runtime) == ["spare-0"]
            assert await first.call(Worker.pid) != before
            assert len(heard) == 3
            assert [seat.pool for seat in runtime.seats] == ["spare-0", "spare-1"]
            await die(second)
            assert not runtime.death
            pids = [await first.call(Worker.pid)]
        assert gone_within(pids, 5)

    asyncio.run(main())


def test_a_node_that_leaves_is_named_and_what_remains_is_too_small(tmp_path: Path) -> None:
    """A rank of 9 cores has room on the second node only."""
    node: Any = cluster().add_node(num_cpus=9)

    async def main() -> None:
        pools = [ResourcePool("large", 1, cores=9)]
        runtime = RayCluster(pools, tmp_path)
        group = runtime.group("policy", "large", FACTORY)
        async with runtime:
            calling = asyncio.ensure_future(group.call(Worker.sleep, 60.0))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(cluster().remove_node, node)
            with pytest.raises(WorkerError, match=r"policy\.sleep: rank 0 \(process \d+ on .*died"):
                await asyncio.wait_for(calling, 30)
        with pytest.raises(DeviceError, match=r"9 cores are asked for .* has 8: large 9 \(1 x 9\)"):
            async with RayCluster(pools, tmp_path):
                raise AssertionError("it is not entered")

    asyncio.run(main())


@pytest.mark.parametrize("where", [near, far])
def test_workers_fetch_their_rows_by_handle_and_nothing_is_given_to_one_that_is_gone(
    tmp_path: Path, where: Callable[[RayQueueServer], RayQueueClient]
) -> None:
    lengths = [30_000, 50_000, 20_000, 60_000]
    x = frozenset({"x"})

    async def fill(queue: MemoryQueue, first: int) -> DataProto:
        keys = [Key("train", first + i) for i in range(len(lengths))]
        rows = DataProto.make(keys, lengths, token={"x": torch.rand(sum(lengths))})
        for key in rows.keys:
            await queue.reserve(key.group, 1)
        await queue.put(rows)
        return rows

    async def main() -> None:
        queue = MemoryQueue(QueueConfig(stall_limit_s=20), join=shared)
        runtime = RayCluster([ResourcePool("pool", 2)], tmp_path)
        server = RayQueueServer(queue, runtime)
        group = runtime.group("policy", "pool", FACTORY, where(server))
        async with server, runtime:
            rows = await fill(queue, 0)
            lease = await queue.take(Consumer("learner"), x, len(lengths))
            assert (await group.call(Worker.score, lease.ref))["rows"].value == len(lengths)
            taking = asyncio.ensure_future(group.call(Worker.take, "x"))
            await asyncio.sleep(0.3)
            os.kill(await group.call(Worker.pid), signal.SIGKILL)
            with pytest.raises(WorkerError, match="died"):
                await taking
            await fill(queue, len(lengths))
            await asyncio.sleep(0.3)  # whoever still waits is served first
            assert (await queue.take(Consumer("learner"), x, 1)).ref.keys == (Key("train", 4),)
        written = await queue.get(lease.ref.keys, frozenset({"y"}))  # also when the workers are gone
        assert torch.equal(written["y"], rows["x"] * 2)
        with pytest.raises(WorkerError, match="for the runtime's workers"):
            await server.client().reserve(GroupKey("train", 9), 1)

    asyncio.run(main())


@pytest.mark.parametrize("where", [near, far])
def test_a_queue_that_was_closed_and_only_the_ports_methods_are_served(
    tmp_path: Path, where: Callable[[RayQueueServer], RayQueueClient]
) -> None:
    async def main() -> None:
        queue, runtime = MemoryQueue(), RayCluster([ResourcePool("pool", 1)], tmp_path)
        group = runtime.group("policy", "pool", FACTORY)
        async with runtime:
            async with RayQueueServer(queue, runtime) as server:
                client = where(server)
                await group.call(Worker.through, client, "reserve", (GroupKey("train", 0), 1), {})
                with pytest.raises(RunError, match="no method '_ledger'"):
                    await group.call(Worker.through, client, "_call", ("_ledger",), {})
                waiting = asyncio.ensure_future(
                    group.call(Worker.through, client, "take", (Consumer("c"), frozenset({"x"}), 1), {})
                )
                await asyncio.sleep(0.3)
            with pytest.raises(WorkerError, match="not served any more"):
                await waiting
            for method in ("commit", "metrics"):
                with pytest.raises(WorkerError, match="not served any more"):
                    await group.call(Worker.through, client, method, ("s",) * (method == "commit"), {})

    asyncio.run(main())


SCRIPT = """
import asyncio, sys
from pathlib import Path
import ray
from tandem.runtime.placement import ResourcePool
from tandem.runtime.ray import RayCluster, connected
from tests.runtime.workers import Worker

async def main():
    address = sys.argv[2]
    runtime = RayCluster([ResourcePool("pool", 1)], Path(sys.argv[1]), address=address)
    group = runtime.group("policy", "pool", "tests.runtime.workers:Worker")
    async with runtime:
        print(await group.call(Worker.pid), int(ray.cluster_resources()["CPU"]), flush=True)
        if sys.argv[3] == "hang":
            await group.call(Worker.keep_the_interpreter)
    assert not ray.is_initialized()

asyncio.run(main())
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-W", "error", "-c", SCRIPT, *map(str, arguments)]


def test_a_ray_that_is_there_is_joined_and_left_running_and_nothing_is_said(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, cluster().address, "close"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pid, cores = map(int, done.stdout.split())
    assert cores == 8
    assert gone_within([pid], 5)
    assert cluster().head_node.any_processes_alive()


@pytest.mark.slow
def test_a_ray_of_its_own_and_its_workers_end_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, "local", "hang"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, _ = map(int, process.stdout.readline().split())
        time.sleep(0.5)
        assert alive(pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert gone_within([pid], 10)


def test_a_cluster_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "nonsense", "close"), capture_output=True, text=True, check=False)
    assert "WorkerError: the Ray cluster at nonsense cannot be joined or started" in done.stderr


def test_a_missing_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("tandem.runtime.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    extras: dict[str, list[str]] = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [f"{requirement}; extra == '{extra}'" for extra, requirements in extras.items() for requirement in requirements]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    with pytest.raises(RegistryError, match=r"needs the package 'ray'.*pip install 'tandem-rl\[ray\]'"):
        resolve("ray", {"ray": "tandem.runtime.ray:RayCluster"}, kind="runtime")
