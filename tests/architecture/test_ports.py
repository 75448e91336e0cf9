"""Every port has a fake in the library and a contract suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem import ports
from tandem.registry import resolve
from tests.architecture.test_surface import PORTS

ROOT = Path(__file__).parents[2]

FAKES = {
    "WeightSource": "tandem.checkpoint.fake:_CopiedWeights",
    "TrainEngine": "tandem.train.fake:FakeTrainEngine",
    "RolloutEngine": "tandem.rollout.fake:FakeEngine",
    "CheckpointEngine": "tandem.checkpoint.fake:FakeCheckpoint",
    "TransferQueue": "tandem.queue.fake:FakeQueue",
    "Renderer": "tandem.text.fake:FakeRenderer",
    "LLM": "tandem.rollout.fake:FakeLLM",
    "AgentLoop": "tandem.agents.fake:FakeAgent",
    "Env": "tandem.agents.fake:FakeEnv",
    "Reward": "tandem.rewards.fake:FakeReward",
    "Sandbox": "tandem.sandbox.fake:FakeSandbox",
    "WorkerGroup": "tandem.runtime.fake:FakeGroup",
    "WeightWorker": "tandem.checkpoint.fake:FakeWeightWorker",
    "Runtime": "tandem.runtime.fake:FakeRuntime",
    "Learner": "tandem.trainer.fake:FakeLearner",
    "Source": "tandem.trainer.fake:FakeSource",
    "Tracker": "tandem.track.fake:ListTracker",
    "Dataset": "tandem.data.fake:FakeDataset",
}
TESTED_WITH = {"WeightSource": "CheckpointEngine", "WeightWorker": "CheckpointEngine", "Runtime": "WorkerGroup"}
"""What a checkpoint engine takes and hands on; what groups come from."""


def test_every_port_has_a_fake() -> None:
    assert FAKES.keys() == PORTS.keys()


@pytest.mark.parametrize("port", FAKES)
def test_a_fake_exists_and_has_every_method_of_its_port(port: str) -> None:
    fake = resolve(FAKES[port], {})
    assert callable(fake)
    functions = [name for name, member in vars(getattr(ports, port)).items() if name in PORTS[port].split() and callable(member)]
    assert [name for name in functions if not hasattr(fake, name)] == []


def snake(name: str) -> str:
    return "".join(
        f"_{letter.lower()}" if letter.isupper() and i and not name[i - 1].isupper() else letter.lower()
        for i, letter in enumerate(name)
    )


@pytest.mark.parametrize("port", PORTS)
def test_a_port_has_a_contract_suite(port: str) -> None:
    assert (ROOT / f"tests/contracts/test_{snake(TESTED_WITH.get(port, port))}.py").is_file()
