"""The algorithm functions against verl 0.9.1's: CPU milliseconds on one thread, in turns of one run.

    pip install verl==0.9.1     # in an environment of its own, beside Tandem
    python benchmarks/algos.py  # the last line is JSON; exits with 1 where a ratio is below its floor

512 rows of 256 to 1,024 tokens, float32. Each library gets its own layout, made before the clock starts: Tandem packed tokens
and whole numbers as ids of groups, verl padded [B, T] tables, masks of floats, and the strings that its trainer gives it as
ids. Both make what an update reads, one value a token. Whitening is included where verl has it, the choice of tokens where a
loss draws some, metrics on both sides. Policy losses are forward and backward. A turn is as many calls as take verl some
milliseconds; a ratio is verl's time by Tandem's, and the median of all turns counts.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from lines import Call, cpu_seconds, publish, row
from torch import Tensor

from tandem.algos import advantages, returns, selection
from tandem.algos.aggregation import aggregate, loss_weights
from tandem.algos.functions import loss_function
from tandem.algos.terms import LossInputs

ROWS, TOKENS, GROUP, TURNS, TURN_S = 512, 1024, 8, 31, 0.005

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

Calls = tuple[Call, ...]
"""Tandem's call and verl's, and where there is one, verl's as nothing calls it that is in verl, on which no floor is."""
FLOORS = {"gae": (5.0, 10.0), "reinforce_pp": (5.0, 10.0), "grpo": (2.0, 4.0), "rloo": (2.0, 4.0)}
OF_LOSSES = (1.25, 2.0)
"""The ratio that is promised, and the one that is hoped for."""


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


def estimators(data: Data, verl: ModuleType) -> dict[str, Calls]:
    mask, lengths, packed, padded = data.mask, data.lengths, data.packed, data.padded
    response, numbers = data.valid.float(), data.groups.numpy()
    strings = np.array([f"prompt-{group}" for group in numbers], dtype=object)

    def whitened(credit: returns.Credit) -> Tensor:
        return returns.whiten(credit.advantages, mask)

    def of_groups(**how: Any) -> Tensor:
        return advantages.spread(advantages.group_baseline(data.rewards, data.groups, **how), mask, lengths)

    def of_verl(function: Callable[..., object]) -> Calls:
        """With ids as verl's trainer makes them, and with whole numbers."""
        return tuple(lambda ids=ids: function(padded["token_rewards"], response, ids) for ids in (strings, numbers))

    return {
        "gae": (
            lambda: whitened(returns.gae(packed["token_rewards"], packed["values"], mask, lengths, gamma=0.99, lam=0.95)),
            lambda: verl.compute_gae_advantage_return(padded["token_rewards"], padded["values"], response, 0.99, 0.95),
        ),
        "reinforce_pp": (
            lambda: whitened(returns.discounted_returns(packed["token_rewards"], mask, lengths, gamma=0.99)),
            lambda: verl.compute_reinforce_plus_plus_outcome_advantage(
                padded["token_rewards"], response, config=SimpleNamespace(gamma=0.99)
            ),
        ),
        "grpo": (of_groups, *of_verl(verl.compute_grpo_vectorized_outcome_advantage)),
        "rloo": (
            lambda: of_groups(scale="none", leave_one_out=True),
            *of_verl(verl.compute_rloo_vectorized_outcome_advantage),
        ),
    }


def losses(data: Data, verl: ModuleType) -> dict[str, Calls]:
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
        f"loss_{ours}": (_our_loss(data, ours), _their_loss(data, verl.get_policy_loss_fn(theirs), config))
        for ours, theirs in LOSSES.items()
    }


def _our_loss(data: Data, name: str) -> Call:
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


def _their_loss(data: Data, function: Callable[..., Any], config: object) -> Call:
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


def measured(name: str, calls: Calls, with_prompts: Call) -> dict[str, Any]:
    """prompts_ms: Tandem's time where a third of the same tokens is masked; no floor is on it, nor on verl's with whole numbers."""
    names = (*("tandem_ms", "verl_ms", "verl_whole_numbers_ms")[: len(calls)], "prompts_ms")
    times = by_turns((*calls, with_prompts))
    ratios = [theirs / ours for ours, theirs in zip(times[0], times[1], strict=True)]
    more = {name: round(1000 * statistics.median(of), 3) for name, of in zip(names, times, strict=True)}
    return row(name, "verl 0.9.1", ratios, *FLOORS.get(name, OF_LOSSES), **more)


def by_turns(calls: Calls) -> list[list[float]]:
    """For each of these, the CPU seconds of one call in each turn."""
    for call in calls:
        call()
    num = math.ceil(TURN_S / max(cpu_seconds(calls[1]), 1e-6))

    def turn(call: Call) -> float:
        def repeated() -> None:
            for _ in range(num):
                call()

        return cpu_seconds(repeated) / num

    turns = [[turn(call) for call in calls] for _ in range(TURNS)]
    return [list(times) for times in zip(*turns, strict=True)]


def main() -> int:
    try:
        from verl.trainer.ppo import core_algos
    except ImportError as error:
        print(f"the peer is missing ({error}): pip install verl==0.9.1 in an environment of its own", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    cases, prompts = ({**estimators(data, core_algos), **losses(data, core_algos)} for data in (Data(), Data(prompts=True)))
    return publish("algos", [measured(name, calls, prompts[name][0]) for name, calls in cases.items()])


if __name__ == "__main__":
    sys.exit(main())
