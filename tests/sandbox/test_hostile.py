"""Programs that mean harm: each is contained within its limits, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tandem.errors import DataError
from tandem.ports import Limits, Outcome
from tandem.sandbox.isolated import IsolatedSandbox
from tandem.sandbox.probe import probe

LIMITS = Limits(cpu_s=1, wall_s=5, memory_bytes=256 << 20, output_bytes=100_000, files_bytes=4 << 20, processes=16)
MARK = f"marked-{os.getpid()}"
PROGRAM = [sys.executable, "-I", "main.py", MARK]


def forbidden() -> bool:
    """Whether this machine gives no namespace. The kernel is asked, and not the sandbox: where that is broken, tests fail."""
    new_namespace, new_user = 0x20000, 0x10000000
    flags = new_namespace if os.getuid() == 0 else new_namespace | new_user
    tried = [sys.executable, "-c", f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"]
    return subprocess.run(tried, check=False).returncode != 0


pytestmark = pytest.mark.skipif(forbidden(), reason="namespaces are forbidden here; the refusal is tested elsewhere")


def run(source: str, limits: Limits = LIMITS, **files: str) -> Outcome:
    return asyncio.run(IsolatedSandbox().run(PROGRAM, {"main.py": source, **files}, limits))


def mine() -> set[str]:
    """Processes of this machine that run what a test of this process started."""
    found: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if MARK in line:
            found.add(f"{pid} {line}")
    return found


FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3):
            os.close(descriptor)
        time.sleep(600)
    os._exit(0)
os.wait()
print("left")
"""
SIGNALS = """
import os, signal
said = []
for pid in (1, os.getppid(), -1):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        try:
            os.kill(pid, number)
        except OSError as error:
            said.append(type(error).__name__)
print("alive")
"""
FLOOD_OF_FILES = """
import os
written = 0
try:
    for i in range(100_000):
        with open(f"f{i}", "w") as file:
            written += file.write("x" * 50_000)
except OSError as error:
    print(error.strerror, written < 5 << 20)
"""
FLOOD_OF_NAMES = """
try:
    for i in range(100_000):
        open(f"f{i}", "w").close()
except OSError as error:
    print(error.strerror, i < 10_000)
"""


def test_a_fork_bomb_ends_with_its_time() -> None:
    began = time.monotonic()
    outcome = run(FORK_BOMB)
    assert outcome.limit in ("wall", "cpu")
    assert time.monotonic() - began < 60
    assert mine() == set()


def test_an_endless_loop_ends_with_its_cpu_time() -> None:
    assert run("while True: pass") == Outcome(None, "", "", "cpu")


def test_sleep_ends_with_its_wall_time() -> None:
    source = "import time; print('begun', flush=True); time.sleep(600)"
    assert run(source, Limits(wall_s=1.5)) == Outcome(None, "begun\n", "", "wall")


def test_memory_is_bounded_in_one_process_and_in_many() -> None:
    assert run("x = bytearray(1 << 30)").limit == "memory"
    many = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError:
    print(n < 16)
"""
    assert run(many).stdout == "True\n"


def test_memory_of_all_processes_together_is_bounded() -> None:
    """Each stays below the limit of one, and the twelve would hold seven times as much."""
    many = """
import os, time
for n in range(12):
    if os.fork() == 0:
        x = bytearray(150 << 20)
        time.sleep(4)
        os._exit(0)
for n in range(12):
    os.wait()
print("held")
"""
    outcome = run(many)
    assert (outcome.limit, outcome.stdout) == ("memory", "")
    assert mine() == set()


def test_what_processes_share_counts_once() -> None:
    shared = """
import os, time
x = bytearray(100 << 20)
for n in range(8):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(x[-1])
print([os.wait()[1] for n in range(8)])
"""
    assert run(shared) == Outcome(0, f"{[0] * 8}\n", "")


def test_memory_that_belongs_to_no_process_cannot_be_had() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([name for name, call in {
    "shm": lambda: libc.shmget(0, 64 << 20, 0o1600),
    "messages": lambda: libc.msgget(0, 0o1600),
    "semaphores": lambda: libc.semget(0, 1, 0o1600),
    "memfd": lambda: libc.memfd_create(b"x", 0),
}.items() if call() >= 0])
"""
    assert run(source).stdout == "[]\n"


def test_a_flood_of_output_is_cut() -> None:
    outcome = run("while True: print('x' * 1000)")
    assert (len(outcome.stdout), outcome.limit) == (100_000, "output")


@pytest.mark.parametrize("source", [FLOOD_OF_FILES, FLOOD_OF_NAMES], ids=["bytes", "names"])
def test_a_flood_of_files_is_bounded_and_never_on_a_disk(source: str) -> None:
    assert run(source, Limits(files_bytes=4 << 20)).stdout == "No space left on device True\n"


def test_what_is_at_home_cannot_be_read(tmp_path: Path) -> None:
    secrets = [tmp_path / "secret", Path.home() / ".bashrc", Path("/etc/passwd"), Path(__file__)]
    secrets[0].write_text("s3cret")
    source = "for path in open('paths').read().split():\n    try: print(open(path).read())\n    except OSError: print('no')"
    assert run(source, paths=" ".join(map(str, secrets))).stdout == "no\n" * 4
    elsewhere = (str(Path.home() / ".ssh"), "/home", "/var", "/sys", "/run")
    assert (
        run(f"import os; print([os.path.exists(path) for path in {elsewhere}])").stdout == "[False, False, False, False, False]\n"
    )


def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    paths = [tmp_path / "x", Path(sys.prefix) / "x", Path("/usr/x"), Path("/etc/x"), Path("/proc/sys/kernel/hostname")]
    source = "for path in open('paths').read().split():\n    try: open(path, 'w').write('x'); print(path)\n    except OSError: pass"
    before = Path("/proc/sys/kernel/hostname").read_text()
    assert run(source, paths=" ".join(map(str, paths))).stdout == ""
    assert not any(path.exists() for path in paths[:4])
    assert Path("/proc/sys/kernel/hostname").read_text() == before


def test_what_is_shown_can_be_read_and_not_written_whoever_may_write_it(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open/told").write_text("told")
    source = """
import sys
place = open("place").read()
print(open(f"{place}/told").read())
try:
    open(f"{place}/x", "w")
except OSError as error:
    print(error.strerror)
"""
    files = {"main.py": source, "place": str(tmp_path / "open")}
    outcome = asyncio.run(IsolatedSandbox([files["place"]]).run(PROGRAM, files, LIMITS))
    assert outcome.stdout == "told\nRead-only file system\n"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0), backlog=1) as other:
        reached: list[object] = []
        server.settimeout(0.5)
        port = server.getsockname()[1]
        thread = threading.Thread(target=lambda: reached.append(_accepted(server)))
        thread.start()
        source = f"""
import socket
for address in (("127.0.0.1", {port}), ("127.0.0.1", {other.getsockname()[1]}), ("8.8.8.8", 53)):
    try:
        socket.create_connection(address, 1)
        print("reached", address)
    except OSError:
        pass
for family in (16, 17, 38, 40):  # netlink, packet, the kernel's ciphers, vsock
    try:
        socket.socket(family, socket.SOCK_RAW)
        print("made", family)
    except OSError:
        pass
"""
        assert run(source).stdout == ""
        thread.join()
    assert reached == [None]


def _accepted(server: socket.socket) -> object:
    try:
        return server.accept()
    except TimeoutError:
        return None


def test_signals_reach_nothing_outside() -> None:
    before = os.getpid()
    assert run(SIGNALS).stdout in ("alive\n", "")  # the last ones are for all processes, which are itself
    assert os.getpid() == before
    assert mine() == set()


def test_a_daemon_ends_with_the_program() -> None:
    outcome = run(DAEMON)
    assert (outcome.exit_code, outcome.stdout) == (0, "left\n")
    assert mine() == set()


def test_privileges_cannot_be_gained() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
tries = {
    "user": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "root": lambda: libc.setuid(0) if os.getuid() else -1,
    "chroot": lambda: libc.chroot(b"/tmp"),
    "trace": lambda: libc.ptrace(16, 1, 0, 0),
}
print([name for name, call in tries.items() if call() == 0])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapPrm", "NoNewPrivs"))])
print(os.path.exists("/proc/1/root/etc/passwd"), len([name for name in os.listdir("/proc") if name.isdigit()]))
"""
    tried, has, sees = run(source).stdout.splitlines()
    assert tried == "[]"
    assert has == "['0000000000000000', '0000000000000000', '1']"
    assert sees == "False 2"


def test_its_files_are_there_and_its_own() -> None:
    source = """
import os
print(open("a/b.txt").read(), os.getcwd(), sorted(os.listdir()))
open("a/c", "w").close()
print(sorted(os.environ))
"""
    said = run(source, **{"a/b.txt": "é"}).stdout.splitlines()
    assert said == ["é /box ['a', 'main.py']", "['HOME', 'LANG', 'PATH', 'TMPDIR']"]
    with pytest.raises(DataError, match=r"'\.\./x' would not be inside"):
        run("", **{"../x": ""})


def test_four_at_once_do_not_share_their_processes() -> None:
    source = """
import os, time
for n in range(12):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
print(n + 1)
"""

    async def four() -> list[Outcome]:
        return await asyncio.gather(*(IsolatedSandbox().run(PROGRAM, {"main.py": source}, LIMITS) for _ in range(4)))

    assert [outcome.stdout for outcome in asyncio.run(four())] == ["12\n"] * 4


def test_a_cancelled_run_is_ended() -> None:
    async def cancel() -> None:
        running = asyncio.ensure_future(IsolatedSandbox().run(PROGRAM, {"main.py": "import time; time.sleep(60)"}, Limits()))
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert mine() == set()


def test_what_is_said_to_hold_holds() -> None:
    found = asyncio.run(probe(IsolatedSandbox(), str(Path.home() / ".bashrc")))
    assert [finding.name for finding in found if not finding.held] == []


@pytest.mark.slow
def test_a_hundred_in_a_row_leave_nothing_behind() -> None:
    programs = [DAEMON, SIGNALS, FLOOD_OF_FILES, "import os; [os.fork() for _ in range(4)]", "while True: print('x' * 1000)"]
    descriptors, temporary = set(os.listdir("/proc/self/fd")), set(os.listdir(tempfile.gettempdir()))
    mounts = Path("/proc/self/mountinfo").read_text()

    async def hundred() -> list[Outcome]:
        sandbox, places = IsolatedSandbox(), asyncio.Semaphore(2)

        async def one(source: str) -> Outcome:
            async with places:
                return await sandbox.run(PROGRAM, {"main.py": source}, LIMITS)

        return await asyncio.gather(*(one(programs[i % len(programs)]) for i in range(100)))

    assert len(asyncio.run(hundred())) == 100
    assert mine() == set()
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert {name for name in set(os.listdir(tempfile.gettempdir())) - temporary if name.startswith("tandem")} == set()
    assert Path("/proc/self/mountinfo").read_text() == mounts
