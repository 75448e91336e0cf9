from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem import device
from tandem.device import Device, Hardware, configure_threads, fingerprint, select
from tandem.errors import DeviceError, EngineError, StalledError


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_accelerator", lambda kind: None)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda of a machine with two GPUs that remembers what it was asked to wait for."""
    waited: list[int] = []
    module = SimpleNamespace(
        device_count=lambda: 2,
        synchronize=waited.append,
        mem_get_info=lambda index: (10 + index, 100),
        is_bf16_supported=lambda: False,
        waited=waited,
    )
    monkeypatch.setattr(device, "_accelerator", lambda kind: module if kind == "cuda" else None)
    return module


@pytest.mark.usefixtures("no_accelerator")
def test_auto_is_the_cpu_where_nothing_else_is() -> None:
    chosen = select("auto")
    assert chosen == Device("cpu")
    assert chosen.torch == torch.device("cpu")
    assert chosen.collectives == "gloo"
    chosen.synchronize()
    memory = chosen.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("name", ["cuda", "npu", "cuda:1"])
def test_absent_hardware_says_what_to_do(name: str) -> None:
    with pytest.raises(DeviceError, match=f"^{name} asked for, none found; use device=cpu$"):
        select(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:1", "", "cuda:-1"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="is not known; use auto, cpu"):
        select(name)


def test_accelerators_are_preferred_counted_and_asked(two_gpus: SimpleNamespace) -> None:
    assert select("auto") == Device("cuda", 0)
    second = select("cuda:1")
    assert (second.torch, second.collectives) == (torch.device("cuda", 1), "nccl")
    with pytest.raises(DeviceError, match=r"^cuda:2 asked for, 2 found; use device=cpu or cuda:0$"):
        select("cuda:2")
    second.synchronize()
    assert two_gpus.waited == [1]
    assert (second.memory().free_bytes, second.memory().total_bytes) == (11, 100)
    with pytest.raises(DeviceError, match=r"dtype 'bf16' is not usable on cuda:1; use one of: fp32, fp16"):
        second.dtype("bf16")


def test_cpu_dtypes() -> None:
    cpu = Device("cpu")
    assert cpu.dtype("fp32") is torch.float32
    assert cpu.dtype("bf16") is torch.bfloat16
    for name in ("fp16", "int8"):
        with pytest.raises(DeviceError, match=rf"dtype '{name}' is not usable on cpu; use one of: fp32, bf16"):
            cpu.dtype(name)


def test_threads_and_fingerprint() -> None:
    before = configure_threads()
    try:
        assert configure_threads(2) == 2
        assert fingerprint()["threads"] == "2"
        assert configure_threads(0) == 2
    finally:
        torch.set_num_threads(before)
    assert set(fingerprint()) == {"tandem", "python", "torch", "numpy", "isa", "threads"}
    with pytest.raises(DeviceError, match="threads=-1 is negative"):
        configure_threads(-1)
    with pytest.raises(DeviceError, match="threads=100000 is above 1024; use the number of cores"):
        configure_threads(100_000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_real_machine_is_asked() -> None:
    """No monkeypatch: what this machine says, in a process of its own."""
    code = "from tandem.device import select; print(select('auto').torch); select('cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "cpu"
    assert "DeviceError: cuda asked for, none found; use device=cpu" in done.stderr


def test_hardware_says_what_this_process_may_use(two_gpus: SimpleNamespace) -> None:
    assert device.hardware() == Hardware(len(os.sched_getaffinity(0)), "cuda", 2)
    assert device.visible("cuda", (1, 3)) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert device.visible("cuda", ()) == {"CUDA_VISIBLE_DEVICES": ""}
    assert device.visible("cpu", ()) == {}


def test_without_accelerators_there_are_cores(no_accelerator: None) -> None:
    assert device.hardware() == Hardware(len(os.sched_getaffinity(0)))


def test_ranks_that_do_not_all_come_are_an_error_within_the_limit(tmp_path: Path) -> None:
    store = device.open_store("127.0.0.1", 0.5)
    for meet in (tmp_path / "store", device.Address("127.0.0.1", store.port)):
        with pytest.raises(StalledError, match=r"rank 0 waits for 2 ranks.*did not in 0\.5 s"):
            device.join(device.select("cpu"), 0, 2, meet, 0.5)


def test_a_store_that_is_not_served_is_an_error_within_the_limit() -> None:
    port = device.open_store("127.0.0.1", 0.5).port
    with pytest.raises(StalledError, match=rf"rank 1 waits for 2 ranks to meet at .*{port}"):
        device.join(device.select("cpu"), 1, 2, device.Address("127.0.0.1", port), 0.5)


def test_only_a_rank_that_is_not_there_is_a_stall() -> None:
    for other in (RuntimeError("shapes do not match"), EngineError("Timed out waiting for something else")):
        with pytest.raises(type(other), match=str(other)), device.meeting("step"):
            raise other
