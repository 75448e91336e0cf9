"""The engine that is sharded over ranks against the one that holds everything: two processes, gloo, tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.algos.aggregation import loss_weights
from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.errors import DeviceError, EmptyBatchError, ModelError, NonFiniteError
from tandem.models.auto import AutoDecoder
from tandem.models.hf import save_decoder
from tandem.models.lora import add_lora
from tandem.models.values import VALUE_HEAD, ValueModel
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.pool import PoolGroup
from tandem.runtime.process import Processes
from tandem.runtime.ray import RayCluster
from tandem.train.config import TrainConfig
from tandem.train.torch_engine import TorchEngine
from tandem.types import Key, Metrics
from tandem.weights import WeightShard
from tests.runtime.ray_cluster import cluster
from tests.train.ranked import Trained, Trainer, train, whole
from tests.train.rows import LORA, TINY, make_rows, tiny_auto, tiny_decoder, tiny_lora

FACTORY = "tests.train.ranked:Trainer"
GRPO = loss_ref(configure("grpo", {"kl_coef": 0.1}))
# Without moments, and with an eps above any gradient, AdamW is plain gradient descent with a rate of 0.2.
SGD = TrainConfig(lr=0.2e6, eps=1e6, betas=(0.0, 0.0), max_grad_norm=0.4, micro_batch_tokens=16, max_nonfinite=1)
LENGTHS = [7, 3, 5, 2, 6, 9]


class Pools:
    """Groups of ranks that live as long as the module's tests, and the loop that they are called in."""

    def __init__(self, runner: asyncio.Runner, groups: dict[int, PoolGroup]) -> None:
        self._runner, self._groups = runner, groups

    def weights(self) -> list[WeightShard]:
        """Of both ranks."""
        return [shard for shards in self.each(Trainer.weights) for shard in shards]

    def each(self, method: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
        """What each rank answers."""
        return self._runner.run(self._groups[ranks].call_each(method, *args, **options))


def processes(pools: Sequence[ResourcePool], logs: Path) -> Processes:
    return Processes(place(pools, Hardware(cores=sum(pool.ranks for pool in pools))), logs, limit_s=60)


def actors(pools: Sequence[ResourcePool], logs: Path) -> RayCluster:
    cluster()
    return RayCluster(pools, logs, limit_s=60)


@pytest.fixture(scope="module", name="pools", params=[processes, pytest.param(actors, marks=[pytest.mark.slow, pytest.mark.ray])])
def _pools(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pools]:
    logs = tmp_path_factory.mktemp("logs")
    with asyncio.Runner() as runner:
        sizes = (1, 2)
        runtime = request.param([ResourcePool(f"of-{size}", size) for size in sizes], logs)
        groups = {size: runtime.group("policy", f"of-{size}", FACTORY, collectives=True) for size in sizes}
        runner.run(runtime.__aenter__())
        yield Pools(runner, groups)
        runner.run(runtime.__aexit__(None, None, None))


# ------------------------------------------------------------------------------------- how a batch comes to ranks


def weighted(batch: DataProto, ranks: int) -> DataProto:
    return batch.with_columns(token={"loss_weights": loss_weights(batch["mask"], batch.lengths, ranks=ranks)})


def evenly(batch: DataProto) -> list[DataProto]:
    return [batch.select(range(0, len(batch), 2)), batch.select(range(1, len(batch), 2))]


def unevenly(batch: DataProto) -> list[DataProto]:
    return [batch.select([len(batch) - 1]), batch.select(range(len(batch) - 1))]


def to_one(batch: DataProto) -> list[DataProto]:
    return [batch.select([]), batch]


def with_masked_rows(batch: DataProto) -> list[DataProto]:
    """One rank gets rows that do not count, with garbage in them."""
    rows = batch.select([1, 2])
    keys = tuple(key._replace(member=1) for key in rows.keys)
    nothing = torch.full((rows.num_tokens,), torch.nan)
    masked = replace(rows, keys=keys).with_columns(
        token={"mask": torch.zeros(rows.num_tokens, dtype=torch.bool), "advantages": nothing, "loss_weights": nothing}
    )
    return [batch, masked]


SPLITS = [evenly, unevenly, to_one, with_masked_rows]
Split = Callable[[DataProto], list[DataProto]]


def batches(steps: int, ranks: int) -> list[DataProto]:
    return [weighted(make_rows(LENGTHS, seed), ranks) for seed in range(steps)]


def alone(steps: int, config: TrainConfig = SGD) -> Trained:
    return train(TorchEngine(tiny_decoder(), config), batches(steps, 1), GRPO)


def blocks(each: Sequence[Trained], name: str) -> dict[str, Tensor]:
    return whole([shard for trained in each for shard in getattr(trained, name)])


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max(), name


# ------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize(
    ("replicas", "config", "small"),
    [
        (1, replace(SGD, micro_batch_tokens=1), True),
        (1, SGD, True),
        (1, SGD, False),
        (1, replace(SGD, micro_batch_tokens=1000, activation_checkpointing=True), True),
        (2, SGD, True),
    ],
    ids=["row by row", "fsdp", "large", "all rows, recomputed", "hsdp"],
)
def test_two_ranks_train_as_one(pools: Pools, replicas: int, config: TrainConfig, small: bool) -> None:
    want = alone(5)
    for split in SPLITS:
        pools.each(Trainer.make, tiny_decoder(), config, replicas, small=small)
        ranks: list[Trained] = pools.each(Trainer.train, [split(batch) for batch in batches(5, 2)], GRPO)
        assert_close(blocks(ranks, "gradient"), whole(want.gradient))
        assert_close(blocks(ranks, "weights"), whole(want.weights))
        for step, metrics in enumerate(want.metrics):
            merged = sum((rank.metrics[step] for rank in ranks), Metrics())
            assert merged.keys() == metrics.keys()
            for name, metric in metrics.items():
                assert merged[name].value == pytest.approx(metric.value, rel=1e-6, abs=1e-6), (split.__name__, name)


def test_the_top_layers_alone_are_trained_by_two_ranks_as_by_one(pools: Pools) -> None:
    config, start = replace(SGD, top_layers=1), tiny_decoder().weights()
    want = alone(3, config)
    pools.each(Trainer.make, tiny_decoder(), config)
    ranks: list[Trained] = pools.each(Trainer.train, [unevenly(batch) for batch in batches(3, 2)], GRPO)
    found = blocks(ranks, "weights")
    assert_close(found, whole(want.weights))
    assert_close(blocks(ranks, "gradient"), whole(want.gradient))
    assert {name for name in found if not torch.equal(found[name], start[name])} == blocks(ranks, "gradient").keys()
    assert 0 < len(blocks(ranks, "gradient")) < len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_shards_that_live_on_the_host_train_to_the_same_bits(pools: Pools, tmp_path: Path, dtype: torch.dtype) -> None:
    found: list[dict[str, Tensor]] = []
    for offload in (False, True):
        pools.each(Trainer.make, tiny_decoder(0, dtype), SGD, 1, 60.0, offload)
        ranks = pools.each(Trainer.train, [unevenly(batch) for batch in batches(5, 2)], GRPO)
        assert {shard.tensor.device.type for rank in ranks for shard in rank.weights} == {"cpu"}
        found.append(blocks(ranks, "weights"))
        pools.each(Trainer.save, tmp_path / str(offload))
    assert equal(*found)
    pools.each(Trainer.load, tmp_path / "False")  # which the other wrote
    assert equal(whole(pools.weights()), found[0])


@pytest.mark.slow
def test_four_ranks_in_two_copies_train_as_one(tmp_path: Path) -> None:
    async def main() -> list[Trained]:
        runtime = Processes(place([ResourcePool("pool", 4)], Hardware(cores=4)), tmp_path, limit_s=60)
        group = runtime.group("policy", "pool", FACTORY, collectives=True)
        async with runtime:
            await group.call_each(Trainer.make, tiny_decoder(), SGD, 2)
            steps = [[batch.select(rows) for rows in ([0], [], [5, 1], [2, 3, 4])] for batch in batches(5, 4)]
            return await group.call_each(Trainer.train, steps, GRPO)

    ranks, want = asyncio.run(main()), alone(5)
    assert_close(blocks(ranks, "gradient"), whole(want.gradient))
    assert_close(blocks(ranks, "weights"), whole(want.weights))
    assert [(rank.layout.replicas, rank.layout.replica) for rank in ranks] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    for copy in (ranks[:2], ranks[2:]):
        assert equal(blocks(copy, "weights"), blocks(ranks, "weights"))


def test_gradients_of_all_micro_batches_are_reduced_once(pools: Pools) -> None:
    pools.each(Trainer.make, tiny_decoder(), replace(SGD, micro_batch_tokens=1))
    groups = TINY.num_layers + 1
    assert pools.each(Trainer.reductions, unevenly(weighted(make_rows(LENGTHS), 2)), GRPO) == [groups, groups]


@pytest.mark.parametrize(
    ("small", "want"), [(True, TINY.num_layers + 1), (False, 2 * (2 * TINY.num_layers + 1))], ids=["small", "large"]
)
def test_a_small_model_is_gathered_once_a_call(pools: Pools, small: bool, want: int) -> None:
    """And a large one for each forward and backward, but for what is outside its layers."""
    pools.each(Trainer.make, tiny_decoder(), replace(SGD, micro_batch_tokens=1), small=small)
    parts = [part.select(range(2)) for part in evenly(weighted(make_rows(LENGTHS), 2))]
    assert pools.each(Trainer.gatherings, parts, GRPO) == [want, want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logprobs_are_those_of_one_process_bit_for_bit(pools: Pools, dtype: torch.dtype) -> None:
    batch, want = make_rows(LENGTHS), frozenset({"logprobs", "entropy"})
    whole_model = TorchEngine(tiny_decoder(3, dtype), SGD).forward(batch, want)
    pools.each(Trainer.make, tiny_decoder(3, dtype), SGD)
    for split in (evenly, unevenly, to_one):
        got = DataProto.concat(pools.each(Trainer.score, split(batch), want)).by_keys(batch.keys)
        for name in want:
            assert torch.equal(got[name], whole_model[name]), name


def test_bf16_gradients_are_those_of_one_process_up_to_their_rounding(pools: Pools) -> None:
    """Of each pass they are rounded to 8 bits, here as there: the sum of three differs by no more than 3 roundings of 2^-8."""
    batch = make_rows(LENGTHS)
    want = train(TorchEngine(tiny_decoder(dtype=torch.bfloat16), SGD), [weighted(batch, 1)], GRPO)
    pools.each(Trainer.make, tiny_decoder(dtype=torch.bfloat16), SGD)
    got = blocks(pools.each(Trainer.train, [evenly(weighted(batch, 2))], GRPO), "gradient")
    for name, tensor in whole(want.gradient).items():
        assert got[name].dtype == torch.float32
        assert (got[name] - tensor).abs().max() <= 3 * 2**-8 * tensor.abs().max(), name


def test_an_evaluation_is_the_same_on_every_split(pools: Pools) -> None:
    want = TorchEngine(tiny_decoder(), SGD).evaluate(weighted(make_rows(LENGTHS), 1), GRPO)
    pools.each(Trainer.make, tiny_decoder(), SGD)
    for split in SPLITS:
        got = sum(pools.each(Trainer.evaluate, split(weighted(make_rows(LENGTHS), 2)), GRPO), Metrics())
        assert got.values_by_name() == pytest.approx(want.values_by_name(), rel=1e-6, abs=1e-6)


def test_pairs_train_on_ranks_of_which_one_has_none(pools: Pools) -> None:
    dpo = loss_ref(configure("dpo"))
    batch = make_rows([7, 3, 5, 2])
    keys = tuple(Key("train", i // 2, i % 2) for i in range(4))
    batch = replace(batch, keys=keys).with_columns(row={"chosen": torch.tensor([True, False] * 2)})
    want = train(TorchEngine(tiny_decoder(), SGD), [weighted(batch, 1)], dpo)
    pools.each(Trainer.make, tiny_decoder(), SGD)
    ranks = pools.each(Trainer.train, [to_one(weighted(batch, 2))], dpo)
    assert_close(blocks(ranks, "gradient"), whole(want.gradient))


def test_a_value_model_trains_on_ranks_of_which_one_holds_nothing_of_its_head(pools: Pools, tmp_path: Path) -> None:
    loss, batch = loss_ref(configure("value")), make_rows(LENGTHS)
    model = ValueModel(TINY)
    model.load_state_dict({**tiny_decoder().state_dict(), VALUE_HEAD: torch.linspace(-0.1, 0.2, TINY.hidden_size)[None]})
    engine = TorchEngine(deepcopy(model), SGD)
    want, values = engine.forward(batch, frozenset({"values"})), frozenset({"values"})
    trained = train(engine, [weighted(batch, 1)], loss)

    pools.each(Trainer.make, model, SGD)
    got = DataProto.concat(pools.each(Trainer.score, to_one(batch), values)).by_keys(batch.keys)
    assert torch.equal(got["values"], want["values"])
    ranks = pools.each(Trainer.train, [to_one(weighted(batch, 2))], loss)
    assert_close(blocks(ranks, "gradient"), whole(trained.gradient))
    assert VALUE_HEAD not in {shard.name for shard in ranks[1].weights}
    pools.each(Trainer.save, tmp_path / "state")
    after = whole(pools.weights())
    pools.each(Trainer.make, model, SGD)
    pools.each(Trainer.load, tmp_path / "state")
    assert equal(whole(pools.weights()), after)


# ------------------------------------------------------------------------------------------- models of transformers


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_a_model_of_transformers_trains_on_two_ranks_as_on_one(pools: Pools, tmp_path: Path, kind: str) -> None:
    config = replace(SGD, activation_checkpointing=True)
    engine, batch, want = TorchEngine(tiny_auto(kind), config), make_rows(LENGTHS), frozenset({"logprobs"})
    logprobs = engine.forward(batch, want)["logprobs"]
    trained = train(engine, batches(5, 1), GRPO)
    for split in (evenly, to_one):
        pools.each(Trainer.make, tiny_auto(kind), config)
        got = DataProto.concat(pools.each(Trainer.score, split(batch), want)).by_keys(batch.keys)
        torch.testing.assert_close(got["logprobs"], logprobs, rtol=0, atol=1e-5)
        ranks = pools.each(Trainer.train, [split(each) for each in batches(5, 2)], GRPO)
        assert_close(blocks(ranks, "gradient"), whole(trained.gradient))
        assert_close(blocks(ranks, "weights"), whole(trained.weights))
        assert ranks[0].layout == engine.layout()
    pools.each(Trainer.save, tmp_path / "state")
    after = whole(pools.weights())
    pools.each(Trainer.make, tiny_auto(kind, 1), config)
    pools.each(Trainer.load, tmp_path / "state")
    assert equal(whole(pools.weights()), after)


# ---------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_an_adapter_trains_on_two_ranks_as_on_one(pools: Pools, recomputed: bool) -> None:
    config = replace(SGD, activation_checkpointing=recomputed)
    want = train(TorchEngine(tiny_lora(), config), batches(5, 1), GRPO)
    for split in (evenly, to_one):
        pools.each(Trainer.make, tiny_lora(), config)
        ranks = pools.each(Trainer.train, [split(batch) for batch in batches(5, 2)], GRPO)
        assert_close(blocks(ranks, "gradient"), whole(want.gradient))
        assert_close(blocks(ranks, "weights"), whole(want.weights))
        assert all("lora" in spec.name for spec in ranks[0].layout.specs)


def test_an_adapter_on_a_model_of_transformers_trains_on_two_ranks_as_on_one(pools: Pools) -> None:
    def adapted() -> AutoDecoder:
        model = tiny_auto("gpt2")
        add_lora(model, LORA, 0)
        return model

    want = train(TorchEngine(adapted(), SGD), batches(5, 1), GRPO)
    pools.each(Trainer.make, adapted(), SGD)
    ranks = pools.each(Trainer.train, [unevenly(batch) for batch in batches(5, 2)], GRPO)
    assert_close(blocks(ranks, "gradient"), whole(want.gradient))
    assert_close(blocks(ranks, "weights"), whole(want.weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logprobs_with_an_adapter_and_without_are_those_of_one_process_bit_for_bit(pools: Pools, dtype: torch.dtype) -> None:
    batch, want = make_rows(LENGTHS), frozenset({"logprobs", "base_logprobs"})
    alone = TorchEngine(tiny_lora(3, dtype), SGD).forward(batch, want)
    base = TorchEngine(tiny_decoder(3, dtype), SGD).forward(batch, frozenset({"logprobs"}))
    pools.each(Trainer.make, tiny_lora(3, dtype), SGD)
    got = DataProto.concat(pools.each(Trainer.score, unevenly(batch), want)).by_keys(batch.keys)
    assert torch.equal(got["logprobs"], alone["logprobs"])
    assert torch.equal(got["base_logprobs"], base["logprobs"])
    assert not torch.equal(alone["logprobs"], base["logprobs"])
    pools.each(Trainer.train, [evenly(weighted(batch, 2))], GRPO)
    after = DataProto.concat(pools.each(Trainer.score, evenly(batch), want)).by_keys(batch.keys)
    assert torch.equal(after["base_logprobs"], base["logprobs"])
    assert not torch.equal(after["logprobs"], alone["logprobs"])


def test_two_ranks_put_the_weights_of_a_directory_under_an_adapter(pools: Pools, tmp_path: Path) -> None:
    save_decoder(tiny_decoder(5), tmp_path / "model")
    want, batch = frozenset({"base_logprobs"}), make_rows(LENGTHS)
    base = TorchEngine(tiny_lora(5), SGD)
    base.save(tmp_path / "state")
    pools.each(Trainer.make, tiny_lora(), SGD)
    pools.each(Trainer.load_weights, tmp_path / "model")
    got = DataProto.concat(pools.each(Trainer.score, evenly(batch), want)).by_keys(batch.keys)
    assert torch.equal(got["base_logprobs"], base.forward(batch, want)["base_logprobs"])
    pools.each(Trainer.load, tmp_path / "state")  # whose adapter is beside these weights


def test_an_adapter_that_two_ranks_saved_goes_on_there_and_on_one(pools: Pools, tmp_path: Path) -> None:
    pools.each(Trainer.make, tiny_lora(), SGD)
    pools.each(Trainer.train, [evenly(batch) for batch in batches(2, 2)], GRPO)
    pools.each(Trainer.save, tmp_path / "state")
    want = blocks(pools.each(Trainer.train, [evenly(batch) for batch in batches(2, 2)], GRPO), "weights")

    pools.each(Trainer.make, tiny_lora(fresh=True), SGD)
    pools.each(Trainer.load, tmp_path / "state")
    assert equal(blocks(pools.each(Trainer.train, [evenly(batch) for batch in batches(2, 2)], GRPO), "weights"), want)
    pools.each(Trainer.make, tiny_lora(fresh=True), SGD, 1, ranks=1)
    pools.each(Trainer.load, tmp_path / "state", ranks=1)
    alone = [[batch] for batch in batches(2, 1)]
    assert_close(blocks(pools.each(Trainer.train, alone, GRPO, ranks=1), "weights"), want)
    pools.each(Trainer.make, tiny_lora(9), SGD)
    with pytest.raises(ModelError, match="fingerprint"):
        pools.each(Trainer.load, tmp_path / "state")


# -------------------------------------------------------------------------------------------- what one rank runs into


def poisoned(batch: DataProto) -> DataProto:
    return batch.with_columns(token={"advantages": torch.full((batch.num_tokens,), torch.nan)})


def test_a_loss_that_is_not_finite_on_one_rank_refuses_the_step_on_all(pools: Pools) -> None:
    pools.each(Trainer.make, tiny_decoder(), replace(SGD, micro_batch_tokens=8))
    before = whole(pools.weights())
    left, right = unevenly(weighted(make_rows(LENGTHS), 2))  # of which the right one has more passes
    for bad, step in ((True, [poisoned(left), right]), (False, [left, right])):
        ranks = pools.each(Trainer.train, [step], GRPO)
        assert sum((rank.metrics[0] for rank in ranks), Metrics())["train/refused_steps"].value == bad
        assert equal(blocks(ranks, "weights"), before) == bad
    pools.each(Trainer.train, [[left, poisoned(right)]], GRPO)
    with pytest.raises(NonFiniteError, match=r"'advantages' is nan at token \d of row train:\d.*2 steps in a row"):
        pools.each(Trainer.train, [[left, poisoned(right)]], GRPO)


def test_a_step_that_no_rank_has_a_token_for_is_refused_on_all(pools: Pools) -> None:
    pools.each(Trainer.make, tiny_decoder(), SGD)
    nothing = with_masked_rows(make_rows(LENGTHS))[1]
    with pytest.raises(EmptyBatchError, match="no token has counted"):
        pools.each(Trainer.train, [[nothing, nothing.select([])]], GRPO)


def test_replicas_that_do_not_divide_the_ranks_are_refused_before_anything_is_made(pools: Pools) -> None:
    for replicas in (3, 0):
        with pytest.raises(DeviceError, match=f"replicas={replicas} does not divide the 2 ranks .*; use a divisor of 2"):
            pools.each(Trainer.make, tiny_decoder(), SGD, replicas)


def test_a_rank_that_does_not_come_is_named_as_the_wait_for_it(pools: Pools) -> None:
    pools.each(Trainer.make, tiny_decoder(), SGD, 1, 0.5)
    said = pools.each(Trainer.late, evenly(make_rows(LENGTHS)), 1.0)
    assert said[0].startswith("rank 0 of 2 waited in forward for a rank that did not come: ")


# ---------------------------------------------------------------------------------------------- weights and snapshots


@pytest.mark.parametrize("replicas", [1, 2], ids=["fsdp", "hsdp"])
def test_each_rank_shows_its_blocks_of_the_weights_and_whose_copy_they_are_of(pools: Pools, replicas: int) -> None:
    pools.each(Trainer.make, tiny_decoder(), SGD, replicas)
    layouts = pools.each(Trainer.layout)
    assert [(layout.replicas, layout.replica) for layout in layouts] == [(replicas, i if replicas == 2 else 0) for i in range(2)]
    assert layouts[0].specs == TorchEngine(tiny_decoder(), SGD).layout().specs
    expected = {name: parameter.detach() for name, parameter in tiny_decoder().named_parameters()}
    assert equal(whole(pools.weights()), expected)
    half = sum(shard.tensor.numel() for shard in pools.each(Trainer.weights)[1])
    assert half == sum(tensor.numel() for tensor in expected.values()) * replicas // 2


ADAM = TrainConfig(lr=0.01, schedule="cosine", warmup_steps=2, total_steps=10, micro_batch_tokens=16)


def test_a_snapshot_goes_on_bit_for_bit_on_as_many_ranks_and_closely_on_others(pools: Pools, tmp_path: Path) -> None:
    first, then = batches(6, 2)[:3], batches(6, 2)[3:]
    pools.each(Trainer.make, tiny_decoder(), ADAM)
    pools.each(Trainer.train, [evenly(batch) for batch in first], GRPO)
    pools.each(Trainer.save, tmp_path / "two")
    want = blocks(pools.each(Trainer.train, [evenly(batch) for batch in then], GRPO), "weights")

    pools.each(Trainer.make, tiny_decoder(9), ADAM, 1)  # with other weights
    pools.each(Trainer.load, tmp_path / "two")
    got = blocks(pools.each(Trainer.train, [evenly(batch) for batch in then], GRPO), "weights")
    assert equal(got, want)

    alone = [[weighted(batch, 1)] for batch in then]
    pools.each(Trainer.make, tiny_decoder(9), ADAM, 1, ranks=1)
    pools.each(Trainer.load, tmp_path / "two", ranks=1)
    pools.each(Trainer.save, tmp_path / "one", ranks=1)
    on_one = blocks(pools.each(Trainer.train, alone, GRPO, ranks=1), "weights")
    pools.each(Trainer.make, tiny_decoder(9), ADAM, 2)
    pools.each(Trainer.load, tmp_path / "one")
    on_copies = blocks(pools.each(Trainer.train, [unevenly(batch) for batch in then], GRPO), "weights")
    for name, tensor in want.items():  # AdamW divides by the root of a mean of squares, which magnifies rounding
        torch.testing.assert_close(on_one[name], tensor, atol=2e-6, rtol=0)
        torch.testing.assert_close(on_copies[name], tensor, atol=2e-6, rtol=0)


@pytest.mark.parametrize("meanwhile", [Trainer.train_while_saving, Trainer.train_and_save_within], ids=["beside", "within a pass"])
def test_a_snapshot_is_written_while_the_ranks_go_on(meanwhile: Callable[..., Any], pools: Pools, tmp_path: Path) -> None:
    """Both meet meanwhile, in the threads that write and in those that train."""
    first, then = batches(6, 2)[:2], [evenly(batch) for batch in batches(6, 2)[2:]]
    pools.each(Trainer.make, tiny_decoder(), ADAM)
    pools.each(Trainer.train, [evenly(batch) for batch in first], GRPO)
    pools.each(Trainer.save, tmp_path / "saved")
    want = blocks(pools.each(meanwhile, tmp_path / "copied", then, GRPO), "weights")
    saved, copied = (
        {
            f"{path.relative_to(place)} {name}": part
            for path in place.rglob("*.safetensors")
            for name, part in load_file(path).items()
        }
        for place in (tmp_path / "saved", tmp_path / "copied")
    )
    assert equal(copied, saved)
    pools.each(Trainer.make, tiny_decoder(9), ADAM)
    pools.each(Trainer.load, tmp_path / "copied")
    assert equal(blocks(pools.each(Trainer.train, then, GRPO), "weights"), want)


def test_each_rank_reads_its_part_of_a_directory(pools: Pools, tmp_path: Path) -> None:
    save_decoder(tiny_decoder(7), tmp_path)
    pools.each(Trainer.make, tiny_decoder(), SGD)
    pools.each(Trainer.train, [evenly(batch) for batch in batches(1, 2)], GRPO)
    pools.each(Trainer.load_weights, tmp_path)
    found = whole(pools.weights())
    assert all(torch.equal(found[name], weight) for name, weight in tiny_decoder(7).named_parameters())


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("saved", ["directory", "snapshot"])
def test_weights_that_are_loaded_after_a_pass_are_those_of_the_next_pass(
    pools: Pools, tmp_path: Path, saved: str, small: bool
) -> None:
    batch, other = make_rows(LENGTHS), tiny_decoder(7)
    want = TorchEngine(other, SGD).forward(batch, frozenset({"logprobs"}))["logprobs"]
    pools.each(Trainer.make, tiny_decoder(), SGD, small=small)
    pools.each(Trainer.score, evenly(batch), frozenset({"logprobs"}))
    if saved == "directory":
        save_decoder(other, tmp_path / saved)
        pools.each(Trainer.load_weights, tmp_path / saved)
    else:
        TorchEngine(other, SGD).save(tmp_path / saved)
        pools.each(Trainer.load, tmp_path / saved)
    got = DataProto.concat(pools.each(Trainer.score, evenly(batch), frozenset({"logprobs"}))).by_keys(batch.keys)
    assert torch.equal(got["logprobs"], want)


def test_what_one_rank_saved_two_go_on_with_and_the_reverse(pools: Pools, tmp_path: Path) -> None:
    """One that holds its model alone, as an engine of one process does."""
    engine = TorchEngine(tiny_decoder(), SGD)
    train(engine, batches(2, 1), GRPO)
    engine.save(tmp_path / "one")
    pools.each(Trainer.make, tiny_decoder(3), SGD)
    pools.each(Trainer.load, tmp_path / "one")
    assert equal(whole(pools.weights()), whole(list(engine.weight_shards())))
    pools.each(Trainer.save, tmp_path / "two")
    other = TorchEngine(tiny_decoder(5), SGD)
    other.load(tmp_path / "two")
    assert equal(whole(list(other.weight_shards())), whole(pools.weights()))
    for each in (engine, other):
        train(each, batches(1, 1), GRPO)
    assert equal(whole(list(other.weight_shards())), whole(list(engine.weight_shards())))
