"""The algorithm functions against verl 0.9.1's, CPU milliseconds on one thread, both in one run.

    pip install verl==0.9.1     # in an environment of its own, beside Tandem
    python benchmarks/algos.py  # prints JSON; exits with 1 where a ratio is above its limit

512 rows of 1,024 tokens, lengths between a quarter and all of it, float32. verl takes padded [B, T] tables and Tandem
packed tokens: each gets its own layout, made before the clock starts. Whitening is included where verl has it. Policy
losses are forward and backward. The best of several alternating runs counts, since noise only adds time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tandem.algos import advantages, returns
from tandem.algos.aggregation import aggregate, loss_weights
from tandem.algos.functions import loss_function
from tandem.algos.terms import LossInputs

ROWS, TOKENS, GROUP, ROUNDS = 512, 1024, 8, 5


class Data:
    """The same numbers in both layouts."""

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(TOKENS // 4, TOKENS + 1, (ROWS,), generator=seeded)
        self.valid = torch.arange(TOKENS) < self.lengths[:, None]
        self.groups = torch.arange(ROWS) // GROUP
        self.rewards = torch.rand(ROWS, generator=seeded)
        self.padded = {
            name: torch.randn(ROWS, TOKENS, generator=seeded).mul(scale).where(self.valid, 0)
            for name, scale in (("values", 1.0), ("logprobs", 0.1), ("old_logprobs", 0.1), ("advantages", 1.0))
        }
        last = torch.arange(TOKENS) == self.lengths[:, None] - 1
        self.padded["token_rewards"] = torch.where(last, self.rewards[:, None], 0.0)
        self.packed = {name: column[self.valid] for name, column in self.padded.items()}
        self.mask = torch.ones(int(self.lengths.sum()), dtype=torch.bool)
        self.weights = loss_weights(self.mask, self.lengths, aggregation="token-mean")


def pairs(data: Data, verl: ModuleType) -> dict[str, tuple[Callable[[], object], Callable[[], object], float]]:
    """Tandem's call, verl's call, and the largest ratio of their times that we promise."""
    mask, lengths, packed, padded = data.mask, data.lengths, data.packed, data.padded
    response = data.valid.float()
    index = data.groups.numpy()

    def whitened(credit: returns.Credit) -> Tensor:
        return returns.whiten(credit.advantages, mask)

    def of_groups(**how: Any) -> Tensor:
        return advantages.spread(advantages.group_baseline(data.rewards, data.groups, **how), mask, lengths)

    found: dict[str, tuple[Callable[[], object], Callable[[], object], float]] = {
        "gae": (
            lambda: whitened(returns.gae(packed["token_rewards"], packed["values"], mask, lengths, gamma=0.99, lam=0.95)),
            lambda: verl.compute_gae_advantage_return(padded["token_rewards"], padded["values"], response, 0.99, 0.95),
            0.2,
        ),
        "reinforce_pp": (
            lambda: whitened(returns.discounted_returns(packed["token_rewards"], mask, lengths, gamma=0.99)),
            lambda: verl.compute_reinforce_plus_plus_outcome_advantage(
                padded["token_rewards"], response, config=SimpleNamespace(gamma=0.99)
            ),
            0.2,
        ),
        "grpo": (
            of_groups,
            lambda: verl.compute_grpo_vectorized_outcome_advantage(padded["token_rewards"], response, index),
            0.5,
        ),
        "rloo": (
            lambda: of_groups(scale="none", leave_one_out=True),
            lambda: verl.compute_rloo_vectorized_outcome_advantage(padded["token_rewards"], response, index),
            0.5,
        ),
    }
    losses = {
        "ppo_clip": ("vanilla", "ppo_clip"),
        "gspo": ("gspo", "sequence_clip"),
        "cispo": ("cispo", "cispo"),
        "sapo": ("sapo", "sapo"),
        "gmpo": ("geo_mean", "geometric_mean"),
        "dppo_tv": ("dppo_tv", "dppo_tv"),
        "dppo_kl": ("dppo_kl", "dppo_kl"),
    }
    config = import_module("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True
    )
    for name, (theirs, ours) in losses.items():
        found[f"loss_{name}"] = (_our_loss(data, ours), _their_loss(data, verl.get_policy_loss_fn(theirs), config), 0.8)
    return found


def _our_loss(data: Data, name: str) -> Callable[[], object]:
    function = loss_function(name)
    columns = {"old_logprobs": data.packed["old_logprobs"], "advantages": data.packed["advantages"]}

    def run() -> None:
        logprobs = data.packed["logprobs"].clone().requires_grad_()
        result = function(LossInputs(logprobs, data.mask, data.lengths, columns))
        aggregate(result.loss, data.weights, data.mask).backward()

    return run


def _their_loss(data: Data, function: Callable[..., Any], config: object) -> Callable[[], object]:
    response, padded = data.valid.float(), data.padded

    def run() -> None:
        logprobs = padded["logprobs"].clone().requires_grad_()
        function(
            old_log_prob=padded["old_logprobs"],
            log_prob=logprobs,
            advantages=padded["advantages"],
            response_mask=response,
            loss_agg_mode="token-mean",
            config=config,
        )[0].backward()

    return run


def milliseconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return 1000 * (time.process_time() - began)


def main() -> int:
    try:
        from verl.trainer.ppo import core_algos
    except ImportError as error:
        print(f"the peer is missing ({error}): pip install verl==0.9.1 in an environment of its own", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    report: dict[str, dict[str, float | bool]] = {}
    for name, (ours, theirs, limit) in pairs(Data(), core_algos).items():
        ours(), theirs()
        times = [(milliseconds(ours), milliseconds(theirs)) for _ in range(ROUNDS)]
        best, peer = (min(each) for each in zip(*times, strict=True))
        ratio = best / peer
        report[name] = {
            "tandem_ms": round(best, 2), "verl_ms": round(peer, 2), "ratio": round(ratio, 3), "limit": limit, "ok": ratio <= limit,
        }  # fmt: skip
    print(json.dumps({"rows": ROWS, "tokens": TOKENS, "threads": 1, "results": report}, indent=2))
    return 0 if all(result["ok"] for result in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
