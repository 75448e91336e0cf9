"""Law 6: observation tokens neither cost nor earn anything.

With policy logprobs held fixed, inserting observation tokens changes no policy token's loss or advantage; appending
them changes nothing at all; the reward credited equals the reward given.
"""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos import advantages, aggregation
from tandem.algos.aggregation import AGGREGATIONS, Aggregation
from tandem.algos.columns import loss_ref
from tandem.algos.functions import loss_function
from tandem.algos.table import configure
from tandem.algos.terms import LossInputs
from tandem.data_proto import DataProto
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tests.laws.breaking import Breaker
from tests.train.rows import VOCAB, make_rows, tiny_decoder

GRPO = loss_ref(configure("grpo", {"kl_coef": 0.2}))
LENGTHS = st.lists(st.integers(2, 6), min_size=1, max_size=4)
quickly = settings(max_examples=40, phases=[Phase.explicit, Phase.generate])


def _with_observations(batch: DataProto, after: list[int]) -> DataProto:
    """One observation token behind each of these packed positions, its other columns full of NaN."""
    order = sorted([*range(batch.num_tokens), *after])  # a position that stands twice is followed by an observation
    seen: set[int] = set()
    is_new = torch.tensor([at in seen or bool(seen.add(at)) for at in order])
    index = torch.tensor(order)
    garbage = {"tokens": VOCAB - 1, "mask": False}
    token = {
        name: torch.where(is_new, torch.tensor(garbage.get(name, torch.nan), dtype=batch[name].dtype), batch[name][index])
        for name in batch.token_level
    }
    more = torch.bincount(batch.row_of_token[torch.tensor(after, dtype=torch.int64)], minlength=len(batch))
    return DataProto.make(batch.keys, batch.lengths + more, token=token, row={"temperature": batch["temperature"]})


def _policy_tokens(batch: DataProto, mode: Aggregation) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss, its gradient and the advantage of each policy token; logprobs are a column of the batch."""
    rewards = torch.linspace(0, 1, len(batch))
    of_group = advantages.group_baseline(rewards, torch.zeros(len(batch), dtype=torch.int64))
    credit = advantages.spread(of_group, batch["mask"], batch.lengths)
    constant = 5 if mode == "seq-mean-token-sum-norm" else None
    weights = aggregation.loss_weights(batch["mask"], batch.lengths, aggregation=mode, length_constant=constant)
    logprobs = batch["logprobs"].clone().requires_grad_()
    columns = {**batch.batch, "advantages": credit}
    inputs = LossInputs(logprobs, batch["mask"], batch.lengths, columns)
    loss = weights * loss_function(GRPO.name)(inputs, kl_coef=0.2).loss
    loss.sum().backward()
    assert logprobs.grad is not None
    assert not bool(loss[~batch["mask"]].any())
    assert not bool(logprobs.grad[~batch["mask"]].any())
    counted = batch["mask"]
    return loss.detach()[counted], logprobs.grad[counted], credit[counted]


@quickly
@given(LENGTHS, st.sampled_from(AGGREGATIONS), st.data())
def check_observations_change_no_policy_token(lengths: list[int], mode: Aggregation, draw: st.DataObject) -> None:
    batch = make_rows(lengths, seed=sum(lengths))
    batch = batch.with_columns(token={"logprobs": batch["old_logprobs"] + 0.3 * torch.sin(batch["tokens"].float())})
    after = draw.draw(st.lists(st.integers(0, batch.num_tokens - 1), max_size=12))
    for before, now in zip(_policy_tokens(batch, mode), _policy_tokens(_with_observations(batch, after), mode), strict=True):
        assert torch.equal(before, now)


def check_appended_observations_change_nothing_at_all() -> None:
    """Through the model: logprobs, loss, metrics and the gradient of every parameter, to the bit."""
    batch = make_rows([6, 4, 5])
    ends = [offset - 1 for offset in batch.offsets[1:]]
    appended = _with_observations(batch, [ends[0]] * 3 + [ends[2]] * 9)
    found: list[tuple[dict[str, float], Tensor, list[Tensor]]] = []
    for each in (batch, appended):
        weights = aggregation.loss_weights(each["mask"], each.lengths, aggregation="seq-mean-token-mean")
        engine = TorchEngine(tiny_decoder(), TrainConfig())
        metrics, out = engine.forward_backward(each.with_columns(token={"loss_weights": weights}), GRPO)
        gradients = [parameter.grad for parameter in engine.decoder.parameters() if parameter.grad is not None]
        found.append((metrics.values_by_name(), out["logprobs"][each["mask"]], gradients))
    (metrics, logprobs, gradients), (other_metrics, other_logprobs, other_gradients) = found
    assert metrics == other_metrics
    assert torch.equal(logprobs, other_logprobs)
    assert all(torch.equal(other, gradient) for other, gradient in zip(other_gradients, gradients, strict=True))


@quickly
@given(LENGTHS, st.data())
def check_the_reward_credited_is_the_reward_given(lengths: list[int], draw: st.DataObject) -> None:
    """Every policy token carries its row's credit, and over a row the credit averages to it, tail observations or not."""
    batch = make_rows(lengths, seed=sum(lengths))
    ends = [offset - 1 for offset in batch.offsets[1:]]
    batch = _with_observations(batch, draw.draw(st.lists(st.sampled_from(ends), max_size=6)))
    given = torch.arange(1.0, len(batch) + 1)
    credit = advantages.spread(given, batch["mask"], batch.lengths)
    assert torch.equal(credit, torch.where(batch["mask"], given[batch.row_of_token], 0.0))
    weights = aggregation.loss_weights(batch["mask"], batch.lengths, aggregation="seq-mean-token-mean")
    torch.testing.assert_close(aggregation.aggregate(credit, weights, batch["mask"]), given.mean(), atol=1e-6, rtol=1e-6)


test_insertion = check_observations_change_no_policy_token
test_appending = check_appended_observations_change_nothing_at_all
test_credit = check_the_reward_credited_is_the_reward_given


def _weights_by_length(mask: Tensor, lengths: Tensor, *, aggregation: str = "token-mean", **_: object) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.where(mask, 1 / (len(lengths) * lengths[rows].float()), 0.0)


def _on_the_last_token(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    out = torch.zeros(len(mask))
    out[lengths.cumsum(0) - 1] = values.float()
    return torch.where(mask, out, 0.0)


BREAKERS = [
    Breaker(
        law=6,
        name="observations count in the denominator",
        target="tandem.algos.aggregation:loss_weights",
        replacement=_weights_by_length,
        check=check_observations_change_no_policy_token,
    ),
    Breaker(
        law=6,
        name="observations count in the denominator, appended",
        target="tandem.algos.aggregation:loss_weights",
        replacement=_weights_by_length,
        check=check_appended_observations_change_nothing_at_all,
    ),
    Breaker(
        law=6,
        name="the reward sits on the last token, which may be masked",
        target="tandem.algos.advantages:spread",
        replacement=_on_the_last_token,
        check=check_the_reward_credited_is_the_reward_given,
    ),
]
