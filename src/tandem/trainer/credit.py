"""What the update made of each episode, for people: its advantage and how far the policy was from its sampler."""

from __future__ import annotations

import torch

from tandem.ports import TransferQueue
from tandem.types import BatchRef, Json, Key

COLUMNS = frozenset({"advantages", "old_logprobs", "rollout_logprobs"})
"""Those that tell of credit, where a batch has them."""


async def credit(queue: TransferQueue, batch: BatchRef, columns: frozenset[str]) -> dict[Key, dict[str, Json]]:
    """By episode: `advantage`, and `ratio` of the policy before the update to the sampler, each the mean over its counted tokens.

    columns: those of COLUMNS that the batch has. An episode without a counted token has neither.
    """
    if "advantages" not in columns:
        return {}
    rows = await queue.get(batch.keys, columns | {"mask"})
    mask = rows["mask"]
    told = {"advantage": rows["advantages"]}
    if columns >= {"old_logprobs", "rollout_logprobs"}:
        told["ratio"] = (rows["old_logprobs"] - rows["rollout_logprobs"]).exp()
    places = {place: index for index, place in enumerate(dict.fromkeys(key.place for key in batch.keys))}
    episodes = torch.tensor([places[key.place] for key in batch.keys])[rows.row_of_token[mask]]
    counts = torch.bincount(episodes, minlength=len(places))
    means = {name: torch.bincount(episodes, column[mask], len(places)) / counts for name, column in told.items()}
    return {
        place: {name: float(f"{mean[index].item():.6g}") for name, mean in means.items()}
        for place, index in places.items()
        if counts[index]
    }
