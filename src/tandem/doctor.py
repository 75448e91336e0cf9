"""`tandem doctor`: what is installed, what this machine can do, and what each missing extra would bring."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem import device
from tandem.errors import SandboxError
from tandem.models.decoder_config import DecoderConfig
from tandem.models.probe import probe
from tandem.registry import extras
from tandem.sandbox.isolated import IsolatedSandbox
from tandem.sandbox.probe import probe as sandboxed

Verdict = Literal["ok", "note", "wrong"]
_MARKS: dict[Verdict, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("·", "yellow"), "wrong": ("✗", "red")}
BRINGS = {
    "datasets": "datasets of the hub by id, and directories that the library saved",
    "gguf": "`tandem import` of GGUF files",
    "hub": "`tandem import` of models of the hub",
    "reasoning": "the tasks of reasoning-gym by name, and their scorers",
    "verify": "rewards math and json_schema",
    "hf": "any causal language model of transformers (model.library=transformers)",
    "lora": "adapters instead of all weights",
    "ray": "runtime=ray: workers on a cluster",
    "transferqueue": "queue=ray: rows spread over a cluster",
    "wandb": "logs=[wandb]",
    "mlflow": "logs=[mlflow]",
    "swanlab": "logs=[swanlab]",
    "trackio": "logs=[trackio]",
}
_NEEDS_BYTES = 1 << 30
_SMALL = DecoderConfig(vocab_size=64, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=16)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. advice: what to do where it is not ok."""

    what: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


def examine() -> list[Finding]:
    """Everything that is looked at, in the order in which it is shown; nothing is changed and nothing is asked of a network."""
    return [*_installation(), *_machine(), *_extras()]


def show(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        told = Text(finding.found)
        if finding.advice:
            told.append(f"\n{finding.advice}", "dim")
        table.add_row(Text(mark, style), Text(finding.what, "bold"), told)
    console.print(table)


def _installation() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} in {sys.prefix}")
    for package in ("tandem-rl", "torch", "numpy", "tokenizers", "safetensors"):
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed", "wrong", "install Tandem with pip: it brings what it needs")


def _machine() -> Iterator[Finding]:
    there = device.hardware()
    others = f", {there.devices} of {there.kind}" if there.devices else ", no accelerator that answers"
    yield Finding("hardware", f"{there.cores} cores ({device.fingerprint()['isa']}){others}")
    for dtype in (torch.float32, torch.bfloat16):
        result = probe(_SMALL, dtype)
        name = str(dtype).removeprefix("torch.")
        told = f"{result.law} in {name}: sampled log-probabilities against the trainer's, {result.positions} places"
        yield Finding("law 5", told, "ok" if result.exact else "note", "" if result.exact else result.note)
    shared = shutil.disk_usage("/dev/shm").free
    yield Finding("/dev/shm", f"{shared / 1e9:,.1f} GB free", *_room(shared, "workers hand columns and weights over in it"))
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("disk", f"{free / 1e9:,.1f} GB free at {Path.cwd()}", *_room(free, "snapshots of a run are written below runs/"))
    yield _sandbox()
    if os.environ.get("OMP_WAIT_POLICY", "passive").lower() != "passive":
        yield Finding("OMP_WAIT_POLICY", os.environ["OMP_WAIT_POLICY"], "note", "waiting threads spin and starve others: unset it")


def _sandbox() -> Finding:
    """Of the walls around code that is judged, by trying them."""
    try:
        tried = asyncio.run(sandboxed(IsolatedSandbox(), str(Path(__file__).resolve())))
    except SandboxError as error:
        return Finding("sandbox", "not to be had: reward code judges nothing here", "note", str(error))
    held, missing = ([wall.name for wall in tried if wall.held is held] for held in (True, False))
    if missing:
        return Finding("sandbox", f"holds: {', '.join(held)}", "note", f"does not hold: {', '.join(missing)}")
    return Finding("sandbox", f"holds: {', '.join(held)}")


def _room(free: int, use: str) -> tuple[Verdict, str]:
    return ("ok", "") if free >= _NEEDS_BYTES else ("note", f"below {_NEEDS_BYTES >> 30} GiB, and {use}")


def _extras() -> Iterator[Finding]:
    for name, packages in sorted(extras().items()):
        try:
            found = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
            yield Finding(name, f"{found}: {BRINGS[name]}")
        except metadata.PackageNotFoundError:
            yield Finding(name, f"not installed: {BRINGS[name]}", "note", f"pip install 'tandem-rl[{name}]'")
