"""The standard stages. `on_rows` makes one of a pure function; a stage that runs a model goes through its WorkerGroup.

Legend: B rows, N packed tokens, E episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tandem.algos import table
from tandem.algos.advantages import spread
from tandem.data_proto import DataProto
from tandem.ports import TransferQueue, WorkerGroup
from tandem.trainer.learner import PolicyWorker
from tandem.trainer.plan import BatchStage
from tandem.types import Algorithm, BatchRef, Key, Metrics, Scope, Stage


def on_rows(
    name: str,
    needs: frozenset[str],
    gives: frozenset[str],
    function: Callable[[DataProto], tuple[DataProto, Metrics]],
    queue: TransferQueue,
    scope: Scope,
) -> BatchStage:
    """A stage without a model: `function` takes rows with the columns `needs` and returns them with `gives` added."""

    async def run(batch: BatchRef) -> tuple[BatchRef, Metrics]:
        rows, metrics = function(await queue.get(batch.keys, needs))
        await queue.write(rows.only(gives))
        return replace(batch, columns=batch.columns | gives), metrics

    return Stage(name, needs, gives, run, scope)


def advantages(algorithm: Algorithm, queue: TransferQueue) -> BatchStage:
    """Column `advantages` (float32 [N]) by the algorithm's estimator. Scope: the batch, since some scale by all of it."""
    return on_rows(
        "advantages",
        needs=frozenset({"rewards", "mask"}),
        gives=frozenset({"advantages"}),
        function=lambda rows: episode_advantages(rows, algorithm),
        queue=queue,
        scope="batch",
    )


def episode_advantages(rows: DataProto, algorithm: Algorithm) -> tuple[DataProto, Metrics]:
    """One advantage an episode, on the masked tokens of all its rows.

    Rows of one episode carry the same reward and are one entry of their group's statistics, however many they are.
    """
    first: dict[Key, int] = {}
    for i, key in enumerate(rows.keys):
        first.setdefault(key.place, i)
    places = {place: e for e, place in enumerate(first)}
    groups = {group: g for g, group in enumerate(dict.fromkeys(place.group for place in places))}
    rewards_E = rows["rewards"][list(first.values())]
    groups_E = torch.tensor([groups[place.group] for place in places])
    advantages_E = table.advantages(algorithm, rewards_E, groups_E)
    advantages_B = advantages_E[[places[key.place] for key in rows.keys]]
    moved = torch.zeros(len(groups)).index_add_(0, groups_E, advantages_E.abs()) > 0
    metrics = Metrics.mean({"train/advantage_abs": advantages_E.abs().mean().item()}, len(places))
    metrics += Metrics.mean({"train/groups_without_advantage": 1 - moved.float().mean().item()}, len(groups))
    return rows.with_columns(token={"advantages": spread(advantages_B, rows["mask"], rows.lengths)}), metrics


def old_logprobs(policy: WorkerGroup) -> BatchStage:
    """Column `old_logprobs`: the trainer's logprobs before the update, and how far the sampler's are from them."""
    gives = frozenset({"old_logprobs"})

    async def run(batch: BatchRef) -> tuple[BatchRef, Metrics]:
        metrics = await policy.call(PolicyWorker.forward, batch, "old_logprobs", against="rollout_logprobs")
        return replace(batch, columns=batch.columns | gives), metrics

    needs = frozenset({"tokens", "mask", "temperature", "rollout_logprobs"})
    return Stage("old_logprobs", needs, gives, run, scope="row", weights="current")
