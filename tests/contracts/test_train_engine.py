"""The contract of ports.TrainEngine: every training engine and the fake keep it, and one that lives in a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tandem import device
from tandem.algos.columns import loss_ref
from tandem.algos.table import configure
from tandem.data_proto import DataProto
from tandem.device import Hardware
from tandem.errors import ColumnError, EmptyBatchError, EngineError, ModelError, NonFiniteError, SnapshotError
from tandem.models.decoder import Decoder, init_decoder
from tandem.models.lora import add_lora
from tandem.models.values import VALUE_HEAD, ValueModel
from tandem.ports import TrainEngine
from tandem.runtime.placement import ResourcePool, place
from tandem.runtime.pool import Runtime
from tandem.runtime.process import Processes
from tandem.runtime.ray import RayCluster
from tandem.train.config import TrainConfig
from tandem.train.fake import FakeTrainEngine
from tandem.train.fsdp import FsdpConfig, fsdp_engine
from tandem.train.torch_engine import TorchEngine
from tandem.types import Key, LossRef
from tests.runtime.ray_cluster import cluster
from tests.train.away import maker
from tests.train.rows import LORA, TINY, VOCAB, make_rows, tiny_auto, tiny_decoder

SFT = loss_ref(configure("sft"))
GRPO = loss_ref(configure("grpo", {"kl_coef": 0.1}))
DPO = loss_ref(configure("dpo"))
# With so large an eps Adam's update is close to lr times the gradient, and does not magnify rounding.
CONFIG = TrainConfig(lr=0.5, eps=1.0, micro_batch_tokens=16, max_nonfinite=1)

VALUE = loss_ref(configure("value"))


@dataclass(frozen=True)
class Subject:
    """An engine under test. output: what its model gives. loss: one that it is trained for, and a column that this reads.
    supervised: one that goes down on any rows. stranger: what the error about another model's state names.
    tolerance: how far outputs of one row may be from each other, in other company or with a gradient.
    """

    build: Callable[..., TrainEngine]
    output: str = "logprobs"
    loss: LossRef = GRPO
    target: str = "advantages"
    supervised: LossRef = SFT
    stranger: str = str(VOCAB + 1)
    tolerance: float = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> TrainEngine:
        return self.build(*args, **kwargs)

    def same(self, got: Tensor, want: Tensor) -> bool:
        return torch.equal(got, want) if self.tolerance == 0 else bool((got - want).abs().max() <= self.tolerance)


def make_decoder(vocab: int) -> Decoder:
    return tiny_decoder() if vocab == VOCAB else init_decoder(replace(TINY, vocab_size=vocab), 0)


def make_torch(config: TrainConfig = CONFIG, *, vocab: int = VOCAB) -> TrainEngine:
    return TorchEngine(make_decoder(vocab), config)


def make_fsdp(config: TrainConfig = CONFIG, *, vocab: int = VOCAB) -> TrainEngine:
    """One rank; tests/train/test_fsdp.py has two."""
    return fsdp_engine(make_decoder(vocab), config, FsdpConfig(), device.select("cpu"), limit_s=60)


def make_fake(config: TrainConfig = CONFIG, *, vocab: int = VOCAB) -> TrainEngine:
    return FakeTrainEngine(vocab, config)


@pytest.fixture(scope="module", autouse=True)
def _joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    device.join(device.select("cpu"), 0, 1, tmp_path_factory.mktemp("rendezvous") / "store", 60)
    yield
    dist.destroy_process_group()


def make_values(config: TrainConfig = CONFIG, *, vocab: int = VOCAB) -> TrainEngine:
    """Its head is not the zeros that it would begin with: then the body would have no gradient."""
    model = ValueModel(replace(TINY, vocab_size=vocab))
    model.load_state_dict({**make_decoder(vocab).state_dict(), VALUE_HEAD: torch.linspace(-0.1, 0.2, TINY.hidden_size)[None]})
    return TorchEngine(model, config)


def make_lora(config: TrainConfig = CONFIG, *, vocab: int = VOCAB) -> TrainEngine:
    decoder = make_decoder(vocab)
    add_lora(decoder, LORA, 0)
    return TorchEngine(decoder, config)


def make_auto(config: TrainConfig = CONFIG, *, vocab: int = VOCAB) -> TrainEngine:
    return TorchEngine(tiny_auto("gpt2", vocab=vocab), config)


POLICIES = {
    "auto": Subject(make_auto, tolerance=1e-5),
    "torch": Subject(make_torch),
    "lora": Subject(make_lora, stranger="fingerprint"),
    "fsdp": Subject(make_fsdp),
    "fake": Subject(make_fake),
}
HERE = {**POLICIES, "values": Subject(make_values, "values", VALUE, "returns", loss_ref(configure("value", {"value_clip": None})))}


@contextmanager
def hosted(runtime: Runtime) -> Iterator[Subject]:
    """Engines in a worker of a pool of one rank."""
    group = runtime.group("policy", "pool", "tests.train.away:Host", collectives=True)
    with asyncio.Runner() as runner:
        runner.run(runtime.__aenter__())
        yield Subject(maker(runner, group, make_fsdp))
        runner.run(runtime.__aexit__(None, None, None))


@pytest.fixture(scope="module", name="process")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with hosted(Processes(place([POOL], Hardware(cores=1)), tmp_path_factory.mktemp("logs"))) as subject:
        yield subject


@pytest.fixture(scope="module", name="ray")
def _ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    cluster()
    with hosted(RayCluster([POOL], tmp_path_factory.mktemp("logs"))) as subject:
        yield subject


POOL = ResourcePool("pool", 1)
AWAY = ["process", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]


def found(name: str, request: pytest.FixtureRequest) -> Subject:
    return HERE[name] if name in HERE else request.getfixturevalue(name)


@pytest.fixture(params=[*HERE, *AWAY])
def make(request: pytest.FixtureRequest) -> Subject:
    return found(request.param, request)


@pytest.fixture(params=[*POLICIES, *AWAY])
def policy(request: pytest.FixtureRequest) -> Subject:
    return found(request.param, request)


def rows() -> DataProto:
    return make_rows([7, 3, 5, 2, 6])


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {shard.name: shard.tensor.clone() for shard in engine.weight_shards()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ----------------------------------------------------------------------------------------------------- passes


def test_forward_gives_the_wanted_columns_of_the_same_rows(policy: Subject) -> None:
    batch = rows()
    out = policy().forward(batch, frozenset({"logprobs", "entropy"}))
    assert out.keys == batch.keys
    assert torch.equal(out.lengths, batch.lengths)
    assert out.columns == out.token_level == {"logprobs", "entropy"}
    for name in ("logprobs", "entropy"):
        assert out[name].dtype == torch.float32
        assert bool((out[name][~batch["mask"]] == 0).all())
    assert bool((out["logprobs"][batch["mask"]] < 0).all())
    assert bool((out["entropy"][batch["mask"]] > 0).all())
    assert policy().forward(batch, frozenset({"entropy"})).columns == {"entropy"}


def test_forward_refuses_what_it_cannot_give(policy: Subject) -> None:
    for want in (frozenset({"values"}), frozenset({"logprobs", "values"}), frozenset[str]()):
        with pytest.raises(ColumnError, match="this engine gives"):
            policy().forward(rows(), want)


def test_forward_gives_the_likeliest_tokens(policy: Subject) -> None:
    engine, batch = policy(), rows()
    engine.forward_backward(batch, SFT)  # moves the fake away from its uniform start
    engine.step()
    out = engine.forward(batch, frozenset({"top_ids", "top_logprobs", "logprobs"}), top=VOCAB)
    mask, ids, logprobs = batch["mask"], out["top_ids"], out["top_logprobs"]
    assert ids.dtype == torch.int64
    assert ids.shape == logprobs.shape == (batch.num_tokens, VOCAB)
    assert bool((logprobs[~mask] == 0).all())
    assert bool((ids[~mask] == 0).all())
    assert torch.equal(ids[mask].sort(1).values, torch.arange(VOCAB).expand(int(mask.sum()), -1))
    torch.testing.assert_close(logprobs[mask].exp().sum(1), torch.ones(int(mask.sum())), atol=1e-5, rtol=0)
    assert bool((logprobs[mask].diff(dim=1) <= 0).all())
    own = logprobs[mask][ids[mask] == batch["tokens"][mask][:, None]]
    assert torch.equal(own, out["logprobs"][mask])
    few = engine.forward(batch, frozenset({"top_logprobs"}), top=2)
    assert few.columns == {"top_logprobs"}
    assert torch.equal(few["top_logprobs"], logprobs[:, :2])
    for top in (0, VOCAB + 1):
        with pytest.raises(ColumnError, match=f"top={top} likeliest"):
            engine.forward(batch, frozenset({"top_logprobs"}), top=top)


@pytest.mark.parametrize("name", ["kd", "gkd"])
def test_a_student_comes_close_to_its_teacher(policy: Subject, name: str) -> None:
    """The loss is given the student's logprobs of the teacher's tokens: equal models differ by nothing, others learn."""
    loss, batch, teacher = loss_ref(configure(name)), rows(), policy()
    for _ in range(20):
        teacher.forward_backward(batch, SFT)
        teacher.step()
    given = teacher.forward(batch, frozenset({"top_ids", "top_logprobs"}), top=VOCAB)
    data = batch.with_columns(token={"teacher_topk_ids": given["top_ids"], "teacher_topk_logprobs": given["top_logprobs"]})
    assert teacher.evaluate(data, loss)["eval/loss"].value == pytest.approx(0, abs=1e-6)
    student = policy()
    before = student.evaluate(data, loss)["eval/loss"].value
    assert before > 1e-3
    for _ in range(20):
        student.forward_backward(data, loss)
        student.step()
    assert student.evaluate(data, loss)["eval/loss"].value < 0.97 * before


def test_forward_leaves_no_gradient(make: Subject) -> None:
    engine = make()
    engine.forward(rows(), frozenset({make.output}))
    with pytest.raises(EmptyBatchError):
        engine.step()


def test_a_row_does_not_depend_on_its_companions(make: Subject) -> None:
    batch, engine = rows(), make()
    whole = engine.forward(batch, frozenset({make.output}))
    other = engine.forward(batch.reorder([4, 1, 0, 3, 2]), frozenset({make.output}))
    assert make.same(other.by_keys(whole.keys)[make.output], whole[make.output])
    for i in range(len(batch)):
        alone = engine.forward(batch.select([i]), frozenset({make.output}))
        assert make.same(alone[make.output], whole.select([i])[make.output])


def test_temperature_divides_logits_and_zero_counts_as_one(policy: Subject) -> None:
    engine = policy()
    batch = rows()
    engine.forward_backward(batch, SFT)  # moves the fake away from its uniform start
    engine.step()

    def at(temperature: float) -> Tensor:
        heated = batch.with_columns(row={"temperature": torch.full((len(batch),), temperature)})
        return engine.forward(heated, frozenset({"logprobs"}))["logprobs"]

    assert torch.equal(at(0.0), at(1.0))
    assert not torch.allclose(at(0.5), at(1.0))
    uniform = -torch.log(torch.tensor(float(VOCAB)))
    torch.testing.assert_close(at(1e6)[batch["mask"]], uniform.expand(int(batch["mask"].sum())), atol=1e-4, rtol=0)


def test_training_passes_and_forward_agree_to_the_bit(make: Subject) -> None:
    engine, batch = make(), rows()
    _, passed = engine.forward_backward(batch, make.loss)
    assert torch.equal(passed[make.output], engine.forward(batch, frozenset({make.output}))[make.output])
    assert not passed[make.output].requires_grad


def test_on_policy_the_ratio_is_exactly_one(policy: Subject) -> None:
    engine = policy()
    batch = rows()
    engine.forward_backward(batch, SFT)
    engine.step()
    old = engine.forward(batch, frozenset({"logprobs"}))["logprobs"]
    on_policy = batch.with_columns(token={"old_logprobs": old, "ref_logprobs": old})
    metrics = engine.forward_backward(on_policy, GRPO)[0].values_by_name()
    assert metrics["train/ratio"] == metrics["train/ratio_max"] == 1
    assert metrics["train/kl_old_new"] == metrics["train/clip_fraction"] == metrics["train/kl_ref"] == 0
    want = -float((batch["advantages"] * batch["loss_weights"]).sum())
    assert metrics["train/loss"] == pytest.approx(want, abs=1e-6)


def test_wrong_batches_are_refused(make: Subject) -> None:
    engine, batch = make(), rows()
    with pytest.raises(ColumnError, match="loss_weights"):
        engine.forward_backward(batch.only(batch.columns - {"loss_weights"}), make.loss)
    with pytest.raises(ColumnError, match="advantages"):
        engine.forward_backward(batch.only(batch.columns - {make.target}), make.loss)
    first = batch["mask"].clone()
    first[0] = True
    with pytest.raises(ColumnError, match="position 0"):
        engine.forward(batch.with_columns(token={"mask": first}), frozenset({make.output}))


def test_a_value_model_gives_values_and_nothing_else() -> None:
    engine, batch = make_values(), rows()
    out = engine.forward(batch, frozenset({"values"}))["values"]
    assert torch.equal(out != 0, batch["mask"])
    for want in (frozenset({"logprobs"}), frozenset({"values", "entropy"}), frozenset[str]()):
        with pytest.raises(ColumnError, match=r"this engine gives \['values'\]"):
            engine.forward(batch, want)
    with pytest.raises(ColumnError, match="the loss reads logprobs of the model"):
        engine.forward_backward(batch, GRPO)
    with pytest.raises(ColumnError, match="the loss reads values of the model"):
        make_torch().forward_backward(batch, VALUE)
    assert not any(spec.tied_to for spec in engine.layout().specs)


# ------------------------------------------------------------------------------------------------------ steps


def test_gradients_add_up(make: Subject) -> None:
    whole, parts = make(), make()
    whole.forward_backward(rows(), make.loss)
    for part in rows().split([2, 0, 3]):
        parts.forward_backward(part, make.loss)
    whole.step()
    parts.step()
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor, atol=2e-6, rtol=0)
    assert not equal(weights(whole), weights(make()))


def test_the_engine_never_normalises(make: Subject) -> None:
    batch = rows()
    doubled = batch.with_columns(token={"loss_weights": 2 * batch["loss_weights"]})
    once, twice = (make().forward_backward(each, make.loss)[0]["train/loss"].value for each in (batch, doubled))
    assert twice == pytest.approx(2 * once, rel=1e-5)
    engine = make()
    engine.forward_backward(batch.with_columns(token={"loss_weights": torch.zeros(batch.num_tokens)}), make.loss)
    engine.step()
    assert equal(weights(engine), weights(make()))


def test_training_lowers_the_loss(make: Subject) -> None:
    engine = make()
    losses: list[float] = []
    for _ in range(15):
        losses.append(engine.forward_backward(rows(), make.supervised)[0]["train/loss"].value)
        assert engine.step()["train/refused_steps"].value == 0
    assert losses[-1] < losses[0] - 0.2


def pairs() -> DataProto:
    """Three pairs, their rows apart, all chosen ones first."""
    batch = make_rows([7, 3, 5, 2, 6, 4], aggregation="seq-mean-token-mean")
    keys = tuple(Key("train", i % 3, i // 3) for i in range(6))
    return replace(batch, keys=keys).with_columns(row={"chosen": torch.tensor([key.member == 0 for key in keys])})


@pytest.mark.parametrize(("loss", "batch"), [(SFT, rows()), (GRPO, rows()), (DPO, pairs())], ids=["sft", "grpo", "dpo"])
def test_an_evaluation_is_the_training_pass_without_a_trace(policy: Subject, loss: LossRef, batch: DataProto) -> None:
    engine, other = policy(), policy()
    for each in (engine, other):
        each.forward_backward(batch, loss)  # moves the fake away from its uniform start
        each.step()
    before = weights(engine)
    measured = engine.evaluate(batch, loss)
    assert equal(weights(engine), before)
    with pytest.raises(EmptyBatchError):
        engine.step()
    trained, _ = other.forward_backward(batch, loss)
    assert {f"train/{name.removeprefix('eval/')}": metric for name, metric in measured.items()} == dict(trained)
    other.step()
    engine.forward_backward(batch, loss)
    engine.evaluate(batch, loss)  # in the middle of a step
    engine.step()
    assert equal(weights(engine), weights(other))


def test_pairs_learn_and_no_group_is_cut(policy: Subject) -> None:
    engine, batch = policy(), pairs()  # micro-batches hold 16 tokens, and the second pair alone is above them with its padding
    first = engine.evaluate(batch, DPO)
    for _ in range(15):
        engine.forward_backward(batch, DPO)
        engine.step()
    last = engine.evaluate(batch, DPO)
    assert first["eval/preference_accuracy"].count == last["eval/preference_accuracy"].count == 3
    assert last["eval/loss"].value < first["eval/loss"].value
    assert last["eval/reward_margin"].value > first["eval/reward_margin"].value
    with pytest.raises(ColumnError, match="a pair is a group of two rows"):
        engine.evaluate(batch.select([0, 1, 2]), DPO)


def test_an_evaluation_that_is_not_finite_says_so(make: Subject) -> None:
    engine = make()
    with pytest.raises(NonFiniteError, match=r"'(advantages|returns)' is nan.*nothing is trained on"):
        engine.evaluate(poisoned(), make.loss)
    engine.forward_backward(rows(), make.loss)
    assert engine.step()["train/refused_steps"].value == 0


def test_a_step_needs_a_gradient(make: Subject) -> None:
    engine = make()
    with pytest.raises(EmptyBatchError, match="no token has counted"):
        engine.step()
    masked = rows().with_columns(token={"mask": torch.zeros(rows().num_tokens, dtype=torch.bool)})
    _, out = engine.forward_backward(masked, make.loss)
    assert bool((out[make.output] == 0).all())
    with pytest.raises(EmptyBatchError):
        engine.step()


def test_what_stands_under_the_mask_is_inert(make: Subject) -> None:
    batch = rows()
    garbage = {
        name: torch.where(batch["mask"], batch[name], torch.nan)
        for name in ("old_logprobs", "ref_logprobs", "advantages", "values", "returns", "loss_weights")
    }
    clean, dirty = make(), make()
    want = clean.forward_backward(batch, make.loss)[0].values_by_name()
    assert dirty.forward_backward(batch.with_columns(token=garbage), make.loss)[0].values_by_name() == want
    clean.step()
    dirty.step()
    assert equal(weights(clean), weights(dirty))


def poisoned() -> DataProto:
    batch = rows()
    at = int(batch["mask"].nonzero()[4])
    bad = {name: batch[name].index_fill(0, torch.tensor(at), torch.nan) for name in ("advantages", "returns")}
    return batch.with_columns(token=bad)


def test_a_loss_that_is_not_finite_refuses_the_step(make: Subject) -> None:
    engine = make()
    before = weights(engine)
    engine.forward_backward(rows(), make.loss)
    engine.forward_backward(poisoned(), make.loss)
    assert engine.step()["train/refused_steps"].value == 1
    assert equal(weights(engine), before)
    # Nothing of the refused step is left: the next is that of an engine which never saw it.
    fresh = make()
    for each in (engine, fresh):
        each.forward_backward(rows(), make.loss)
        assert each.step()["train/refused_steps"].value == 0
    assert equal(weights(engine), weights(fresh))


def test_too_many_refused_steps_in_a_row_stop_the_run(make: Subject) -> None:
    engine = make()  # one refused step is tolerated
    for _ in range(2):
        engine.forward_backward(poisoned(), make.loss)
        engine.step()
        engine.forward_backward(rows(), make.loss)
        engine.step()
    engine.forward_backward(poisoned(), make.loss)
    engine.step()
    engine.forward_backward(poisoned(), make.loss)
    with pytest.raises(NonFiniteError, match=r"'(advantages|returns)' is nan.*2 steps in a row"):
        engine.step()


# ------------------------------------------------------------------------------------------- weights, on disk


def test_the_layout_describes_the_shards(make: Subject) -> None:
    engine = make()
    owned = {spec.name: spec for spec in engine.layout().specs if spec.tied_to is None}
    shards = list(engine.weight_shards())
    assert [shard.name for shard in shards] == list(owned)
    for shard in shards:
        spec = owned[shard.name]
        assert shard.shape == spec.shape == tuple(shard.tensor.shape)
        assert shard.offsets == (0,) * len(shard.shape)
        assert str(shard.tensor.dtype) == f"torch.{spec.dtype}"
        assert not shard.tensor.requires_grad
    for spec in engine.layout().specs:
        assert spec.tied_to is None or spec.shape == owned[spec.tied_to].shape


def contents(directory: Path) -> dict[str, object]:
    """What its files say; two safetensors files of the same tensors may differ in the order of their headers."""
    return {
        str(path.relative_to(directory)): {name: tensor.tolist() for name, tensor in load_file(path).items()}
        if path.suffix == ".safetensors"
        else path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_loaded_engine_goes_on_bit_for_bit(make: Subject, tmp_path: Path) -> None:
    config = TrainConfig(lr=0.01, schedule="cosine", warmup_steps=2, total_steps=10, micro_batch_tokens=16, max_nonfinite=1)
    engine = make(config)

    def train(each: TrainEngine, steps: range) -> dict[str, Tensor]:
        for seed in steps:
            each.forward_backward(make_rows([4, 7, 3], seed), make.loss)
            each.step()
        return weights(each)

    train(engine, range(3))
    engine.forward_backward(poisoned(), make.loss)
    engine.step()  # the count of refused steps is part of the state
    engine.save(tmp_path / "state")
    after = train(engine, range(3, 6))

    other = make(config)
    train(other, range(90, 92))
    other.forward_backward(rows(), make.loss)
    other.load(tmp_path / "state")
    other.save(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "state")
    assert equal(train(other, range(3, 6)), after)

    other.load(tmp_path / "state")
    other.forward_backward(poisoned(), make.loss)
    with pytest.raises(NonFiniteError):
        other.step()


def test_a_snapshot_is_what_a_save_was_when_it_was_taken(make: Subject, tmp_path: Path) -> None:
    engine = make()

    def train(seed: int) -> None:
        engine.forward_backward(make_rows([4, 7, 3], seed), make.loss)
        engine.step()

    train(0)
    engine.save(tmp_path / "saved")
    write = engine.snapshot()
    train(1)
    engine.forward_backward(rows(), make.loss)
    with pytest.raises(EngineError, match="step first"):
        engine.snapshot()
    write(tmp_path / "snapshot")
    engine.step()
    assert contents(tmp_path / "snapshot") == contents(tmp_path / "saved")
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="file"):
        engine.snapshot()(tmp_path / "file")


def test_host_and_back(make: Subject) -> None:
    """Nothing is computed on the host, and training goes on as if nothing had been."""
    engine, still = make(), make()
    for seed in range(3):
        for each in (engine, still):
            each.forward_backward(make_rows([4, 7, 3], seed), make.loss)
            if each is engine and seed == 1:
                with pytest.raises(EngineError, match="pending"):
                    each.place("host")
            each.step()
        engine.place("host", weights=seed == 0)
        assert equal(weights(engine), weights(still))
        with pytest.raises(EngineError, match="on the host"):
            engine.forward_backward(rows(), make.loss)
        with pytest.raises(EngineError, match="on the host"):
            engine.forward(rows(), frozenset({make.output}))
        engine.place("device")
    assert equal(weights(engine), weights(still))


def test_an_optimiser_that_is_reset_goes_on_by_the_same_schedule_and_from_disk(make: Subject, tmp_path: Path) -> None:
    engine = make(TrainConfig(lr=0.01, schedule="linear", total_steps=10, micro_batch_tokens=16))
    for seed in range(3):
        engine.forward_backward(make_rows([4, 7, 3], seed), make.loss)
        engine.step()
    before = weights(engine)
    engine.forward_backward(rows(), make.loss)
    with pytest.raises(EngineError, match="pending"):
        engine.reset_optimizer()
    assert engine.step()["train/lr"].value == pytest.approx(0.007)
    assert not equal(weights(engine), before)
    before = weights(engine)
    engine.reset_optimizer()
    assert equal(weights(engine), before)
    engine.save(tmp_path / "state")
    other = make(TrainConfig(lr=0.01, schedule="linear", total_steps=10, micro_batch_tokens=16))
    other.forward_backward(make_rows([5, 2], 9), make.loss)
    other.step()
    other.load(tmp_path / "state")
    for each in (engine, other):
        each.forward_backward(rows(), make.loss)
        assert each.step()["train/lr"].value == pytest.approx(0.006)
    assert equal(weights(engine), weights(other))


def test_load_refuses_other_models_and_broken_files(make: Subject, tmp_path: Path) -> None:
    engine = make()
    before = weights(engine)
    with pytest.raises(SnapshotError, match="no training state"):
        engine.load(tmp_path / "nothing")
    make(vocab=VOCAB + 1).save(tmp_path / "other")
    with pytest.raises(ModelError, match=make.stranger):
        engine.load(tmp_path / "other")
    engine.save(tmp_path / "mine")
    for path in (path for path in (tmp_path / "mine").rglob("*") if path.is_file()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SnapshotError, match="no training state"):
            engine.load(tmp_path / "mine")
        path.write_bytes(whole)
    assert equal(weights(engine), before)


def test_save_refuses_a_pending_gradient_and_says_when_it_cannot_write(make: Subject, tmp_path: Path) -> None:
    engine = make()
    engine.forward_backward(rows(), make.supervised)
    with pytest.raises(EngineError, match="step first"):
        engine.save(tmp_path)
    engine.step()
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="file"):
        engine.save(tmp_path / "file")


def test_an_unknown_loss_is_named(make: Subject) -> None:
    with pytest.raises(LookupError, match="ppo_clop"):
        make().forward_backward(rows(), LossRef("ppo_clop"))
