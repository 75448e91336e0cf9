"""The standard stages. `on_rows` makes one of a pure function; a stage that runs a model goes through its WorkerGroup.

Legend: B rows, N packed tokens, E episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from tandem.algos import columns
from tandem.algos.segments import row_counts, row_max
from tandem.algos.values import explained_variance
from tandem.data_proto import DataProto
from tandem.ports import TransferQueue, WorkerGroup
from tandem.trainer.fetch import fetch, require_whole_groups
from tandem.trainer.plan import BatchStage
from tandem.trainer.workers import ModelWorker
from tandem.types import Algorithm, BatchRef, Key, Metrics, Scope, Stage, WeightUse


def on_rows(
    name: str,
    needs: frozenset[str],
    gives: frozenset[str],
    function: Callable[[DataProto], tuple[DataProto, Metrics]],
    queue: TransferQueue,
    scope: Scope,
) -> BatchStage:
    """A stage without a model: `function` takes rows with the columns `needs` and returns them with `gives` added.

    Beyond scope "row" it refuses a batch that holds a part of a group.
    """

    async def run(batch: BatchRef) -> tuple[BatchRef, Metrics]:
        found = await fetch(queue, batch, needs)
        if scope != "row":
            require_whole_groups(found)
        rows, metrics = function(found)
        await queue.write(rows.only(gives))
        return replace(batch, columns=batch.columns | gives), metrics

    return Stage(name, needs, gives, run, scope)


def advantages(algorithm: Algorithm, queue: TransferQueue) -> BatchStage:
    """Column `advantages` (float32 [N]) by the algorithm's estimator, and `returns` from one of tokens.

    Scope: the batch, since some scale by all of it.
    """
    return on_rows(
        "advantages",
        needs=columns.credit_needs(algorithm),
        gives=columns.credit_gives(algorithm),
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
    groups_E = torch.tensor([groups[place.group] for place in places])
    episode_B = torch.tensor([places[key.place] for key in rows.keys])
    counts_B = row_counts(rows["mask"], rows.lengths)
    of_rows = {**rows.batch, "lengths": rows.lengths, "groups": groups_E[episode_B]}
    of_episodes = {name: column[list(first.values())] for name, column in rows.batch.items() if name not in rows.token_level}
    of_episodes |= {"groups": groups_E, "token_counts": counts_B.new_zeros(len(places)).index_add(0, episode_B, counts_B)}
    found = columns.credit(algorithm, of_rows, of_episodes, episode_B)
    size_B = row_max(found["advantages"].abs(), rows["mask"], rows.lengths)
    size_E = size_B.new_zeros(len(places)).scatter_reduce(0, episode_B, size_B, "amax", include_self=False)
    moved = size_E.new_zeros(len(groups)).index_add(0, groups_E, size_E) > 0
    metrics = Metrics.mean({"train/advantage_abs": size_E.mean().item()}, len(places))
    metrics += Metrics.mean({"train/groups_without_advantage": 1 - moved.float().mean().item()}, len(groups))
    if "values" in rows.columns and "returns" in found:
        explained = explained_variance(rows["values"], found["returns"], rows["mask"])
        metrics += Metrics({"critic/explained_variance": explained})
    return rows.with_columns(token={name: column.float() for name, column in found.items()}), metrics


def resample(algorithm: Algorithm, queue: TransferQueue, *, seed: int) -> BatchStage:
    """Row column `resample_counts`: how often each row's episode is drawn, with replacement, in as many draws as there are.

    No row is copied: the update weighs a row by its count. The draws depend on seed, keys and rewards alone.
    """
    gives = frozenset({"resample_counts"})
    return on_rows("resample", frozenset({"rewards"}), gives, lambda rows: _resampled(rows, algorithm, seed), queue, "batch")


def _resampled(rows: DataProto, algorithm: Algorithm, seed: int) -> tuple[DataProto, Metrics]:
    first = {key.place: i for i, key in reversed(list(enumerate(rows.keys)))}
    places = sorted(first)
    rewards_E = rows["rewards"][[first[place] for place in places]]
    counts_E = columns.resampling(algorithm, rewards_E, torch.tensor([float(_random(seed, place, 1)[0]) for place in places]))
    counts = dict(zip(places, cast("list[float]", counts_E.tolist()), strict=True))
    metrics = Metrics.mean({"train/resampled_frac": (counts_E > 0).float().mean().item()}, len(places))
    metrics += Metrics.mean({"train/resampled_reward": (counts_E * rewards_E).sum().item() / len(places)}, len(places))
    return rows.with_columns(row={"resample_counts": torch.tensor([counts[key.place] for key in rows.keys])}), metrics


def derived(algorithm: Algorithm, queue: TransferQueue, *, seed: int) -> tuple[BatchStage, ...]:
    """A stage for each column that the algorithm derives from a whole batch: `correction`, `token_rewards`, ...

    seed: of the random numbers of Clip-Cov's draw, which depend on it, a row's key and a token's place alone.
    """

    def stage(column: str, needs: frozenset[str]) -> BatchStage:
        def function(rows: DataProto) -> tuple[DataProto, Metrics]:
            known = {**rows.batch, "lengths": rows.lengths}
            if "uniforms" in needs:
                known["uniforms"] = _uniforms(rows, seed)
            values, metrics = columns.derive(algorithm, column, known)
            return rows.with_columns(token={column: values.float()}), metrics.prefixed("train")

        return on_rows(column, needs - {"uniforms"}, frozenset({column}), function, queue, "batch")

    return tuple(stage(column, needs) for column, needs in columns.derived_columns(algorithm).items())


def _uniforms(rows: DataProto, seed: int) -> torch.Tensor:
    """A number in [0, 1) for each token, [N]."""
    lengths = cast("list[int]", rows.lengths.tolist())
    return torch.as_tensor(np.concatenate([_random(seed, key, n) for key, n in zip(rows.keys, lengths, strict=True)]))


def _random(seed: int, key: Key, n: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) of this row, [n]."""
    return np.random.Generator(np.random.Philox([seed, key.ordinal, key.member, key.branch])).random(n)


def bypass(queue: TransferQueue) -> BatchStage:
    """Column `old_logprobs` without a pass of the trainer: the sampler's own, so that the loss corrects the whole mismatch."""
    return _sampled("bypass", queue)


def on_policy(queue: TransferQueue) -> BatchStage:
    """Column `old_logprobs` without a pass of the trainer, where law 5 says what it would give: the sampler's own, bit for bit.

    The update measures whether that holds (`TrainWorker`).
    """
    return _sampled("on_policy", queue)


def _sampled(name: str, queue: TransferQueue) -> BatchStage:
    return on_rows(
        name,
        needs=frozenset({"rollout_logprobs"}),
        gives=frozenset({"old_logprobs"}),
        function=lambda rows: (rows.with_columns(token={"old_logprobs": rows["rollout_logprobs"]}), Metrics()),
        queue=queue,
        scope="row",
    )


def model_outputs(
    name: str,
    workers: WorkerGroup,
    outputs: Mapping[str, str],
    weights: WeightUse,
    *,
    against: str | None = None,
    top: int = 0,
) -> BatchStage:
    """Columns that a model gives before the update, in one pass: see `ModelWorker.forward`.

    against: for the policy's logprobs, the sampler's, to measure how far they are apart. top: how many of the likeliest tokens.
    """
    gives = frozenset(outputs)

    async def run(batch: BatchRef) -> tuple[BatchRef, Metrics]:
        metrics = await workers.call(ModelWorker.forward, batch, dict(outputs), against=against, top=top)
        return replace(batch, columns=batch.columns | gives), metrics

    needs = frozenset({"tokens", "mask", "temperature"} | ({against} if against else set[str]()))
    return Stage(name, needs, gives, run, scope="row", weights=weights)
