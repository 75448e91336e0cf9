"""Every port has a fake in the library and a contract suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.registry import resolve
from tests.architecture.test_surface import PORTS

ROOT = Path(__file__).parents[2]

FAKES = {
    "TrainEngine": "tandem.train.fake:FakeTrainEngine",
    "RolloutEngine": "tandem.rollout.fake:FakeEngine",
    "CheckpointEngine": "tandem.checkpoint.fake:FakeCheckpoint",
    "TransferQueue": "tandem.queue.fake:FakeQueue",
    "Renderer": "tandem.text.fake:FakeRenderer",
    "LLM": "tandem.rollout.fake:FakeLLM",
    "WorkerGroup": "tandem.runtime.fake:FakeGroup",
    "Tracker": "tandem.track.fake:ListTracker",
    "Dataset": "tandem.data.fake:FakeDataset",
}


@pytest.mark.parametrize("port", PORTS)
def test_a_port_has_a_fake(port: str) -> None:
    assert port in FAKES
    assert callable(resolve(FAKES[port], {}))


def snake(name: str) -> str:
    return "".join(
        f"_{letter.lower()}" if letter.isupper() and i and not name[i - 1].isupper() else letter.lower()
        for i, letter in enumerate(name)
    )


@pytest.mark.parametrize("port", PORTS)
def test_a_port_has_a_contract_suite(port: str) -> None:
    assert (ROOT / f"tests/contracts/test_{snake(port)}.py").is_file()
