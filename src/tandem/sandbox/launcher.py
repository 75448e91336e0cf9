"""What a sandboxed program is started by: a script of the standard library alone, run as `python -I -S launcher.py JOB REPORT`.

JOB is a file descriptor with JSON, REPORT one to write to. Three processes:

    supervisor   in the caller's place: waits for init, and kills it when it is told to end or its caller dies
    init         process 1 of the new namespaces: makes the file system, starts the program, and ends with it, upon which the kernel
                 kills whatever is left in the namespace
    program      without privileges, under limits and a filter of system calls

Init reports {"status": wait status of the program}, {"limit": "memory"} where its processes took more together than one may, or
{"error": why there is no sandbox}. When the supervisor has ended, nothing of
the program is left, and it was never on a disk: its files live in memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

BOX = "/box"
NOBODY = 65534
_NEW = {
    "ns": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LOOK_S = 0.02  # between two looks at what is held
_DEVICES = ("null", "zero", "full", "random", "urandom")
# What no judged program needs, and through which kernels have been attacked, or other processes be reached.
_DENIED = (
    "acct add_key bpf clone3 delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick init_module "
    "io_uring_enter io_uring_register io_uring_setup kcmp kexec_file_load kexec_load keyctl lookup_dcookie mount "
    "mount_setattr move_mount name_to_handle_at open_by_handle_at open_tree perf_event_open personality pivot_root "
    "process_madvise process_vm_readv process_vm_writev ptrace quotactl reboot request_key setns swapoff swapon syslog "
    "umount2 unshare userfaultfd vmsplice "
    "memfd_create memfd_secret mq_open msgget semget shmget "  # memory that belongs to no process, so that no limit would count it
)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: others (vsock, netlink, packet) may lead out of the namespace

libc = ctypes.CDLL(None, use_errno=True)


class _FailedError(Exception):
    """A step that this machine does not allow."""


def _call(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise _FailedError(f"{what}: {errno.errorcode.get(number, number)} ({os.strerror(number)})")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _call(f"mount {target}", libc.mount(*encoded, ctypes.c_ulong(flags), None if options is None else options.encode()))


def _pivot_root(new: str, old: str) -> None:
    _call("pivot_root", libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], new.encode(), old.encode()))


def _read_only(path: str) -> None:
    """With every mount below it."""
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    arguments = (ctypes.c_long(-100), path.encode(), ctypes.c_uint(0x8000), ctypes.byref(attributes), ctypes.c_size_t(32))
    _call(f"make {path} read-only", libc.syscall(_SYS_MOUNT_SETATTR, *arguments))


def _unshare(*names: str) -> None:
    _call(f"unshare {', '.join(names)}", libc.unshare(sum(_NEW[name] for name in names)))


def _map(uid: int, gid: int) -> None:
    """In a new user namespace, each is itself and there is no other."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise _FailedError(f"write {name}: {error.strerror}") from None


def supervise(job: Mapping[str, Any], report: int) -> int:
    """The supervisor, whose exit code says nothing."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    uid, gid = os.getuid(), os.getgid()
    try:
        if uid != 0:
            _unshare("user")
            _map(uid, gid)
        _unshare("ns", "pid", "net", "ipc", "uts", "cgroup")
    except _FailedError as failed:
        _report(report, error=str(failed))
        return 1
    init = os.fork()
    if init == 0:
        _init(job, report, uid == 0)
    os.close(report)

    def end(*_: object) -> None:
        os.kill(init, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.waitpid(init, 0)  # returns when the whole namespace is gone
    return 0


def _init(job: Mapping[str, Any], report: int, is_root: bool) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with no handler nothing in the namespace can send it a signal
    owner = (NOBODY, NOBODY) if is_root else (os.getuid(), os.getgid())
    ready, done = os.pipe()
    try:
        seccomp = _libseccomp()
        _make_root(job, owner)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it stays pending until it is waited for
        program = os.fork()
    except (_FailedError, OSError) as failed:
        _report(report, error=str(failed))
        os._exit(1)
    if program == 0:
        os.close(ready)
        _become(job, done, owner, is_root, seccomp)
    os.close(done)
    for stream in (0, 1, 2):
        os.close(stream)
    if failure := os.read(ready, 4096):
        _report(report, error=failure.decode(errors="replace"))
        os._exit(1)
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # orphans come here too
        if pid == program:
            _report(report, status=status)
            os._exit(0)
        if _held(job["memory_bytes"]) > job["memory_bytes"]:
            _report(report, limit="memory")
            os._exit(0)
        if pid == 0:
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)


def _held(most: int) -> int:
    """Bytes of all processes but init. What several share counts once where it matters: to find that out takes long."""
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    each = {pid: _bytes(f"/proc/{pid}/status", "VmRSS:", "VmSwap:") for pid in pids}
    if sum(each.values()) <= most:
        return sum(each.values())
    return sum(_shared(pid, each[pid]) for pid in pids)


def _shared(pid: str, unshared: int) -> int:
    try:
        return _bytes(f"/proc/{pid}/smaps_rollup", "Pss:", "SwapPss:")
    except PermissionError:
        return unshared


def _bytes(path: str, *names: str) -> int:
    """The sum of these lines, which are in KiB; 0 of a process that has ended."""
    try:
        with open(path) as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(names))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _make_root(job: Mapping[str, Any], owner: tuple[int, int]) -> None:
    """A root of its own in memory: the paths of the job from outside, read-only, and an empty directory with the job's files."""
    _mount("none", "/", None, _REC | _PRIVATE)
    options = f"size={job['files_bytes']},nr_inodes=8192,mode=0755"
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, options)
    for name in ("new", "old"):
        os.mkdir(f"/tmp/{name}")
    _mount("/tmp/new", "/tmp/new", None, _BIND)
    _pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path in job["visible"]:
        _show(path)
    for name in _DEVICES:
        os.makedirs("/new/dev", exist_ok=True)
        os.close(os.open(f"/new/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        _mount(f"/old/dev/{name}", f"/new/dev/{name}", None, _BIND)
    os.mkdir("/new/proc")
    _mount("proc", "/new/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for path, mode in (("/new/tmp", 0o1777), (f"/new{BOX}", 0o700)):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
    os.chown(f"/new{BOX}", *owner)
    for name, content in job["files"].items():
        path = f"/new{BOX}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
        for part in (path, *_parents(name)):
            os.chown(part, *owner)
    os.chdir("/new")
    _pivot_root(".", ".")
    _call("umount", libc.umount2(b".", _DETACH))
    os.chdir(BOX)


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return [f"/new{BOX}/" + "/".join(parts[: i + 1]) for i in range(len(parts))]


def _show(path: str) -> None:
    source, target = f"/old{path}", f"/new{path}"
    if os.path.lexists(target) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _REC)
    _read_only(target)


def _become(job: Mapping[str, Any], done: int, owner: tuple[int, int], is_root: bool, seccomp: Any) -> None:
    """The program. What goes wrong before it runs is written to `done`, which closes where it runs."""
    try:
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        if is_root:
            os.setgroups([])
            os.setresgid(*[owner[1]] * 3)
            os.setresuid(*[owner[0]] * 3)
            libc.prctl(_PR_SET_DUMPABLE, 1)  # or its own files in /proc would be root's
        _unshare("user")  # no privilege over what is outside it, and processes that are counted by themselves
        _map(*owner)
        for name, (soft, hard) in job["rlimits"].items():  # after it, or the one of processes would count the user's others
            kind = getattr(resource, name)
            most = resource.getrlimit(kind)[1]
            bounded = (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))
            resource.setrlimit(kind, bounded)
        _call("no_new_privs", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if seccomp is not None:
            _filter(seccomp)
    except (_FailedError, OSError, ValueError) as failed:
        os.write(done, str(failed).encode())
        os._exit(1)
    program = job["program"]
    try:
        os.execvpe(program[0], program, job["environment"])
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _libseccomp() -> Any:
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    return library


class _Compare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _filter(library: Any) -> None:
    """All is allowed but what is denied, with EPERM; clone3, whose flags cannot be seen, with ENOSYS, so that clone is used."""
    allow, equal, greater, masked = 0x7FFF0000, 4, 6, 7
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(allow)))
    deny, absent = (ctypes.c_uint32(0x00050000 | number) for number in (errno.EPERM, errno.ENOSYS))

    def rule(action: ctypes.c_uint32, name: str, *compares: _Compare) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # an older library does not know it
            array = (_Compare * len(compares))(*compares)
            result = library.seccomp_rule_add_array(context, action, number, ctypes.c_uint(len(compares)), array)
            if result < 0:
                raise _FailedError(f"seccomp rule for {name}: {os.strerror(-result)}")

    for name in _DENIED.split():
        rule(absent if name == "clone3" else deny, name)
    for flag in _NEW.values():
        rule(deny, "clone", _Compare(0, masked, flag, flag))
    for family in set(range(max(_FAMILIES))) - {*_FAMILIES}:
        rule(deny, "socket", _Compare(0, equal, family, 0))
    rule(deny, "socket", _Compare(0, greater, max(_FAMILIES), 0))
    result = library.seccomp_load(context)
    if result < 0:
        raise _FailedError(f"seccomp: {os.strerror(-result)}")


def _report(descriptor: int, **said: object) -> None:
    os.write(descriptor, json.dumps(said).encode())


def main() -> None:
    job_file, report = (int(argument) for argument in sys.argv[1:])
    os.set_inheritable(report, False)
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    os._exit(supervise(job, report))


if __name__ == "__main__":
    main()
