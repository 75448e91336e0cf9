"""Roles: what they learn from, when they are reset, and what of the policy begins anew with them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.algos.columns import loss_ref, step_needs
from tandem.algos.table import configure
from tandem.assemble.roles import Role, Roles, build_roles
from tandem.assemble.workers import Blueprint, Job
from tandem.models.hf import save_decoder
from tandem.queue.fake import FakeQueue
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.workers import ModelWorker, TrainWorker
from tests.train.rows import make_rows, tiny_decoder


def step(engine: TorchEngine) -> None:
    engine.forward_backward(make_rows([5, 2], 9), loss_ref(configure("sft")))
    engine.step()


def reference(engine: TorchEngine, reset_every: int) -> Roles:
    group = InlineGroup((ModelWorker(engine, FakeQueue()),))
    return Roles((Role("reference", Blueprint.of(engine.decoder), None, group, {}, reset_every=reset_every),))


def test_a_reset_makes_the_role_the_policy_whose_next_step_is_that_of_a_new_optimiser(tmp_path: Path) -> None:
    policy, old = TorchEngine(tiny_decoder(), TrainConfig()), TorchEngine(tiny_decoder(), TrainConfig())
    roles = reference(old, 2)
    assert roles.saved == roles.all
    step(policy)
    assert [roles.due(version) for version in (1, 2, 3, 4)] == [(), roles.all, (), roles.all]
    save_decoder(policy.decoder, tmp_path)
    asyncio.run(roles.reset(InlineGroup((TrainWorker(policy, FakeQueue(), configure("sft")),)), 2, tmp_path))
    for engine in (policy, TorchEngine(old.decoder, TrainConfig())):
        step(engine)
    assert all(torch.equal(a, b) for a, b in zip(policy.decoder.parameters(), old.decoder.parameters(), strict=True))


@pytest.mark.parametrize(("name", "drawn"), [("pf_ppo", {"resample_counts"}), ("ppo", set())])
def test_a_critic_learns_from_the_episodes_that_are_drawn_for_the_policy(name: str, drawn: set[str]) -> None:
    jobs: list[Job] = []
    workers = SimpleNamespace(group=lambda model, job: jobs.append(job))
    sections = SimpleNamespace(critic=None, process_model=None, reference=None, teacher=None, reward_model=None)
    build_roles(sections, SimpleNamespace(decoder=tiny_decoder()), configure(name), workers, updates=1)  # type: ignore[arg-type]
    (critic,) = jobs
    assert critic.objective is not None
    assert critic.objective.name == "value"
    assert step_needs(critic.objective) == {"mask"} | drawn


def test_nothing_is_reset_that_was_not_asked_for() -> None:
    roles = reference(TorchEngine(tiny_decoder(), TrainConfig()), 0)
    assert [roles.due(version) for version in (1, 2)] == [(), ()]
    assert roles.saved == ()


def test_a_reference_that_is_reset_waits_for_the_batch_and_a_frozen_one_need_not() -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig())
    assert [stage.weights for every in (0, 2) for stage in reference(engine, every).stages] == ["frozen", "current"]


def test_a_reward_model_judges_and_is_no_stage() -> None:
    engine = TorchEngine(tiny_decoder(), TrainConfig())
    judge = replace(reference(engine, 0).all[0], name="reward_model", path=Path("scorer"))
    roles = Roles((*reference(engine, 0).all, judge))
    assert roles.judge is judge
    assert [stage.name for stage in roles.stages] == ["reference"]
    assert reference(engine, 0).judge is None
