"""Roles that are reset: when, and what of the policy begins anew with them."""

from __future__ import annotations

import torch

from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.assemble.roles import Role, Roles
from tandem.queue.fake import FakeQueue
from tandem.runtime.inline import InlineGroup
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.trainer.workers import ModelWorker
from tests.train.rows import make_rows, tiny_decoder


def step(engine: TorchEngine) -> None:
    engine.forward_backward(make_rows([5, 2], 9), loss_ref(configure("sft")))
    engine.step()


def test_a_reset_makes_the_role_the_policy_whose_next_step_is_that_of_a_new_optimiser() -> None:
    policy, old = TorchEngine(tiny_decoder(), TrainConfig()), TorchEngine(tiny_decoder(), TrainConfig())
    roles = Roles((Role("reference", old.decoder, None, old, InlineGroup((ModelWorker(old, FakeQueue()),)), {}, reset_every=2),))
    assert roles.saved == roles.all
    step(policy)
    before = [parameter.clone() for parameter in old.decoder.parameters()]
    assert not roles.reset(policy, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, old.decoder.parameters(), strict=True))
    assert roles.reset(policy, 2)
    for engine in (policy, TorchEngine(old.decoder, TrainConfig())):
        step(engine)
    assert all(torch.equal(a, b) for a, b in zip(policy.decoder.parameters(), old.decoder.parameters(), strict=True))


def test_nothing_is_reset_that_was_not_asked_for() -> None:
    policy, old = TorchEngine(tiny_decoder(), TrainConfig()), TorchEngine(tiny_decoder(), TrainConfig())
    roles = Roles((Role("reference", old.decoder, None, old, InlineGroup((ModelWorker(old, FakeQueue()),)), {}),))
    step(policy)
    assert not roles.reset(policy, 2)
    assert roles.saved == ()
