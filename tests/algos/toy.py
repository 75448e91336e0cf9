"""A policy that is small enough to know: expectations over its responses are sums, and nothing is sampled.

It writes up to T tokens of three from a table of scores, scores[t, token before, token], and ends at token 0 or after
T. Every response, and every batch of them, is enumerated; what a row of the table makes of a batch goes through the
same functions as in training.

Legend: R responses, N tokens of all responses, packed; S = 9 T scores, flat.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.types import Algorithm
from tests.algos.pipeline import Rows, step_loss, with_columns

V = 3


def scores_of(steps: int, seed: int) -> Tensor:
    """[T, V, V], a table of scores."""
    return torch.randn(steps, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _responses(steps: int, begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if len(begun) == steps or begun[-1:] == (0,):
        yield begun
        return
    for token in range(V):
        yield from _responses(steps, (*begun, token))


@dataclass(frozen=True)
class Toy:
    """scores: [T, V, V] of the policy that is trained. sampler: of the one that wrote the responses; None is the same."""

    scores: Tensor
    sampler: Tensor | None = None
    responses: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "responses", list(_responses(len(self.scores))))

    @property
    def lengths(self) -> Tensor:
        """[R]."""
        return torch.tensor([len(response) for response in self.responses])

    def of_tokens(self, table: Tensor) -> Tensor:
        """[N]: the entry of a table [T, V, V] for each token."""
        places = [(t, (0, *response)[t], token) for response in self.responses for t, token in enumerate(response)]
        return table[tuple(torch.tensor(places).T)]

    def logprobs(self, scores: Tensor) -> Tensor:
        """[N]."""
        return self.of_tokens(scores.log_softmax(-1))

    def sum(self, values: Tensor) -> Tensor:
        """[R]: of the tokens of each response."""
        return torch.stack([part.sum() for part in values.split(self.lengths.tolist())])

    def chances(self, scores: Tensor) -> Tensor:
        """[R]: how likely each response is."""
        return self.sum(self.logprobs(scores)).exp()

    def gradient(self, objective: Callable[[Tensor], Tensor]) -> Tensor:
        """[S]: of a function of the scores, at the policy's."""
        scores = self.scores.clone().requires_grad_()
        (found,) = torch.autograd.grad(objective(scores), scores)
        return found.flatten()

    def mean(self, values: Tensor) -> Tensor:
        """[S]: the gradient of the expectation of `values` [R], one a response."""
        return self.gradient(lambda scores: (self.chances(scores) * values).sum())

    def expected_step(self, chosen: Algorithm, rows: Rows, group: int) -> Tensor:
        """[S]: minus the expected gradient of the algorithm's loss over all batches of one group.

        rows: columns of all responses, [N] or [R]. The order of a batch is nothing to an algorithm (law 4), so that each
        set of responses is taken once, as likely as all its orders together.
        """
        sampler = self.scores if self.sampler is None else self.sampler
        old, likely = self.logprobs(sampler), self.chances(sampler).tolist()
        rows = {"old_logprobs": old, "rollout_logprobs": old, "place": torch.arange(len(old)), **rows}
        rows |= {"mask": torch.ones(len(old), dtype=torch.bool), "temperature": torch.ones(len(self.responses))}
        starts = [0, *self.lengths.cumsum(0).tolist()]
        batches: list[Rows] = []
        for batch in itertools.combinations_with_replacement(range(len(self.responses)), group):
            at = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in batch])
            made = {name: column[at if len(column) == len(old) else list(batch)] for name, column in rows.items()}
            made |= {"lengths": self.lengths[list(batch)], "groups": torch.zeros(group, dtype=torch.int64)}
            made = with_columns(chosen, made)
            orders = math.factorial(group) / math.prod(math.factorial(num) for num in Counter(batch).values())
            made["loss_weights"] = made["loss_weights"].double() * orders * math.prod(likely[i] for i in batch)
            batches.append(made)
        # A loss is one of tokens or rows, so that all batches are one, and each counts for what it is likely.
        together = {name: torch.cat([made[name] for made in batches]) for name in batches[0]}
        return self.gradient(lambda scores: -step_loss(chosen, together, self.logprobs(scores)[together["place"]]))


def along(estimate: Tensor, truth: Tensor) -> float:
    """How much of the true gradient the estimate has: 1 is all of it, below 0 points away from it."""
    return float(estimate @ truth / (truth @ truth))
