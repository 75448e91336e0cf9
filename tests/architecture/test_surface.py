"""The public surface of `tandem.ports`: a port or a method is added, renamed or removed by editing this list too."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Protocol

from tandem import ports

ROOT = Path(__file__).parents[2]

PORTS = {
    "WeightSource": "blocks shards shared",
    "TrainEngine": "evaluate forward forward_backward layout load load_weights place reset_optimizer save snapshot "
    "step weight_shards",
    "RolloutEngine": "abort capabilities close generate held load_weights pause place policy resume",
    "CheckpointEngine": "aclose admitted connect publish",
    "TransferQueue": "ack commit drop get metrics put release reserve restore save take write",
    "Renderer": "demonstration following opening stop_ids text",
    "LLM": "chat complete samples",
    "AgentLoop": "__call__",
    "Env": "close start step",
    "Reward": "__call__ close",
    "Sandbox": "run",
    "WorkerGroup": "call call_each size",
    "WeightWorker": "logprobs open_weights send_weights weights",
    "Runtime": "__aenter__ __aexit__ group",
    "Learner": "update",
    "Source": "__aiter__ advance policy restore state training",
    "Tracker": "close log restore state",
    "Dataset": "__getitem__ __len__ name",
}


def protocols() -> dict[str, Any]:
    return {name: value for name, value in vars(ports).items() if inspect.isclass(value) and Protocol in value.__bases__}


def methods(port: Any) -> list[str]:
    own = (name for name, value in vars(port).items() if inspect.isfunction(value) or isinstance(value, property))
    return sorted(name for name in own if name != "__init__" and name != "__subclasshook__")


def test_ports_and_their_methods() -> None:
    assert {name: " ".join(methods(port)) for name, port in protocols().items()} == PORTS


def test_no_port_is_large() -> None:
    assert max(len(methods(port)) for port in protocols().values()) <= 12


def test_the_architecture_page_names_every_port() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert [name for name in PORTS if not re.search(rf"^\| `{name}`", page, re.MULTILINE)] == []
