import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from tandem.errors import DataError
from tandem.ports import Limits, Outcome
from tandem.sandbox.process import SubprocessSandbox


def run(source: str, limits: Limits = Limits(), **files: str) -> Outcome:  # noqa: B008
    return asyncio.run(SubprocessSandbox().run([sys.executable, "-I", "main.py"], {"main.py": source, **files}, limits))


def test_wall_time_is_limited_and_what_was_written_is_kept() -> None:
    began = time.monotonic()
    outcome = run("import time; print('begun', flush=True); time.sleep(60)", Limits(wall_s=0.4))
    assert outcome == Outcome(None, "begun\n", "", "wall")
    assert time.monotonic() - began < 5


def test_cpu_time_is_limited() -> None:
    assert run("while True: pass", Limits(cpu_s=1)) == Outcome(None, "", "", "cpu")


def test_a_program_that_ignores_the_warning_is_killed_for_cpu_time() -> None:
    source = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(source, Limits(cpu_s=0.5)).limit == "cpu"


def test_memory_is_limited() -> None:
    outcome = run("x = bytearray(1 << 30)", Limits(memory_bytes=256 << 20))
    assert (outcome.exit_code, outcome.limit) == (1, "memory")


def test_output_is_limited_while_it_is_written() -> None:
    outcome = run("while True: print('x' * 1000)", Limits(output_bytes=100_000))
    assert (outcome.exit_code, outcome.stdout, outcome.limit) == (None, ("x" * 1000 + "\n") * 99 + "x" * 901, "output")


def test_files_are_limited() -> None:
    source = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\nopen('big', 'w').write('x' * 5000)"
    assert run(source, Limits(output_bytes=1000)).limit == "output"


def test_a_signal_of_its_own_is_an_exit_code() -> None:
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)") == Outcome(-15, "", "")


def test_much_output_within_the_limit_arrives_whole() -> None:
    outcome = run("import sys; print('x' * 300_000); print('y' * 300_000, file=sys.stderr)")
    assert (len(outcome.stdout), len(outcome.stderr), outcome.limit) == (300_001, 300_001, None)


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert run("import os; os.write(1, b'a\\xffb')").stdout == "a\N{REPLACEMENT CHARACTER}b"


def test_environment_input_and_open_files_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t")
    source = """
import os, sys
print(sorted(os.environ), repr(sys.stdin.read()), sorted(map(int, os.listdir('/proc/self/fd')))[:4])
print(os.environ['HOME'] == os.environ['TMPDIR'] == os.getcwd())
"""
    environment, home = run(source).stdout.splitlines()
    assert environment.startswith("['HOME', 'LANG', 'PATH', 'TMPDIR'] '' [0, 1, 2, 3]")
    assert home == "True"


def test_each_run_has_its_own_directory_and_nothing_of_it_survives() -> None:
    source = "import os; print(os.getcwd(), sorted(os.listdir())); open('left', 'w').close(); os.chmod('.', 0)"
    (first, listed), (second, _) = (run(source, **{"a/b.txt": "x"}).stdout.split(" ", 1) for _ in range(2))
    assert first != second
    assert listed == "['a', 'main.py']\n"
    assert not Path(first).exists()


def test_children_end_with_the_program_although_they_hold_its_output() -> None:
    began = time.monotonic()
    outcome = run("import subprocess; print(subprocess.Popen(['sleep', '60']).pid)")
    assert outcome.exit_code == 0
    child = Path(f"/proc/{int(outcome.stdout)}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() - began < 5
        time.sleep(0.01)


def test_a_child_that_leaves_the_group_is_not_waited_for() -> None:
    began = time.monotonic()
    assert run("import subprocess; subprocess.Popen(['sleep', '4'], start_new_session=True)") == Outcome(0, "", "")
    assert time.monotonic() - began < 3


def test_a_cancelled_run_is_ended() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    async def cancel() -> Path:
        sandbox, others = SubprocessSandbox(), children()
        source = "import time; time.sleep(60)"
        running = asyncio.ensure_future(sandbox.run([sys.executable, "main.py"], {"main.py": source}, Limits()))
        await asyncio.sleep(0.1)
        (child,) = children() - others
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return Path(f"/proc/{child}")

    descriptors = set(os.listdir("/proc/self/fd"))
    assert not asyncio.run(cancel()).exists()
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_many_run_side_by_side() -> None:
    async def many() -> list[Outcome]:
        program = [sys.executable, "-S", "-c", "import time; time.sleep(0.5)"]
        return await asyncio.gather(*(SubprocessSandbox().run(program, {}, Limits()) for _ in range(6)))

    began = time.monotonic()
    assert asyncio.run(many()) == [Outcome(0, "", "")] * 6
    assert time.monotonic() - began < 2.5


def test_what_cannot_be_run() -> None:
    outcome = asyncio.run(SubprocessSandbox().run(["no-such-program"], {}, Limits()))
    assert outcome == Outcome(127, "", "no-such-program: No such file or directory\n")
    with pytest.raises(DataError, match="no program to run"):
        asyncio.run(SubprocessSandbox().run([], {}, Limits()))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "."])
def test_files_outside_the_directory_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="would not be inside the sandbox's directory"):
        run("", **{name: "x"})
