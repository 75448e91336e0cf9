"""TorchEngine: a decoder or a value model and its optimiser, on PyTorch.

It adds gradients up over micro-batches and takes steps; the loss is named by its caller, and so is each token's weight,
so nothing is averaged here. A step whose loss or gradient is not finite is refused: parameters and optimiser state stay
as they are. Weights never move, since a rollout engine of the same process may read the same storage. What the model gives
is outputs.py's business, and whether this process holds it alone or as one of several ranks that of `Ranks` (ranks.py, fsdp.py).

Legend: B rows, N packed tokens, T padded time.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tandem.algos.aggregation import aggregate
from tandem.algos.checks import keep
from tandem.algos.functions import loss_function
from tandem.algos.terms import TokenLoss, scope_of
from tandem.data_proto import DataProto
from tandem.device import CPU, Device
from tandem.durable import attempt
from tandem.errors import ColumnError, EmptyBatchError, EngineError, ModelError, NonFiniteError, SnapshotError
from tandem.faults import crash_point
from tandem.models.adapters import fingerprint, trained
from tandem.models.hf import read_weights
from tandem.models.language_model import LanguageModel
from tandem.ports import Place
from tandem.train import outputs
from tandem.train.adamw import AdamW
from tandem.train.config import TrainConfig, learning_rate
from tandem.train.micro_batches import micro_batches
from tandem.train.ranks import OneRank, Ranks
from tandem.types import Key, LossRef, Metrics
from tandem.weights import WeightLayout, WeightShard, WeightSpec

_FORMAT = 2
_MODEL, _OPTIMIZER, _STATE = "model", "optimizer", "engine.json"


class TorchEngine:
    """Implements ports.TrainEngine. The decoder's parameters are float32 and stay where they are in memory.

    ranks: those that hold the decoder together, and then all of them make every call, each with its own rows. home: the device that
    it computes on, where the decoder is; ranks have none but the CPU.
    """

    def __init__(self, decoder: LanguageModel, config: TrainConfig, ranks: Ranks | None = None, home: Device = CPU) -> None:
        self.decoder = decoder
        self._home = home
        self._where: Place = "device"
        self.config = config
        self._ranks: Ranks = ranks or OneRank(decoder)
        decoder.recompute = config.activation_checkpointing
        self._parameters = trained(decoder, decoder.adapter)
        for name in decoder.below(config.top_layers):
            self._parameters[name].requires_grad_(False)  # without a gradient they stay as they are
        self._optimizer = AdamW(self._parameters, config)
        self._updates = 0  # steps that were taken
        self._refused = 0  # steps that were refused since the last one taken
        self._trouble = ""  # what was not finite since the last step

    # --------------------------------------------------------------------------------------------- passes

    def forward(self, batch: DataProto, want: frozenset[str], *, top: int = 0) -> DataProto:
        """See ports.TrainEngine. Rows without a masked token do not pass through the model."""
        known = outputs.gives(self.decoder)
        if not want or want - known:
            raise ColumnError(f"this engine gives {sorted(known)}, and was asked for {sorted(want)}")
        out = {name: torch.zeros(batch.num_tokens, *(top,) * name.startswith("top_")) for name in want}
        out |= {name: values.long() for name, values in out.items() if name == "top_ids"}
        with self._ranks.computing("forward"), torch.no_grad():
            for at, part in self._passes(batch):
                for name, values in self._ranks.run(outputs.given, part, want, top).items():
                    out[name][at] = values
        return DataProto.make(batch.keys, batch.lengths, token=out)

    def forward_backward(self, batch: DataProto, loss: LossRef) -> tuple[Metrics, DataProto]:
        """See ports.TrainEngine. A pass whose loss is not finite adds neither gradient nor metrics; `step` then refuses."""
        main = "logprobs" if "logprobs" in outputs.gives(self.decoder) else "values"
        out = torch.zeros(batch.num_tokens)
        sums = _Sums()
        with self._ranks.computing("forward_backward"):
            for each in self._losses(batch, loss):
                out[each.at] = each.output.detach()
                each.loss.backward()
                sums.add(each)
            metrics, trouble = sums.reduced(self._ranks)
        self._trouble = self._trouble or trouble
        return metrics.prefixed("train"), DataProto.make(batch.keys, batch.lengths, token={main: out})

    def evaluate(self, batch: DataProto, loss: LossRef) -> Metrics:
        """See ports.TrainEngine."""
        sums = _Sums()
        with self._ranks.computing("evaluate"), torch.no_grad():
            for each in self._losses(batch, loss):
                sums.add(each)
            metrics, trouble = sums.reduced(self._ranks)
        if trouble:
            raise NonFiniteError(f"{trouble}, where nothing is trained on: look at that data, or at the weights")
        return metrics.prefixed("eval")

    def _losses(self, batch: DataProto, loss: LossRef) -> Iterator[_PassLoss]:
        """What the loss makes of each micro-batch, one after the other, so that one graph lives at a time."""
        function = loss_function(loss.name)
        for at, part in self._passes(batch, whole_groups=scope_of(function) == "group"):
            inputs = outputs.loss_inputs(self._ranks.run(outputs.given, part, outputs.wanted_by_losses(self.decoder, part)), part)
            output = inputs.new_values if inputs.logprobs is None else inputs.logprobs
            nothing = _PassLoss(at, output, output.sum() * 0)
            if not len(at):
                yield nothing
                continue
            try:
                result = function(inputs, **loss.params)
            except NonFiniteError as problem:  # a column of the batch
                yield nothing._replace(trouble=str(problem))
                continue
            terms = {name: aggregate(term, part["loss_weights"], part["mask"]) for name, term in result.terms.items()}
            sums = {name: term.item() for name, term in terms.items()}
            if all(map(math.isfinite, sums.values())):
                yield _PassLoss(at, output, torch.stack(list(terms.values())).sum(), sums, result.metrics)
            else:
                yield nothing._replace(trouble=_first_bad(result, part))

    def _passes(self, batch: DataProto, *, whole_groups: bool = False) -> Iterator[tuple[Tensor, DataProto]]:
        """Micro-batches, each with its places among the packed tokens.

        A row ends at its last masked token, since nothing later can matter, and a row without one does not pass. Rows of a group
        pass together where that fits, and the model computes once what they begin with alike. With
        whole_groups, a group passes whole if one of its rows does. A rank that has fewer passes than another makes up
        for them with a row without tokens.
        """
        self._check_placed()
        ends = torch.zeros(len(batch), dtype=torch.int64)
        ends.scatter_reduce_(0, batch.row_of_token, torch.arange(1, batch.num_tokens + 1) * batch["mask"], "amax")
        padding = self.decoder.pads
        groups = cast("list[int]", batch.group_of_row.tolist())
        owners = groups if whole_groups or not padding else None
        of_unit = groups if whole_groups else range(len(batch))
        counted = {of_unit[row] for row in cast("list[int]", ends.nonzero()[:, 0].tolist())}
        places = {
            row: torch.arange(start, max(start, end))
            for row, (start, end) in enumerate(zip(batch.offsets, cast("list[int]", ends.tolist()), strict=False))
            if of_unit[row] in counted
        }
        lengths = {row: len(at) for row, at in places.items()}
        passes = micro_batches(lengths, self.config.micro_batch_tokens, owners, whole=whole_groups, padding=padding)
        most = max(self._ranks.gather(len(passes)))
        for number in range(most):
            self._ranks.passing(last=number == most - 1)
            if number >= len(passes):
                yield torch.zeros(0, dtype=torch.int64), _without_tokens(batch)
                continue
            rows = passes[number]
            at = torch.cat([places[row] for row in rows])
            columns = {name: tensor[at if name in batch.token_level else rows] for name, tensor in batch.batch.items()}
            yield (
                at,
                DataProto(
                    keys=tuple(batch.keys[row] for row in rows),
                    lengths=torch.tensor([len(places[row]) for row in rows]),
                    batch=columns,
                    token_level=batch.token_level,
                ),
            )

    # ---------------------------------------------------------------------------------------------- steps

    def step(self) -> Metrics:
        """See ports.TrainEngine. Raises EmptyBatchError where no token has counted since the last step."""
        self._check_placed()
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if not gradients and not self._trouble:
            raise EmptyBatchError("no token has counted since the last step: there is no gradient to step along")
        trouble, norm = self._trouble, 0.0
        with self._ranks.meeting("step"):
            if not trouble and not math.isfinite(norm := self._ranks.norm(gradients)):
                trouble = next(filter(None, self._ranks.gather(self._bad_gradient())), f"the gradient's norm is {norm}")
        first = self._ranks.index == 0  # a step is counted once
        if trouble:
            self._clear()
            self._refused += 1
            if self._refused > self.config.max_nonfinite:
                raise NonFiniteError(
                    f"{trouble}; {self._refused} steps in a row were refused, after {self._updates} that were taken: "
                    f"look at that data, or lower train.lr={self.config.lr} or train.max_grad_norm={self.config.max_grad_norm}"
                )
            return Metrics.sum({"train/refused_steps": int(first)})
        if norm + 1e-6 > self.config.max_grad_norm:  # or the factor is 1
            torch.nn.utils.clip_grads_with_norm_(
                self._parameters.values(), self.config.max_grad_norm, torch.tensor(norm), foreach=False
            )
        lr = learning_rate(self.config, self._updates)
        self._optimizer.step(lr)
        self._clear()
        self._updates += 1
        self._refused = 0
        return Metrics.mean({"train/grad_norm": norm, "train/lr": lr}) + Metrics.sum({"train/refused_steps": 0})

    def reset_optimizer(self) -> None:
        """See ports.TrainEngine."""
        self._check_idle("belongs to the optimiser as it is")
        self._optimizer.state.clear()

    @property
    def _base(self) -> str | None:
        """Of the weights that are frozen, if some are."""
        return self.decoder.adapter.base if self.decoder.adapter is not None else None

    def _bad_gradient(self) -> str:
        for name, parameter in self._parameters.items():
            here = None if parameter.grad is None else self._ranks.part(parameter.grad)
            if here is not None and not bool(torch.isfinite(here[1]).all()):
                return f"the gradient of {name} is not finite"
        return ""

    def _check_placed(self) -> None:
        if self._where == "host":
            raise EngineError("the engine is on the host and computes on the device: place it there first")

    def _check_idle(self, why: str) -> None:
        """Raises EngineError where something was passed back and no step was taken since."""
        if self._trouble or any(parameter.grad is not None for parameter in self._parameters.values()):
            raise EngineError(f"a gradient is pending and {why}: step first")

    def _clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._trouble = ""

    # -------------------------------------------------------------------------------------------- weights

    def layout(self) -> WeightLayout:
        """Every weight that is trained, whole; a tied output layer is listed with the name that owns it."""
        wire, narrow = self.decoder.gathered_dtype, {id(each) for layer in self.decoder.layers for each in layer.parameters()}
        specs = [
            WeightSpec(
                name,
                tuple(parameter.shape),
                str(parameter.dtype).removeprefix("torch."),
                wire=wire if id(parameter) in narrow else None,
            )
            for name, parameter in self._parameters.items()
        ]
        owners = {spec.name: spec for spec in specs}
        for name, owner in self.decoder.tied.items() if self.decoder.adapter is None else ():
            specs.append(WeightSpec(name, owners[owner].shape, owners[owner].dtype, tied_to=owner))
        return WeightLayout(tuple(specs), self._ranks.replicas, self._ranks.replica, self._ranks.index)

    def weight_shards(self) -> Iterator[WeightShard]:
        """What this rank holds of each weight that is trained, without a copy: all of it, where it is alone."""
        for name, parameter in self._parameters.items():
            here = self._ranks.part(parameter)
            if here is not None:
                yield WeightShard(name, tuple(parameter.shape), *here)

    def load_weights(self, path: Path) -> None:
        """See ports.TrainEngine. Each rank reads what it holds. An adapter stays as it is, beside other weights."""
        self._check_idle("belongs to the weights as they are")
        own, adapter = self.decoder.own_parameters(), self.decoder.adapter
        with self._ranks.meeting("load_weights"), torch.no_grad():
            for name, tensor in read_weights(self.decoder, path):
                if (here := self._ranks.part(own[name])) is not None:
                    offsets, block = here
                    block.copy_(tensor[tuple(slice(at, at + size) for at, size in zip(offsets, block.shape, strict=True))])
        if adapter is not None:
            whole = ((name, tensor[...].float()) for name, tensor in read_weights(self.decoder, path))
            adapter.base = fingerprint(whole)
        self.reset_optimizer()

    def place(self, where: Place, *, weights: bool = True) -> Mapping[str, int]:
        """See ports.TrainEngine. Parameters stay the same objects, whose memory is another."""
        if where == "host":
            self._check_idle("would stay on the device")
        self._where = where
        if self._home.kind == "cpu":
            return {}
        for fields in self._optimizer.state.values():
            fields.update({field: self._home.moved(value, where) for field, value in fields.items()})
        for tensor in self._weights() if weights else ():
            tensor.data = self._home.moved(tensor.data, where)
        moments = [value for fields in self._optimizer.state.values() for value in fields.values()]
        return {"weights": self._home.held_bytes(self._weights()), "optimizer": self._home.held_bytes(moments)}

    def _weights(self) -> list[Tensor]:
        """All of the model, trained or not."""
        return [*self.decoder.parameters(), *self.decoder.buffers()]

    # -------------------------------------------------------------------------------------------- on disk

    def save(self, path: Path) -> None:
        """Weights, optimiser state by parameter name, counters, in the directory `path`, which is made.

        Of a model with an adapter the weights are the adapter's, and a fingerprint stands for those that it goes with.
        Raises EngineError while a gradient is pending, SnapshotError where the files cannot be written.
        """
        self._write(self._state(), path)

    def snapshot(self) -> Callable[[Path], None]:
        """See ports.TrainEngine; the copy is on the host. Raises EngineError while a gradient is pending."""
        state = self._state()
        weights, moments = ({name: each.to("cpu", copy=True) for name, each in part.items()} for part in state[:2])
        return partial(self._write, state._replace(weights=weights, optimizer=moments))

    def _state(self) -> _State:
        """What `load` needs, without a copy."""
        self._check_idle("would not be saved")
        return _State(
            {name: parameter.detach() for name, parameter in self._parameters.items()},
            {f"{field}/{name}": value for name, fields in self._optimizer.state.items() for field, value in fields.items()},
            {"format": _FORMAT, "updates": self._updates, "refused": self._refused, "base": self._base},
        )

    def _write(self, state: _State, path: Path) -> None:
        with self._ranks.meeting("save"), attempt(f"write the training state to {path}", path):
            path.mkdir(parents=True, exist_ok=True)
            self._ranks.write(path / _MODEL, state.weights)
            crash_point("train.in_save")
            self._ranks.write(path / _OPTIMIZER, state.optimizer)
            if self._ranks.index == 0:
                (path / _STATE).write_text(json.dumps(state.counters) + "\n")

    def load(self, path: Path) -> None:
        """From the directory that `save` wrote, on as many ranks or other ones; a pending gradient is dropped.

        Raises SnapshotError for files that are missing or damaged, ModelError for those of another model; nothing has
        changed then.
        """
        with _readable(path):
            theirs, fields = self._ranks.shapes(path / _MODEL), self._ranks.shapes(path / _OPTIMIZER)
            counters = cast("dict[str, Any]", json.loads((path / _STATE).read_text()))
            written, updates, refused = (int(counters[name]) for name in ("format", "updates", "refused"))
        if written != _FORMAT:
            raise SnapshotError(f"{path} has format {written} and this version reads {_FORMAT}: use the version that wrote it")
        mine = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if mine != theirs:
            differ = sorted({name for name, _ in mine.items() ^ theirs.items()})
            first = differ[0]
            raise ModelError(
                f"{path} is the state of another model: {len(differ)} weights differ, the first is {first}, "
                f"{mine.get(first, 'absent')} here and {theirs.get(first, 'absent')} there"
            )
        if (base := counters.get("base")) != self._base:
            raise ModelError(
                f"{path} is the state of an adapter of another model: its frozen weights have the fingerprint {base}, and these "
                f"{self._base}; begin with the model.path that it was trained beside"
            )
        owners = {key: self._parameters[key.partition("/")[2]] for key in fields}
        like = {key: owner if fields[key] == owner.shape else torch.empty(fields[key]) for key, owner in owners.items()}
        with self._ranks.meeting("load"), _readable(path):
            weights, optimizer = self._ranks.read(path / _MODEL, self._parameters), self._ranks.read(path / _OPTIMIZER, like)
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer.items():
            field, _, name = key.partition("/")
            state.setdefault(name, {})[field] = self._home.moved(value, self._where)
        self._optimizer.state = state
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self._clear()
        self._updates, self._refused = updates, refused


class _State(NamedTuple):
    """What is saved: tensors by name, and what is counted."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    counters: Mapping[str, int | str | None]


class _PassLoss(NamedTuple):
    """Of one micro-batch: its places among the packed tokens, what the model gives there, what to go back from; each term's
    weighted sum, metrics, or what is not finite.
    """

    at: Tensor
    output: Tensor
    loss: Tensor
    sums: Mapping[str, float] = {}
    metrics: Metrics = Metrics()
    trouble: str = ""


class _Sums:
    """What the micro-batches of a call add up to."""

    def __init__(self) -> None:
        self._terms: Counter[str] = Counter()
        self._metrics = Metrics()
        self._trouble = ""

    def add(self, each: _PassLoss) -> None:
        self._terms.update(each.sums)
        self._metrics += each.metrics
        self._trouble = self._trouble or each.trouble

    def reduced(self, ranks: Ranks) -> tuple[Metrics, str]:
        """Metrics of this rank, with the loss of all ranks and its terms where there is more than one; any rank's trouble."""
        found = ranks.gather((self._terms, self._trouble))
        names = dict.fromkeys(name for terms, _ in found for name in terms)
        means = {name: sum(terms[name] for terms, _ in found) / len(found) for name in names}
        losses = {"loss": sum(means.values())} | ({f"loss_{n}": v for n, v in means.items()} if len(means) > 1 else {})
        return Metrics.mean(losses) + self._metrics, next((trouble for _, trouble in found if trouble), "")


def _without_tokens(batch: DataProto) -> DataProto:
    """A row with the columns of `batch` and no token."""
    columns = {
        name: tensor[:0] if name in batch.token_level else tensor.new_ones(1, *tensor.shape[1:])
        for name, tensor in batch.batch.items()
    }
    return DataProto((Key("nothing", 0),), torch.zeros(1, dtype=torch.int64), columns, batch.token_level)


@contextmanager
def _readable(path: Path) -> Generator[None]:
    """Turns what goes wrong while reading a state into a SnapshotError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise SnapshotError(f"{path} holds no training state that can be read: {error}; use an older snapshot") from error


def _first_bad(result: TokenLoss, part: DataProto) -> str:
    """Which term of the loss is not finite, and in which row."""
    for name, term in result.terms.items():
        bad = torch.nonzero(~torch.isfinite(keep(term.detach(), part["mask"])))
        if len(bad):
            row = int(part.row_of_token[bad[0, 0]])
            return f"loss term {name!r} is {term[bad[0, 0]].item()} in row {part.keys[row]}"
    return f"the sum of a loss term is not finite, in rows {part.keys[0]} to {part.keys[-1]}"
