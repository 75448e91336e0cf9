"""Law 3: denominators belong to the optimiser step and are computed before splitting.

For every aggregation the gradient is the same for any split over micro-batches and ranks; padding rows and fully
masked rows are inert, whatever stands in them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos import aggregation, terms
from tandem.algos.aggregation import AGGREGATIONS, Aggregation
from tandem.algos.columns import loss_ref
from tandem.algos.functions import loss_function
from tandem.algos.table import configure
from tandem.algos.terms import LossInputs
from tandem.data_proto import DataProto
from tandem.ports import Dispatch
from tandem.runtime import dispatch
from tandem.runtime.dispatch import scatter
from tandem.train import micro_batches
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.types import Key, LossRef
from tests.laws.breaking import Breaker
from tests.train.rows import make_rows, tiny_decoder

GRPO = loss_ref(configure("grpo", {"kl_coef": 0.2}))
DPO = loss_ref(configure("dpo"))
LENGTHS = st.lists(st.integers(2, 7), min_size=1, max_size=5)
MODES = st.sampled_from(AGGREGATIONS)
quickly = settings(max_examples=40, phases=[Phase.explicit, Phase.generate])


def _weights(batch: DataProto, mode: Aggregation, ranks: int = 1) -> Tensor:
    constant = 5 if mode == "seq-mean-token-sum-norm" else None
    return aggregation.loss_weights(batch["mask"], batch.lengths, aggregation=mode, length_constant=constant, ranks=ranks)


def _weighted(batch: DataProto, mode: Aggregation, ranks: int = 1) -> DataProto:
    return batch.with_columns(token={"loss_weights": _weights(batch, mode, ranks)})


def _parts(batch: DataProto, draw: st.DataObject) -> list[DataProto]:
    """Rows dealt to parts at random: each is what a micro-batch on some rank would hold."""
    num = draw.draw(st.integers(1, 4))
    owner = draw.draw(st.lists(st.integers(0, num - 1), min_size=len(batch), max_size=len(batch)))
    return [batch.select([row for row, part in enumerate(owner) if part == each]) for each in range(num)]


def _loss(batch: DataProto, logprobs: Tensor) -> Tensor:
    columns = {name: tensor.double() for name, tensor in batch.batch.items() if name != "mask"}
    inputs = LossInputs(logprobs, batch["mask"], batch.lengths, columns)
    token_loss = loss_function(GRPO.name)(inputs, kl_coef=0.2, log_ratio_clamp=None)
    return aggregation.aggregate(token_loss.loss, batch["loss_weights"], batch["mask"])


def _gradient_by_key(parts: list[DataProto]) -> tuple[float, dict[Key, Tensor]]:
    """Of the summed loss of these parts with respect to float64 logprobs."""
    total, found = 0.0, {}
    for part in parts:
        logprobs = (part["old_logprobs"].double() + 0.3 * torch.sin(part["tokens"].double())).requires_grad_()
        loss = _loss(part, logprobs)
        loss.backward()
        assert logprobs.grad is not None
        total += loss.item()
        found |= dict(zip(part.keys, logprobs.grad.split(part.lengths.tolist()), strict=True))
    return total, found


@quickly
@given(LENGTHS, MODES, st.data())
def check_the_gradient_does_not_depend_on_the_split_fp64(lengths: list[int], mode: Aggregation, draw: st.DataObject) -> None:
    batch = _weighted(make_rows(lengths, seed=sum(lengths)), mode)
    loss, whole = _gradient_by_key([batch])
    split_loss, split = _gradient_by_key(_parts(batch, draw))
    assert abs(loss - split_loss) <= 1e-12 * max(1, abs(loss))
    for key, gradient in whole.items():
        torch.testing.assert_close(split[key], gradient, atol=1e-12, rtol=0)


@quickly
@given(LENGTHS, MODES)
def check_the_loss_is_the_formula(lengths: list[int], mode: Aggregation) -> None:
    """Against the definitions of the modes, row by row and token by token."""
    batch = make_rows(lengths, seed=sum(lengths))
    losses = torch.sin(batch["tokens"].double())
    rows = [
        [value for value, counts in zip(values, counted, strict=True) if counts]
        for values, counted in zip(
            (part.tolist() for part in losses.split(lengths)), (part.tolist() for part in batch["mask"].split(lengths)), strict=True
        )
    ]
    sums, counts = [sum(row) for row in rows], [len(row) for row in rows]
    want = {
        "token-mean": sum(sums) / sum(counts),
        "seq-mean-token-mean": sum(s / n for s, n in zip(sums, counts, strict=True)) / len(rows),
        "seq-mean-token-sum": sum(sums) / len(rows),
        "seq-mean-token-sum-norm": sum(sums) / len(rows) / 5,
        "token-sum": sum(sums),
    }[mode]
    got = aggregation.aggregate(losses, _weights(batch, mode), batch["mask"]).item()
    assert abs(got - want) <= 1e-6 * max(1, abs(want))


def _engine_gradients(batches: list[DataProto], micro_batch_tokens: int, loss: LossRef = GRPO) -> dict[str, Tensor]:
    """Summed over ranks: one engine a batch, all with the same weights."""
    total: dict[str, Tensor] = {}
    for batch in batches:
        engine = TorchEngine(tiny_decoder(), TrainConfig(micro_batch_tokens=micro_batch_tokens))
        engine.forward_backward(batch, loss)
        for name, parameter in engine.decoder.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, torch.zeros(())) + parameter.grad
    return total


@settings(quickly, max_examples=12)
@given(LENGTHS, MODES, st.integers(1, 40), st.data())
def check_the_gradient_does_not_depend_on_the_split_fp32(
    lengths: list[int], mode: Aggregation, micro_batch_tokens: int, draw: st.DataObject
) -> None:
    batch = _weighted(make_rows(lengths, seed=sum(lengths)), mode)
    whole = _engine_gradients([batch], 1000)
    split = _engine_gradients(_parts(batch, draw), micro_batch_tokens)
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in whole.values()))
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-6 * scale, rtol=0)


def _pairs(lengths: list[tuple[int, int]]) -> DataProto:
    """Two rows a pair, far apart in the batch, all chosen ones first; in one more pair the chosen row has no counted token."""
    rows = make_rows([*(chosen for chosen, _ in lengths), 3, *(rejected for _, rejected in lengths), 2], seed=len(lengths))
    num = len(lengths) + 1
    mask = rows["mask"] & (rows.row_of_token != num - 1)
    keys = [Key("train", i % num, i // num) for i in range(2 * num)]
    pairs = replace(rows, keys=tuple(keys))
    chosen = torch.tensor([key.member == 0 for key in keys])
    return _weighted(pairs.with_columns(token={"mask": mask}, row={"chosen": chosen}), "seq-mean-token-mean")


@settings(quickly, max_examples=12)
@given(st.lists(st.tuples(st.integers(2, 7), st.integers(2, 7)), min_size=2, max_size=4), st.integers(1, 3), st.integers(1, 40))
def check_pairs_do_not_depend_on_the_split(lengths: list[tuple[int, int]], ranks: int, micro_batch_tokens: int) -> None:
    batch = _pairs(lengths)
    handles = scatter(Dispatch.SPLIT, (replace(batch.ref(), unit="group"),), {}, ranks, 1)
    whole = _engine_gradients([batch], 1000, DPO)
    split = _engine_gradients([batch.by_keys(args[0].keys) for args, _ in handles], micro_batch_tokens, DPO)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-6 * max(1.0, float(gradient.abs().max())), rtol=0)


@quickly
@given(LENGTHS, MODES, st.integers(2, 4), st.data())
def check_averaging_over_ranks_is_made_up_for(lengths: list[int], mode: Aggregation, ranks: int, draw: st.DataObject) -> None:
    batch = make_rows(lengths, seed=sum(lengths))
    loss, whole = _gradient_by_key([_weighted(batch, mode)])
    rank_loss, on_ranks = _gradient_by_key(_parts(_weighted(batch, mode, ranks), draw))
    assert abs(loss - rank_loss / ranks) <= 1e-6 * max(1, abs(loss))
    for key, gradient in whole.items():
        torch.testing.assert_close(on_ranks[key] / ranks, gradient, atol=1e-6, rtol=1e-6)


@quickly
@given(LENGTHS, MODES, st.data())
def check_rows_without_a_counted_token_are_inert(lengths: list[int], mode: Aggregation, draw: st.DataObject) -> None:
    """Padding rows (no token at all) and fully masked rows full of NaN and infinity."""
    batch = make_rows(lengths, seed=sum(lengths))
    idle = make_rows(draw.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3)), seed=9, space="idle")
    garbage = torch.full((idle.num_tokens,), draw.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf])))
    columns = dict.fromkeys(("old_logprobs", "ref_logprobs", "advantages", "loss_weights"), garbage)
    masked = idle.with_columns(token=columns | {"mask": torch.zeros(idle.num_tokens, dtype=torch.bool)})
    empty = DataProto.make(
        [Key("empty", 0)],
        [0],
        token={name: batch[name][:0] for name in batch.token_level},
        row={"temperature": torch.ones(1)},
    )
    more = DataProto.concat([masked, batch, empty])
    loss, alone = _gradient_by_key([_weighted(batch, mode)])
    same_loss, together = _gradient_by_key([_weighted(more, mode)])
    assert abs(same_loss - loss) <= 1e-12 * max(1, abs(loss))
    for key, gradient in alone.items():
        assert torch.equal(together[key], gradient)
    for key in masked.keys:
        assert not bool(together[key].any())


def check_idle_rows_leave_the_model_alone() -> None:
    """The same through the engine: parameter gradients to the bit."""
    batch = make_rows([5, 3])
    idle = make_rows([4, 6], seed=9, space="idle")
    garbage = dict.fromkeys(("old_logprobs", "ref_logprobs", "advantages"), torch.full((idle.num_tokens,), torch.nan))
    masked = idle.with_columns(token=garbage | {"mask": torch.zeros(idle.num_tokens, dtype=torch.bool)})
    alone = _engine_gradients([_weighted(batch, "seq-mean-token-mean")], 100)
    together = _engine_gradients([_weighted(DataProto.concat([batch, masked]), "seq-mean-token-mean")], 100)
    assert all(torch.equal(together[name], gradient) for name, gradient in alone.items())


test_split_fp64 = check_the_gradient_does_not_depend_on_the_split_fp64
test_formula = check_the_loss_is_the_formula
test_split_fp32 = check_the_gradient_does_not_depend_on_the_split_fp32
test_ranks = check_averaging_over_ranks_is_made_up_for
test_split_pairs = check_pairs_do_not_depend_on_the_split
test_inert_rows = check_rows_without_a_counted_token_are_inert
test_inert_rows_in_the_engine = check_idle_rows_leave_the_model_alone


def _mean_of_the_part(loss: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return terms.keep(loss, mask).sum() / mask.sum()


_loss_weights = aggregation.loss_weights


def _every_row_counts(mask: Tensor, lengths: Tensor, **params: object) -> Tensor:
    weights = _loss_weights(mask, lengths, **params)  # type: ignore[arg-type]
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    used = torch.zeros(len(lengths)).index_add_(0, rows, mask.float()) > 0
    return weights * used.sum() / len(lengths)


def _multiply_by_the_mask(values: Tensor, mask: Tensor, num_counted: int | None = None) -> Tensor:
    return values * mask


_micro_batches, _balanced = micro_batches.micro_batches, dispatch.balanced


def _rows_by_themselves(lengths: dict[int, int], max_tokens: int, owners: object = None, **how: bool) -> list[list[int]]:
    return _micro_batches(lengths, max_tokens, **how)


def _rows_to_any_rank(lengths: list[int], parts: int, owners: object = None) -> list[list[int]]:
    return _balanced(lengths, parts)


BREAKERS = [
    Breaker(
        law=3,
        name="a micro-batch cuts a pair",
        target="tandem.train.torch_engine:micro_batches",
        replacement=_rows_by_themselves,
        check=check_pairs_do_not_depend_on_the_split,
    ),
    Breaker(
        law=3,
        name="ranks share a pair",
        target="tandem.runtime.dispatch:balanced",
        replacement=_rows_to_any_rank,
        check=check_pairs_do_not_depend_on_the_split,
    ),
    Breaker(
        law=3,
        name="each micro-batch is normalised by itself",
        target="tandem.train.torch_engine:aggregate",
        replacement=_mean_of_the_part,
        check=check_the_gradient_does_not_depend_on_the_split_fp32,
    ),
    Breaker(
        law=3,
        name="masked rows count as sequences",
        target="tandem.algos.aggregation:loss_weights",
        replacement=_every_row_counts,
        check=check_rows_without_a_counted_token_are_inert,
    ),
    Breaker(
        law=3,
        name="masks multiply instead of selecting",
        target="tandem.algos.terms:keep",
        replacement=_multiply_by_the_mask,
        check=check_rows_without_a_counted_token_are_inert,
    ),
]
