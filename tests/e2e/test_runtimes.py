"""A recipe means the same in this process and in processes of their own: one rank bit for bit, two within rounding.

A worker that dies ends a run that is not to go on by itself (tests/faults) with an error that names it, and the resumed run ends as
if nothing had happened.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.publisher import Publisher
from tandem.models.hf import load_value_model
from tandem.rollout.remote import RemoteEngine
from tandem.runtime.process import _ProcessPool
from tandem.text.tokenizer import load_tokenizer
from tandem.types import Metrics, PolicyRef
from tests.e2e.runs import REWARD, assert_same, forked, outcome, read_lines, started, tandem, write_recipe
from tests.runtime.ray_cluster import cluster

PPO = ("algorithm=ppo", "algorithm.reward_kl_coef=0.1", "critic.train.lr=0.003", "critic.warmup_steps=1")
GRPO = ("algorithm=grpo",)
PROCESS = "runtime=process"


def trained(
    directory: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """What the tiny recipe comes to; how many bytes a publish moves, and which engine samples, is the runtime's own affair."""
    log = directory.with_suffix(".log")
    directory.parent.mkdir(parents=True, exist_ok=True)
    command = ["train", str(write_recipe(directory.parent)), f"run.dir={directory}", *arguments]
    assert forked(command, log, environment=environment, before=before) == 0, log.read_text()
    found = outcome(directory)
    for line in (*found["metrics"], *found["warmup"]):
        for name in ("publish/bytes", "rollout/moved_requests"):
            line.pop(name, None)
    return found


@pytest.fixture(scope="module", name="inline")
def _inline(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, Any]]:
    directory = tmp_path_factory.mktemp("inline")
    return {arguments: trained(directory / arguments[0] / "run", *arguments) for arguments in (GRPO, PPO)}


@pytest.mark.parametrize(
    ("arguments", "pools"),
    [(GRPO, "{trainer: 1}"), (PPO, "{trainer: 1, critic: 1}")],
    ids=["one role", "three roles in two pools"],
)
def test_one_rank_elsewhere_is_one_rank_here_bit_for_bit(
    arguments: tuple[str, ...], pools: str, inline: dict[tuple[str, ...], Any], tmp_path: Path
) -> None:
    assert_same(trained(tmp_path / "run", *arguments, PROCESS, f"runtime.pools={pools}"), inline[arguments])


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["process", pytest.param("ray", marks=pytest.mark.ray)])
def test_several_engines_sample_what_one_does(runtime: str, inline: dict[tuple[str, ...], Any], tmp_path: Path) -> None:
    there = {"RAY_ADDRESS": cluster().address} if runtime == "ray" else {}
    engines = ("rollout.engines=2", f"runtime={runtime}", "runtime.pools={trainer: 1}")
    assert_same(trained(tmp_path / "run", *GRPO, *engines, environment=there), inline[GRPO])
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    for name in ("rollout/moved_requests", "publish/left_out", "publish/came_back"):
        assert sum(line.get(name, 0) for line in lines) == 0


SAMPLED_AGAIN = "the second engine has sampled again"


def killed_while_it_samples() -> None:
    """The second engine, once. A publish waits for the process that is started in its place; when that samples it is printed."""
    tell, begin_again, publish = RemoteEngine._tell, RemoteEngine.begin_again, Publisher.publish
    killed, renewed = set[RemoteEngine](), set[RemoteEngine]()

    def told(self: RemoteEngine) -> None:
        tell(self)
        if self in renewed and self._num_heard:
            renewed.remove(self)
            print(SAMPLED_AGAIN)
        group: Any = self._group
        if not killed and group._role == "rollout-1" and self._live:
            killed.add(self)
            (member,) = group._pool._members
            os.kill(member.pid if isinstance(group._pool, _ProcessPool) else member.place.pid, signal.SIGKILL)

    def begun_again(self: RemoteEngine) -> None:
        begin_again(self)
        renewed.add(self)

    async def patient(self: Publisher, policy: PolicyRef) -> Metrics:
        starting = [task for task in asyncio.all_tasks() if task.get_name().startswith("start pool")]
        if starting:
            await asyncio.wait(starting)
        return await publish(self, policy)

    RemoteEngine._tell, RemoteEngine.begin_again, Publisher.publish = told, begun_again, patient  # type: ignore[method-assign]


@pytest.mark.parametrize("runtime", ["process", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.ray])])
def test_an_engine_that_dies_is_sampled_from_again_and_nobody_can_see_it(
    runtime: str, inline: dict[tuple[str, ...], Any], tmp_path: Path
) -> None:
    """Bit for bit; the run neither ends nor begins again."""
    run = tmp_path / "run"
    there = {"RAY_ADDRESS": cluster().address} if runtime == "ray" else {}
    engines = ("rollout.engines=2", f"runtime={runtime}", "runtime.pools={trainer: 1}")
    assert_same(trained(run, *GRPO, *engines, environment=there, before=killed_while_it_samples), inline[GRPO])
    lines = read_lines(run / "metrics.jsonl")
    assert sum(line.get("rollout/moved_requests", 0) for line in lines) > 0
    assert sum(line.get("publish/came_back", 0) for line in lines) == 1
    assert sum(line.get("publish/left_out", 0) for line in lines) == 0
    assert not any("run/restarts" in line for line in lines)
    said = " ".join(run.with_suffix(".log").read_text().split())
    assert "the run goes on without pool rollout-1 while it is started again (try 1 of 3): rank 0 (process" in said
    assert "pool rollout-1 is there again, with a new process" in said
    assert SAMPLED_AGAIN in said


@pytest.mark.slow
@pytest.mark.ray
def test_a_rank_in_a_ray_actor_is_one_rank_here_bit_for_bit(inline: dict[tuple[str, ...], Any], tmp_path: Path) -> None:
    found = trained(
        tmp_path / "run",
        *PPO,
        "runtime=ray",
        "runtime.pools={trainer: 1, critic: 1}",
        environment={"RAY_ADDRESS": cluster().address},
    )
    assert (tmp_path / "run" / "logs" / "critic-0.log").exists()
    assert_same(found, inline[PPO])


@pytest.mark.slow
@pytest.mark.ray
def test_rows_that_are_spread_over_a_cluster_train_as_rows_here_bit_for_bit(
    inline: dict[tuple[str, ...], Any], tmp_path: Path
) -> None:
    """Two steps, whose snapshot a run with the rows here goes on from, and one more with them there again."""
    pytest.importorskip("transfer_queue")
    run, there = tmp_path / "run", {"RAY_ADDRESS": cluster().address}
    apart = (*PPO, "runtime=ray", "runtime.pools={trainer: 1, critic: 1}", "queue=ray")
    trained(run, *apart, "trainer.steps=2", environment=there)
    trained(run, *PPO, "trainer.steps=3", "runtime=inline", "--resume")
    found = trained(run, *apart, "trainer.steps=4", "--resume", environment=there)
    assert_same(found, {name: inline[PPO][name] for name in ("weights", "files", "samples", "warmup")})  # it evaluates more often


def test_rows_are_spread_over_a_cluster_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", PROCESS, "queue=ray"]
    assert tandem(*arguments) == 2
    assert "queue.name=ray keeps rows on the nodes of a Ray cluster, and with runtime=process there is none" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.ray
def test_a_cluster_that_is_too_small_for_a_recipe_is_said_with_who_asks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["train", str(write_recipe(tmp_path)), f"run.dir={tmp_path / 'run'}", "runtime=ray", "runtime.pools.trainer=9"]
    assert forked(command, log, environment={"RAY_ADDRESS": cluster().address}) == 2
    said = " ".join(log.read_text().split())
    assert "9 cores are asked for and the cluster (" in said
    assert "has 8: trainer 9 (9 x 1)" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("runtime", ["process", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.ray])])
def test_two_ranks_train_as_one_and_generate_exactly(runtime: str, inline: dict[tuple[str, ...], Any], tmp_path: Path) -> None:
    """Three roles share two processes; sums over ranks are in another order, and so agree within rounding."""
    there = {"RAY_ADDRESS": cluster().address} if runtime == "ray" else {}
    found = trained(tmp_path / "run", *PPO, f"runtime={runtime}", environment=there)
    wanted = inline[PPO]
    assert [line["key"] for line in found["samples"]] == [line["key"] for line in wanted["samples"]]
    for line, other in zip(found["metrics"], wanted["metrics"], strict=True):
        assert line.keys() == other.keys()
        assert line.get("mismatch/max", 0) == 0, "the sampler's logprobs are those of the sharded trainer, bit for bit"
    for name in ("reward/mean", "train/loss", "critic/loss", "train/grad_norm", "train/tokens"):
        here, there = ([line[name] for line in lines if name in line] for lines in (found["metrics"], wanted["metrics"]))
        assert here
        assert here == pytest.approx(there, rel=1e-3, abs=1e-6), name


def test_a_run_goes_on_with_another_number_of_ranks(inline: dict[tuple[str, ...], Any], tmp_path: Path) -> None:
    """1 rank here, then 2 elsewhere, then 1 here again: it ends where a run without interruption does."""
    run = tmp_path / "run"
    trained(run, *PPO, "trainer.steps=2")
    trained(run, *PPO, "trainer.steps=3", PROCESS, "--resume")
    found = trained(run, *PPO, "trainer.steps=4", "runtime=inline", "--resume")
    wanted = inline[PPO]
    assert [line["key"] for line in found["samples"]] == [line["key"] for line in wanted["samples"]]
    assert found["metrics"][-1]["step"] == 4


@pytest.fixture(scope="module", name="sharded")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run on two ranks, and what it came to."""
    run = tmp_path_factory.mktemp("sharded") / "run"
    return run, trained(run, *PPO, PROCESS)


@pytest.fixture(name="straight")
def _straight(sharded: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return sharded[1]


def test_a_snapshot_of_two_ranks_is_exported_whole(sharded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run = sharded[0]
    assert tandem("export", str(run), str(tmp_path / "policy")) == 0
    assert [path.read_bytes() for path in sorted((tmp_path / "policy").iterdir())] == sharded[1]["files"]
    assert tandem("export", str(run), str(tmp_path / "critic"), "--role", "critic", "--step", "3") == 0
    critic = load_value_model(tmp_path / "critic")
    assert critic.score.weight.abs().sum() > 0
    assert load_tokenizer(tmp_path / "critic").vocabulary == load_tokenizer(run / "final").vocabulary


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--role", "reference"], "holds no model of role 'reference'; it holds critic, policy"),
        (["--step", "1"], "does not hold step 1; its steps are 4, 3"),
        (["--step", "3", "--best"], "--step and --best name two snapshots"),
    ],
)
def test_what_cannot_be_exported(
    arguments: Sequence[str],
    complaint: str,
    sharded: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tandem("export", str(sharded[0]), str(tmp_path / "to"), *arguments) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "to").exists()


def test_export_needs_a_run_and_room(
    sharded: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for run, to, complaint in (
        (tmp_path / "nothing", tmp_path / "to", "there is no run"),
        (sharded[0], tmp_path, "not an empty directory"),
        (sharded[0], tmp_path / "file", "not an empty directory"),
    ):
        assert tandem("export", str(run), str(to)) == 2
        assert complaint in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("runtime", "end"),
    [
        ("process", "was killed by SIGKILL, and its peers were ended"),
        pytest.param("ray", "died (Ray: ", marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
def test_one_rank_that_is_killed_is_named_within_seconds_and_nothing_is_lost(
    runtime: str, end: str, straight: dict[str, Any], tmp_path: Path
) -> None:
    """In the middle of whatever it does, where a death ends the run. What two ranks compute has the same bits wherever they are."""
    run, log = tmp_path / "run", tmp_path / "log"
    there = {"RAY_ADDRESS": cluster().address} if runtime == "ray" else {}
    arguments = [*PPO, f"runtime={runtime}", "trainer.restarts=0"]
    killed: list[float] = []

    def kill() -> None:
        until = time.monotonic() + 200
        while not (run / "snapshots" / "step-00000002").is_dir() and time.monotonic() < until:
            time.sleep(0.005)
        (victim,) = holders(run / "logs" / "trainer-1.log")
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    code = forked(["train", str(write_recipe(tmp_path)), f"run.dir={run}", *arguments], log, environment=there)
    ended = time.monotonic()
    killer.join()
    assert code == 1, log.read_text()
    assert ended - killed[0] < 10
    said = " ".join(log.read_text().split())
    assert "rank 1 (process" in said
    assert end in said
    assert f"go on with: tandem train {tmp_path / 'tiny.yaml'} run.dir={run}" in said
    assert not holders(run / "logs" / "trainer-0.log")
    assert_same(trained(run, *arguments, "--resume", environment=there), straight)


ENDLESS = REWARD.replace(
    "def digits(task, group):",
    """
import time
def digits(task, group):
    key = group[0].key
    if key.space == "train" and key.ordinal == 3:
        open(f"{__file__}.begun", "w").close()
        time.sleep(200)""",
)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_a_batch_is_sampled_is_no_longer_waited_for(tmp_path: Path) -> None:
    run, log, begun = tmp_path / "run", tmp_path / "log", tmp_path / "reward.py.begun"
    recipe = str(write_recipe(tmp_path, reward=ENDLESS))
    process = started(["train", recipe, f"run.dir={run}", PROCESS, "trainer.restarts=0", "reward.limit_s=300"], log, {})
    until = time.monotonic() + 200
    while not begun.exists() and time.monotonic() < until:
        time.sleep(0.01)
    (victim,) = holders(run / "logs" / "trainer-0.log")
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    process.join(100)
    assert process.exitcode == 1, log.read_text()
    assert time.monotonic() - killed < 10
    said = " ".join(log.read_text().split())
    assert f"error: rank 0 (process {victim}" in said
    assert "of pool trainer was killed by SIGKILL" in said


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_would_go_on_where_its_cluster_has_no_room_any_more_says_what_is_there(tmp_path: Path) -> None:
    """A rank of 9 cores has room on the second node only, which leaves; the run can be gone on with elsewhere."""
    run, log = tmp_path / "run", tmp_path / "log"
    node: Any = cluster().add_node(num_cpus=9)
    command = ["train", str(write_recipe(tmp_path)), f"run.dir={run}"]
    arguments = ["runtime=ray", "runtime.pools={trainer: 1}", "runtime.cores=9", "trainer.steps=1000"]
    process = started([*command, *arguments], log, {"RAY_ADDRESS": cluster().address})
    until = time.monotonic() + 200
    while not (run / "snapshots" / "step-00000002").is_dir() and time.monotonic() < until:
        time.sleep(0.01)
    cluster().remove_node(node)
    process.join(100)
    assert process.exitcode == 2, log.read_text()
    said = " ".join(log.read_text().split())
    assert "train goes on by itself from step" in said
    assert "(restart 1): rank 0 (process" in said
    assert "error: 9 cores are asked for and the cluster (" in said
    assert "has 8: trainer 9 (1 x 9)" in said
    assert "Traceback" not in said
    assert forked([*command, "trainer.steps=4", "--resume"], log) == 0, log.read_text()


def holders(log: Path) -> list[int]:
    """The processes whose standard output is this file."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if Path(os.readlink(entry / "fd" / "1")) == log:
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is another user's
    return found


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["runtime.pools.trainer=4096"], "4096 cores are asked for"),
        (["runtime.pools={trainer: 1, critic: 1}"], "runtime.pools.critic has no role to hold"),
        (["runtime.pools={critic: 1}"], "no place for role 'policy'"),
        (["runtime.pools={trainer: 2}", "runtime.replicas=3"], "replicas=3 does not divide the 2 processes"),
        (["runtime.pools={trainer: 0}"], "must be at least 1"),
        (["runtime=inline", "runtime.pools={trainer: 2}"], "runtime.pools={'trainer': 2}, and with runtime=inline all is in this"),
        (["runtime=inline", "runtime.replicas=2"], "runtime.replicas=2, and with runtime=inline all is in this process"),
        (["runtime.replicas=0"], "replicas must be at least 1, got 0"),
        (["runtime.limit_s=.inf"], "at most 3.1536e+07 (a year), got inf"),
        (["rollout.engines=0"], "engines must be at least 1, got 0"),
        (["rollout.engines=2", "runtime=inline"], "rollout.engines=2 with runtime=inline: engines in one process would take turns"),
        (["rollout.engines=4096"], "4096 cores are asked for"),
        (
            ["rollout.engines=2", "runtime.pools={trainer: 1, rollout-1: 1}"],
            "runtime.pools.rollout-1 is the name of a rollout engine",
        ),
        (["queue.max_groups=1"], "queue.max_groups=1 is below the 2 groups"),
        (["runtime=slurm"], "slurm"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_placed_is_said_before_anything_starts(
    arguments: Sequence[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert tandem("train", str(write_recipe(tmp_path)), f"run.dir={run}", "runtime=process", *arguments) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert not run.exists()


def test_a_dry_run_says_who_goes_where_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(tmp_path))
    pools = "runtime.pools={trainer: 1, critic: 1}"
    assert tandem("train", recipe, f"run.dir={tmp_path / 'run'}", *PPO, PROCESS, pools, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "place    trainer  0     1      -        reference, policy" in shown
    assert "place    critic   0     1      -        critic" in shown
    assert not (tmp_path / "run").exists()
