"""FakeTrainEngine: a TrainEngine whose model is one table, for tests of whatever trains.

The model predicts a token from the one before it: `table[previous]` are the logits of the next. It is small enough to
check by hand, does what the port says, and takes plain gradient steps. It knows no micro-batches.

Legend: B rows, N packed tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tandem.algos.aggregation import aggregate
from tandem.algos.checks import keep
from tandem.algos.functions import loss_function
from tandem.algos.terms import TOPK_IDS, LossInputs
from tandem.data_proto import DataProto
from tandem.durable import attempt
from tandem.errors import ColumnError, EmptyBatchError, EngineError, ModelError, NonFiniteError, SnapshotError
from tandem.ports import Place
from tandem.train.config import TrainConfig, learning_rate
from tandem.types import LossRef, Metrics
from tandem.weights import WeightLayout, WeightShard, WeightSpec

_GIVES = frozenset({"logprobs", "entropy", "top_ids", "top_logprobs"})


class FakeTrainEngine:
    """Implements ports.TrainEngine on `table`, float32 [V, V], all zeros at first. Of `config` it ignores Adam's settings."""

    def __init__(self, vocab_size: int, config: TrainConfig) -> None:
        self.table = torch.zeros(vocab_size, vocab_size, requires_grad=True)
        self.config = config
        self._where: Place = "device"
        self._updates = self._refused = 0
        self._trouble = ""

    def forward(self, batch: DataProto, want: frozenset[str], *, top: int = 0) -> DataProto:
        if not want or want - _GIVES:
            raise ColumnError(f"this engine gives {sorted(_GIVES)}, and was asked for {sorted(want)}")
        with torch.no_grad():
            predicted, logprobs, entropy = self._predict(batch)
        given = {"logprobs": logprobs, "entropy": entropy}
        if want & {"top_ids", "top_logprobs"}:
            if not 1 <= top <= predicted.shape[1]:
                raise ColumnError(f"top={top} likeliest tokens are asked for, of a vocabulary of {predicted.shape[1]}")
            top_logprobs, top_ids = predicted.topk(top)
            given |= {"top_logprobs": keep(top_logprobs, batch["mask"]), "top_ids": torch.where(batch["mask"][:, None], top_ids, 0)}
        return DataProto.make(batch.keys, batch.lengths, token={name: given[name] for name in want})

    def forward_backward(self, batch: DataProto, loss: LossRef) -> tuple[Metrics, DataProto]:
        logprobs, total, metrics, trouble = self._loss(batch, loss)
        if trouble:
            self._trouble = trouble
        elif bool(batch["mask"].any()):
            total.backward()
        given = DataProto.make(batch.keys, batch.lengths, token={"logprobs": logprobs.detach()})
        return Metrics() if trouble else metrics.prefixed("train"), given

    def evaluate(self, batch: DataProto, loss: LossRef) -> Metrics:
        with torch.no_grad():
            _, _, metrics, trouble = self._loss(batch, loss)
        if trouble:
            raise NonFiniteError(f"{trouble}, where nothing is trained on")
        return metrics.prefixed("eval")

    def _loss(self, batch: DataProto, loss: LossRef) -> tuple[Tensor, Tensor, Metrics, str]:
        """Logprobs [N], the loss, its metrics, and what is not finite."""
        predicted, logprobs, entropy = self._predict(batch)
        at_topk = predicted.gather(1, batch[TOPK_IDS]) if TOPK_IDS in batch.columns else None
        inputs = LossInputs(logprobs, batch["mask"], batch.lengths, batch.batch, entropy, batch.group_of_row, at_topk, batch.keys)
        try:
            result = loss_function(loss.name)(inputs, **loss.params)
        except NonFiniteError as problem:  # a column of the batch
            return logprobs, torch.zeros(()), Metrics(), str(problem)
        sums = {name: aggregate(term, batch["loss_weights"], batch["mask"]) for name, term in result.terms.items()}
        bad = [f"loss term {name!r} is {value.item()}" for name, value in sums.items() if not math.isfinite(value.item())]
        total = torch.stack(list(sums.values())).sum()
        return logprobs, total, result.metrics + Metrics.mean({"loss": total.item()}), bad[0] if bad else ""

    def _predict(self, batch: DataProto) -> tuple[Tensor, Tensor, Tensor]:
        """The distribution at each place [N, V], then logprob of each masked token and entropy there, [N], 0 elsewhere."""
        self._check_placed()
        tokens, mask = batch["tokens"], batch["mask"]
        starts = torch.tensor(batch.offsets[:-1], dtype=torch.int64)[batch.lengths > 0]
        if bool(mask[starts].any()):
            raise ColumnError("a row is masked in at position 0, which has no prediction")
        temperature = batch["temperature"][batch.row_of_token]
        logits = self.table[tokens.roll(1)] / torch.where(temperature == 0, 1.0, temperature)[:, None]
        predicted = logits.log_softmax(1)
        entropy = -(predicted.exp() * predicted).sum(1)
        logprobs = predicted.gather(1, tokens[:, None])[:, 0]
        return predicted, torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)

    def step(self) -> Metrics:
        self._check_placed()
        if self.table.grad is None and not self._trouble:
            raise EmptyBatchError("no token has counted since the last step: there is no gradient to step along")
        gradient = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        norm = cast("Tensor", torch.linalg.vector_norm(gradient)).item()
        trouble = self._trouble or ("" if math.isfinite(norm) else "the gradient of table is not finite")
        self.table.grad, self._trouble = None, ""
        if trouble:
            self._refused += 1
            if self._refused > self.config.max_nonfinite:
                raise NonFiniteError(f"{trouble}; {self._refused} steps in a row were refused")
            return Metrics.sum({"train/refused_steps": 1})
        lr = learning_rate(self.config, self._updates)
        with torch.no_grad():
            self.table -= lr * gradient * min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        self._updates += 1
        self._refused = 0
        return Metrics.mean({"train/grad_norm": norm, "train/lr": lr}) + Metrics.sum({"train/refused_steps": 0})

    def reset_optimizer(self) -> None:
        """Plain gradient descent measures nothing."""
        if self._trouble or self.table.grad is not None:
            raise EngineError("a gradient is pending and belongs to the optimiser as it is: step first")

    def layout(self) -> WeightLayout:
        return WeightLayout((WeightSpec("table", tuple(self.table.shape), "float32"),))

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard("table", tuple(self.table.shape), (0, 0), self.table.detach())

    def place(self, where: Place, *, weights: bool = True) -> Mapping[str, int]:
        """Nothing moves."""
        if where == "host" and (self._trouble or self.table.grad is not None):
            raise EngineError("a gradient is pending and would stay on the device: step first")
        self._where = where
        return {}

    def _check_placed(self) -> None:
        if self._where == "host":
            raise EngineError("the engine is on the host and computes on the device: place it there first")

    def save(self, path: Path) -> None:
        self.snapshot()(path)

    def snapshot(self) -> Callable[[Path], None]:
        if self._trouble or self.table.grad is not None:
            raise EngineError("a gradient is pending and would not be saved: step first")
        table = cast("list[list[float]]", self.table.tolist())
        state = json.dumps({"table": table, "updates": self._updates, "refused": self._refused})

        def write(path: Path) -> None:
            with attempt(f"write the training state to {path}", path):
                path.mkdir(parents=True, exist_ok=True)
                (path / "fake.json").write_text(state)

        return write

    def load_weights(self, path: Path) -> None:
        """The table that `save` wrote there stands for a Hugging Face directory."""
        if self._trouble or self.table.grad is not None:
            raise EngineError("a gradient is pending and belongs to the weights as they are: step first")
        updates, refused = self._updates, self._refused
        self.load(path)
        self._updates, self._refused = updates, refused

    def load(self, path: Path) -> None:
        try:
            state = json.loads((path / "fake.json").read_text())
            table, updates, refused = torch.tensor(state["table"]), int(state["updates"]), int(state["refused"])
        except (OSError, ValueError, KeyError) as error:
            raise SnapshotError(f"{path} holds no training state that can be read: {error}") from error
        if table.shape != self.table.shape:
            raise ModelError(f"{path} holds a table {list(table.shape)}, this one is {list(self.table.shape)}")
        with torch.no_grad():
            self.table.copy_(table)
        self.table.grad, self._trouble, self._updates, self._refused = None, "", updates, refused
