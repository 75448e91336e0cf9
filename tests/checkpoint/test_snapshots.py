from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from tandem import durable
from tandem.checkpoint import manifest, snapshots
from tandem.checkpoint.snapshots import Part, Rest, Snapshot, SnapshotConfig, SnapshotStore
from tandem.errors import EngineError, SnapshotError
from tandem.types import Json

HERE = {"torch": "2.13.0", "threads": "2"}


def open_store(path: Path, *, keep_last: int = 2, keep_best: bool = True, fingerprint: dict[str, str] = HERE) -> SnapshotStore:
    return SnapshotStore(path, SnapshotConfig(keep_last, keep_best), fingerprint)


def parts(step: int) -> dict[str, Part]:
    async def queue(path: Path) -> None:
        await asyncio.sleep(0)
        (path / "rows.json").write_text(f"[{step}]")

    async def train(path: Path) -> None:
        (path / "model").mkdir()
        (path / "model" / "weights.bin").write_bytes(bytes([step % 256]) * 3_000_000)
        (path / "empty").touch()

    return {"train": train, "queue": queue}


def whole(store: SnapshotStore, step: int, parts: dict[str, Part], state: dict[str, Json], *, score: float | None = None) -> None:
    async def begin_and_finish() -> None:
        await (await store.begin(step, parts, state, score=score))()

    asyncio.run(begin_and_finish())


def write(store: SnapshotStore, *steps: int, score: float | None = None) -> None:
    for step in steps:
        state: dict[str, Json] = {"step": step, "offset": 2**60, "lr": 0.1, "name": "ü\ud800"}
        whole(store, step, parts(step), state, score=score)


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def latest(store: SnapshotStore) -> Snapshot:
    snapshot = store.latest()
    assert snapshot is not None
    return snapshot


def is_whole(snapshot: Snapshot, step: int) -> bool:
    return (
        snapshot.step == snapshot.state["step"] == step
        and snapshot.part("train").joinpath("model", "weights.bin").read_bytes() == bytes([step % 256]) * 3_000_000
        and snapshot.part("queue").joinpath("rows.json").read_text() == f"[{step}]"
    )


def test_round_trip(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run" / "snapshots")
    assert store.latest() is None
    assert store.best() is None
    write(store, 20, score=0.5)
    snapshot = latest(open_store(tmp_path / "run" / "snapshots"))
    assert snapshot.path.name == "step-00000020"
    assert is_whole(snapshot, 20)
    assert snapshot.state == {"step": 20, "offset": 2**60, "lr": 0.1, "name": "ü\ud800"}
    assert (snapshot.score, snapshot.warnings) == (0.5, ())
    with pytest.raises(SnapshotError, match="has no part 'critic'"):
        snapshot.part("critic")


# ------------------------------------------------------------------------------------------------------- killed

WRITER = """
import sys
from pathlib import Path
from tandem.faults import crash_point
from tests.checkpoint.test_snapshots import open_store, parts, whole, write

store = open_store(Path(sys.argv[1]), keep_last=1)
write(store, 1, 2)

async def half(path):
    with (path / "weights.bin").open("wb") as file:
        file.write(b"half of it")
        file.flush()
        crash_point("in_the_part")

whole(store, 3, {**parts(3), "half": half}, {"step": 3})
"""


@pytest.mark.parametrize(
    ("point", "survivor"),
    [
        ("snapshot.begin:1", None),
        ("snapshot.part.train:1", None),
        ("snapshot.before_rename:1", None),
        ("snapshot.after_rename:1", 1),
        ("snapshot.begin:3", 2),
        ("snapshot.part.queue:3", 2),
        ("snapshot.part.half", 2),
        ("in_the_part", 2),
        ("snapshot.copied:1", None),
        ("snapshot.copied:3", 2),
        ("snapshot.after_parts:3", 2),
        ("snapshot.manifest:3", 2),
        ("snapshot.before_rename:3", 2),
        ("snapshot.after_rename:3", 3),
        ("snapshot.retention:1", 2),
        ("snapshot.retention:2", 3),
    ],
)
def test_killed_while_writing(tmp_path: Path, point: str, survivor: int | None) -> None:
    environment = {**os.environ, "TANDEM_CRASH_AT": point, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    left = names(tmp_path)
    store = open_store(tmp_path, keep_last=1)
    assert not [name for name in names(tmp_path) if "partial" in name], left
    if survivor is None:
        assert store.latest() is None
    else:
        assert is_whole(latest(store), survivor)
        assert latest(store).warnings == ()
    write(store, 4)
    assert is_whole(latest(store), 4)
    assert names(tmp_path) == ["step-00000004"]


def test_the_store_needs_no_torch() -> None:
    code = "import sys, tandem.checkpoint.snapshots; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_leftovers_of_living_processes_are_not_touched(tmp_path: Path) -> None:
    alive, ours = tmp_path / f"step-00000001.partial-{os.getppid()}", tmp_path / f"step-00000001.partial-{os.getpid()}"
    (tmp_path / "notes").mkdir()
    alive.mkdir()
    ours.mkdir()  # of a dead process that had our number
    open_store(tmp_path)
    assert names(tmp_path) == ["notes", alive.name]


# ----------------------------------------------------------------------------------------- while the run goes on


def copied(step: int, allowed: asyncio.Event, problem: Exception | None = None) -> Part:
    """A part that is written when it is allowed to be, or fails then."""

    async def part(path: Path) -> Rest:
        async def rest() -> None:
            await allowed.wait()
            if problem is not None:
                raise problem
            (path / "weights.bin").write_bytes(bytes([step]))

        return rest

    return part


def test_one_that_is_being_written_does_not_count_yet(tmp_path: Path) -> None:
    store, allowed = open_store(tmp_path, keep_last=1), asyncio.Event()
    write(store, 1)
    offsets: list[Json] = [7]
    some = {**parts(2), "more": copied(2, allowed)}

    async def scenario() -> None:
        finish = asyncio.ensure_future((await store.begin(2, some, {"step": 2, "at": offsets}))())
        offsets.append(8)  # the run goes on
        for _ in range(5):
            await asyncio.sleep(0)
            assert latest(store).step == 1
        assert store.written_bytes() >= 3_000_000
        allowed.set()
        await finish

    asyncio.run(scenario())
    assert is_whole(latest(store), 2)
    assert latest(store).state["at"] == [7]
    assert latest(store).part("more").joinpath("weights.bin").read_bytes() == b"\2"
    assert names(tmp_path) == ["step-00000002"]
    assert store.written_bytes() == 0


def test_making_it_durable_leaves_the_loop_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, allowed, seal = open_store(tmp_path), threading.Event(), manifest.seal

    def slow(directory: Path) -> dict[str, tuple[int, str]]:
        assert allowed.wait(60)
        return seal(directory)

    async def scenario() -> None:
        finish = asyncio.ensure_future((await store.begin(1, parts(1), {"step": 1}))())
        await asyncio.sleep(0.05)
        assert not finish.done()
        allowed.set()
        await finish

    monkeypatch.setattr(manifest, "seal", slow)
    asyncio.run(scenario())
    assert is_whole(latest(store), 1)


def test_a_copy_that_cannot_be_written_leaves_the_last_good_one_once_the_other_parts_have_ended(tmp_path: Path) -> None:
    store, allowed = open_store(tmp_path, keep_last=1), asyncio.Event()
    write(store, 1)

    async def scenario() -> None:
        at_once = asyncio.Event()
        at_once.set()
        some = {"bad": copied(2, at_once, RuntimeError("PytorchStreamWriter failed writing")), "slow": copied(2, allowed)}
        finish = asyncio.ensure_future((await store.begin(2, some, {}))())
        await asyncio.sleep(0.02)
        assert not finish.done()
        allowed.set()
        with pytest.raises(
            SnapshotError, match=r"cannot write snapshot part .*/bad: PytorchStreamWriter failed writing; .*are free"
        ):
            await finish

    asyncio.run(scenario())
    assert names(tmp_path) == ["step-00000001"]
    assert is_whole(latest(store), 1)


# ------------------------------------------------------------------------------------------------------ damaged


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("train/model/weights.bin", flip_a_bit, "is damaged: its checksum does not match"),
    ("train/model/weights.bin", cut, "is damaged: 2999999 bytes instead of 3000000"),
    ("train/model/weights.bin", Path.unlink, "is missing"),
    ("train/empty", Path.unlink, "is missing"),
    ("queue/rows.json", flip_a_bit, "is damaged: its checksum does not match"),
    ("manifest.json", Path.unlink, "cannot be read: No such file or directory"),
    ("manifest.json", cut, "is damaged: "),
    ("manifest.json", lambda path: path.write_text("[]"), "is damaged: "),
    ("manifest.json", lambda path: path.write_bytes(b"\xff"), "is damaged: "),
    ("manifest.json", lambda path: path.write_text(path.read_text().replace('"step": 2', '"step": 3')), "its own checksum"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_a_damaged_one_is_refused_and_the_last_good_one_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    snapshot = latest(store)
    assert is_whole(snapshot, 1)
    (warning,) = snapshot.warnings
    assert f"step-00000002/{name} " in warning
    assert message in warning
    assert warning.endswith("; step-00000001 is used instead")
    write(store, 2)  # the resumed run comes to the same step again
    assert is_whole(latest(store), 2)


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    """Whatever byte is changed, the manifest is refused, or it says what it said."""
    store = open_store(tmp_path)
    whole(store, 1, {}, {"text": "abc", "number": 1.5})
    path = tmp_path / "step-00000001" / "manifest.json"
    good, said = path.read_bytes(), manifest.read(path.parent)
    for position in range(len(good)):
        for bit in (1, 16):
            path.write_bytes(good[:position] + bytes([good[position] ^ bit]) + good[position + 1 :])
            try:
                assert manifest.read(path.parent) == said
            except SnapshotError:
                continue


def test_nothing_good_left_is_an_error(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    for step in (1, 2):
        flip_a_bit(tmp_path / f"step-0000000{step}" / "queue" / "rows.json")
    with pytest.raises(SnapshotError, match=r"no good snapshot is left in .*step-00000002.*step-00000001.*another run\.dir"):
        store.latest()


def test_who_resumes_nothing_is_not_told_what_a_resumed_run_depends_on(tmp_path: Path) -> None:
    write(open_store(tmp_path, fingerprint={"isa": "AVX512", "threads": "1"}), 1)
    assert latest(open_store(tmp_path, fingerprint={})).warnings == ()


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 2)
        write(store, 1)
    with pytest.raises(SnapshotError, match="has format 2 and this Tandem reads format 1"):
        store.latest()


def test_another_machine_is_a_warning(tmp_path: Path) -> None:
    write(open_store(tmp_path), 1)
    now = {"torch": "2.14.0", "threads": "2", "isa": "AVX512"}
    (warning,) = latest(open_store(tmp_path, fingerprint=now)).warnings
    assert warning == (
        "step-00000001 was written under isa unknown (now AVX512), torch 2.13.0 (now 2.14.0): "
        "the resumed run may differ from an undisturbed one"
    )


def test_a_good_one_is_not_overwritten(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1)
    with pytest.raises(SnapshotError, match="step-00000001 is there already; resume from it"):
        write(store, 1)
    assert is_whole(latest(store), 1)
    assert names(tmp_path) == ["step-00000001"]


# ---------------------------------------------------------------------------------------------------- disk full


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [full(), RuntimeError("PytorchStreamWriter failed writing file data/0"), SafetensorError("I/O error: No space left on device")],
    ids=["os", "torch", "safetensors"],
)
def test_a_part_that_does_not_fit_leaves_the_last_good_one(tmp_path: Path, error: Exception) -> None:
    store = open_store(tmp_path)
    write(store, 1)

    async def fails(path: Path) -> None:
        (path / "weights.bin").write_bytes(b"half")
        raise error

    with pytest.raises(SnapshotError, match=r"cannot write snapshot .*(No space left|failed writing).*MB are free at .*make room"):
        whole(store, 2, {**parts(2), "more": fails}, {})
    assert names(tmp_path) == ["step-00000001"]
    assert is_whole(latest(store), 1)


@pytest.mark.parametrize("nth", range(8))
def test_a_disk_that_is_full_at_any_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Delayed allocation: the kernel takes the bytes and says at a later fsync that there is no room for them."""
    store = open_store(tmp_path)
    write(store, 1)
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == nth + 1:
            raise full()

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", fsync)
        with pytest.raises(SnapshotError, match="No space left on device"):
            write(store, 2)
    assert names(tmp_path) == ["step-00000001"]
    assert is_whole(latest(store), 1)
    write(store, 2)
    assert is_whole(latest(store), 2)


def test_a_disk_that_is_really_too_small(tmp_path: Path) -> None:
    """A limit on the size of files, set on a process of its own, stands in for the full disk."""
    code = """
import resource, signal, sys
from pathlib import Path
from tests.checkpoint.test_snapshots import open_store, write
store = open_store(Path(sys.argv[1]))
write(store, 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
write(store, 2)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert f"SnapshotError: cannot write snapshot {tmp_path}/step-00000002: File too large; " in done.stderr
    assert names(tmp_path) == ["step-00000001"]


def test_other_failures_pass_unchanged_and_leave_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    async def fails(path: Path) -> None:
        await asyncio.sleep(0)
        raise EngineError("the engine is closed")

    for bad in ({"engine": fails}, {}):
        with pytest.raises((EngineError, ValueError), match=r"engine is closed|not JSON compliant"):
            whole(store, 1, bad, {"reward": float("nan")})
    assert names(tmp_path) == []
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SnapshotError, match=r"cannot open .*/file/snapshots: Not a directory"):
        open_store(blocked / "snapshots")


# ---------------------------------------------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (SnapshotConfig(keep_last=1, keep_best=False), [5]),
        (SnapshotConfig(keep_last=2, keep_best=False), [4, 5]),
        (SnapshotConfig(keep_last=2, keep_best=True), [2, 4, 5]),
        (SnapshotConfig(keep_last=4, keep_best=True), [2, 3, 4, 5]),
    ],
)
def test_retention(tmp_path: Path, config: SnapshotConfig, kept: list[int]) -> None:
    store = SnapshotStore(tmp_path, config, {})
    for step, score in zip(range(1, 6), [0.9, 0.9, 0.2, None, 0.5], strict=True):
        write(store, step, score=score)
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]
    best = store.best()
    assert best is not None
    assert best.step == (2 if 2 in kept else 5)
    assert latest(store).step == 5


def test_the_new_one_stays_whatever_lies_beside_it(tmp_path: Path) -> None:
    """Damaged snapshots with later steps neither count as kept nor push the good ones out."""
    store = open_store(tmp_path)
    write(store, 1, 2, 8, 9)
    write(open_store(tmp_path, keep_last=4), 1, 2)
    for step in (8, 9):
        flip_a_bit(tmp_path / f"step-0000000{step}" / "manifest.json")
    assert latest(store).step == 2
    write(open_store(tmp_path, keep_last=1, keep_best=False), 3)
    assert names(tmp_path) == ["step-00000003", "step-00000008", "step-00000009"]
    snapshot = latest(store)
    assert (snapshot.step, len(snapshot.warnings)) == (3, 2)


def test_a_removal_that_stops_half_way_leaves_no_half_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, keep_last=1)
    write(store, 1)

    def stops(path: Path, *, ignore_errors: bool = False) -> None:
        if path.exists() and not ignore_errors:
            (path / "manifest.json").unlink()
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(snapshots.shutil, "rmtree", stops)
        with pytest.raises(SnapshotError, match=r"cannot remove old snapshots in .*: Permission denied"):
            write(store, 2)
    assert [name for name in names(tmp_path) if "partial" not in name] == ["step-00000002"]
    assert is_whole(latest(open_store(tmp_path)), 2)
    assert names(tmp_path) == ["step-00000002"]


def test_a_configuration_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_last=0 would keep no snapshot"):
        SnapshotConfig(keep_last=0)


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    write(open_store(tmp_path), 1, score=0.25)
    body = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text(encoding="utf-8"))
    assert {"checksum", "format", "step", "score", "fingerprint", "state", "files"} == set(body)
    assert (body["format"], body["fingerprint"], body["score"]) == (1, HERE, 0.25)
    assert list(body["files"]) == ["queue/rows.json", "train/empty", "train/model/weights.bin"]
