from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem import durable
from tandem.durable import AppendLog, attempt, beside, records, room, write_whole
from tandem.errors import SnapshotError


def lines(path: Path) -> list[object]:
    return [record["n"] for record in records(path)]


def filled(path: Path, count: int = 3) -> AppendLog:
    log = AppendLog(path)
    for number in range(count):
        log.append({"n": number})
    return log


def test_appends_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    log = filled(path)
    assert log.offset() == path.stat().st_size
    log.close()
    again = AppendLog(path)
    again.append({"n": "ünïcode \ud800 \u2028"})
    again.close()
    assert lines(path) == [0, 1, 2, "ünïcode \ud800 \u2028"]
    assert "ünïcode" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("torn", [b'{"n": 3', b"x", b"x" * 200_000])
def test_a_torn_last_line_is_cut_and_never_read(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    filled(path).close()
    with path.open("ab") as file:
        file.write(torn)
    assert lines(path) == [0, 1, 2]
    log = AppendLog(path)
    log.append({"n": 4})
    log.close()
    assert lines(path) == [0, 1, 2, 4]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"torn")
    log = AppendLog(path)
    assert log.offset() == 0 == path.stat().st_size
    log.close()


@pytest.mark.parametrize("broken", [b"not json\n", b"[1]\n"])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 0}\n' + broken + b'{"n": 1}\n')
    with pytest.raises(SnapshotError, match=r"log\.jsonl, line 2 is not .*mend or delete that line"):
        lines(path)


def test_truncate_forgets_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = filled(path, 2)
    offset = log.offset()
    log.append({"n": "later"})
    log.close()
    log = AppendLog(path)
    log.truncate(offset)
    log.append({"n": "again"})
    log.close()
    assert lines(path) == [0, 1, "again"]


def test_a_log_that_lost_lines_says_so(tmp_path: Path) -> None:
    log = filled(tmp_path / "log.jsonl")
    size = log.offset()
    with pytest.warns(RuntimeWarning, match=rf"has {size} bytes where the snapshot saw {size + 7}: lines are lost"):
        log.truncate(size + 7)
    log.close()


def test_nan_is_refused(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append({"n": float("nan")})
    log.close()


def test_a_line_that_does_not_fit_leaves_no_part_of_itself(tmp_path: Path) -> None:
    """A real limit on the file's size, in a process of its own: the second half of the line does not fit."""
    path = tmp_path / "log.jsonl"
    code = f"""
import resource, signal
from pathlib import Path
from tandem.durable import AppendLog
log = AppendLog(Path({str(path)!r}))
log.append({{"n": 1}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (70, resource.RLIM_INFINITY))
log.append({{"n": "x" * 100}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"SnapshotError: cannot write a line of {path}: File too large; " in done.stderr
    assert f"MB are free at {tmp_path}: make room there" in done.stderr
    assert path.read_text() == '{"n": 1}\n'


@pytest.mark.parametrize(
    ("point", "kept"), [("log.log.before", []), ("log.log.during", []), ("log.log.after", [0]), ("log.log.during:2", [0])]
)
def test_killed_while_appending(tmp_path: Path, point: str, kept: list[int]) -> None:
    path = tmp_path / "log.jsonl"
    code = f"""
from pathlib import Path
from tandem.durable import AppendLog
log = AppendLog(Path({str(path)!r}))
for number in range(3):
    log.append({{"n": number}})
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TANDEM_CRASH_AT": point}, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    log = AppendLog(path)
    assert lines(path) == kept
    log.append({"n": 9})
    log.close()
    assert lines(path) == [*kept, 9]


def test_write_whole_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync", full)
        with pytest.raises(SnapshotError, match=r"cannot write .*summary\.json: No space left on device"):
            write_whole(path, "new")
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("old", ["summary.json"])
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_attempt_does_not_wrap_twice_and_room_looks_upwards(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"^inner$"), attempt("do it", tmp_path):
        raise SnapshotError("inner")
    assert str(tmp_path) in room(tmp_path / "not" / "there")
    assert json.loads(durable.dump({"a": [1, None, "é"]})) == {"a": [1, None, "é"]}


def test_what_is_done_beside_gives_its_error_to_whoever_asks_and_keeps_no_process_alive(tmp_path: Path) -> None:
    allowed, names = threading.Event(), list[str]()

    def work() -> None:
        assert allowed.wait(60)
        names.append(threading.current_thread().name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    done = beside("writing", work)
    assert not done.done()
    assert not done.cancel()
    allowed.set()
    with pytest.raises(OSError, match="No space left"):
        done.result(60)
    assert names == ["writing"]
    code = "import threading; from tandem.durable import beside; beside('for ever', threading.Event().wait)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
