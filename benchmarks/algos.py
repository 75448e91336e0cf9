"""The algorithm functions against verl 0.9.1's, CPU milliseconds on one thread, both in one run.

    pip install verl==0.9.1     # in an environment of its own, beside Tandem
    python benchmarks/algos.py  # prints JSON; exits with 1 where a ratio is above its limit

512 rows of 256 to 1,024 tokens, float32. verl takes padded [B, T] tables and Tandem packed tokens: each gets its own
layout, made before the clock starts. Both make what an update reads, one value a token. Whitening is included where verl
has it, the choice of tokens where a loss draws some, metrics on both sides. Policy losses are forward and backward. The two
take turns; the clock is that of the process, and the best of all rounds counts, since noise only adds time.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tandem.algos import advantages, returns, selection
from tandem.algos.aggregation import aggregate, loss_weights
from tandem.algos.functions import loss_function
from tandem.algos.terms import LossInputs

ROWS, TOKENS, GROUP, ROUNDS = 512, 1024, 8, 40

LOSSES = {
    "ppo_clip": "vanilla",
    "reinforce": "gpg",
    "mirror_descent": "dro",
    "cispo": "cispo",
    "sapo": "sapo",
    "sequence_clip": "gspo",
    "geometric_mean": "geo_mean",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "kl_cov": "kl_cov",
    "clip_cov": "clip_cov",
}
"""Tandem's name of each policy loss that verl has too, and verl's."""

Pair = tuple[Callable[[], object], Callable[[], object], float]
"""Tandem's call, verl's call, and the largest ratio of their times that we promise."""


class Data:
    """The same numbers in both layouts. Every packed token counts, as every token does that verl does not pad; with
    `prompts`, the first third of each row does not, as where a row is packed with its prompt.
    """

    def __init__(self, *, prompts: bool = False) -> None:
        seeded = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(TOKENS // 4, TOKENS + 1, (ROWS,), generator=seeded)
        self.valid = torch.arange(TOKENS) < self.lengths[:, None]
        self.groups = torch.arange(ROWS) // GROUP
        self.rewards = torch.rand(ROWS, generator=seeded)

        def normal() -> Tensor:
            return torch.randn(ROWS, TOKENS, generator=seeded)

        old = -(normal() ** 2) - 1e-3
        table = {"values": normal(), "old_logprobs": old, "logprobs": (old + 0.1 * normal()).clamp(max=-1e-4)}
        table["advantages"] = normal()
        last = torch.arange(TOKENS) == self.lengths[:, None] - 1
        table["token_rewards"] = torch.where(last, self.rewards[:, None], 0.0)
        self.padded = {name: column.where(self.valid, 0) for name, column in table.items()}
        self.packed = {name: column[self.valid] for name, column in self.padded.items()}
        counts = torch.arange(TOKENS) >= (self.lengths // 3 if prompts else torch.zeros_like(self.lengths))[:, None]
        self.mask = counts[self.valid]
        self.weights = loss_weights(self.mask, self.lengths, aggregation="token-mean")


def estimators(data: Data, verl: ModuleType) -> dict[str, Pair]:
    mask, lengths, packed, padded = data.mask, data.lengths, data.packed, data.padded
    response, index = data.valid.float(), data.groups.numpy()

    def whitened(credit: returns.Credit) -> Tensor:
        return returns.whiten(credit.advantages, mask)

    def of_groups(**how: Any) -> Tensor:
        return advantages.spread(advantages.group_baseline(data.rewards, data.groups, **how), mask, lengths)

    return {
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


def losses(data: Data, verl: ModuleType) -> dict[str, Pair]:
    configs = import_module("verl.workers.config")
    config = configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        policy_loss=configs.PolicyLossConfig(dro_beta=0.1),
    )
    return {
        f"loss_{ours}": (_our_loss(data, ours), _their_loss(data, verl.get_policy_loss_fn(theirs), config), 0.8)
        for ours, theirs in LOSSES.items()
    }


def _our_loss(data: Data, name: str) -> Callable[[], object]:
    function = loss_function(name)
    old, credit, mask = data.packed["old_logprobs"], data.packed["advantages"], data.mask
    chosen: dict[str, Callable[[], Tensor]] = {
        "kl_cov": lambda: selection.most_covariant(old, credit, mask),
        "clip_cov": lambda: selection.random_covariant(old, credit, mask, torch.rand(len(mask))),
    }

    def run() -> None:
        columns = {"old_logprobs": old, "advantages": credit}
        if name in chosen:
            columns[{"kl_cov": "most_covariant", "clip_cov": "random_covariant"}[name]] = chosen[name]()
        logprobs = data.packed["logprobs"].clone().requires_grad_()
        result = function(LossInputs(logprobs, mask, data.lengths, columns))
        aggregate(result.loss, data.weights, mask).backward()

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


def measured(pair: Pair, with_prompts: Callable[[], object]) -> dict[str, float | bool]:
    """prompts_ms: Tandem's time where a third of the same tokens is masked; no limit is on it."""
    ours, theirs, limit = pair
    calls = (ours, theirs, with_prompts)
    for call in calls:
        call()
    best, peer, masked = (min(each) for each in zip(*([milliseconds(call) for call in calls] for _ in range(ROUNDS)), strict=True))
    ratio = best / peer
    times = {"tandem_ms": round(best, 3), "verl_ms": round(peer, 3), "prompts_ms": round(masked, 3)}
    return {**times, "ratio": round(ratio, 3), "limit": limit, "ok": ratio <= limit}


def main() -> int:
    try:
        from verl.trainer.ppo import core_algos
    except ImportError as error:
        print(f"the peer is missing ({error}): pip install verl==0.9.1 in an environment of its own", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    pairs, prompts = ({**estimators(data, core_algos), **losses(data, core_algos)} for data in (Data(), Data(prompts=True)))
    results = {name: measured(pair, prompts[name][0]) for name, pair in pairs.items()}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"rows": ROWS, "tokens": TOKENS, "threads": 1, "rounds": ROUNDS, **versions, "results": results}, indent=2))
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
