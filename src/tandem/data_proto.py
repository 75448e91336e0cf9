"""DataProto: the batch that Workers take and give.

Rows have keys, and columns come in three kinds: token-level tensors packed without padding [N, ...], row-level
tensors [B, ...], and object columns (one Python value a row). The kind of a column is said when it is added and never
inferred from its shape, since N may equal B. The structure is frozen: every operation returns a new DataProto, and
columns that it does not change are shared, not copied. Rows are joined by key, never by position.

It is not a queue and it does not know what its columns mean; `from_samples` names the standard ones.

Legend: B rows, N packed tokens, T padded time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from tandem.errors import ColumnError
from tandem.types import BatchRef, GroupKey, Key, PolicyRef, Sample

if TYPE_CHECKING:
    from tensordict import TensorDict

Side = Literal["left", "right"]
Join = Callable[[list[Tensor]], Tensor]  # tensors as one along the first dimension, in memory of its choice

_FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class DataProto:
    """Rows with keys; see the module's docstring.

    keys: one a row, unique. lengths: int64 [B], on the CPU. batch: tensors by name. token_level: which of them are
    packed [N, ...]; the others are [B, ...]. non_tensor_batch: object columns, tuples of B values. meta_info: facts
    about the whole batch.
    """

    keys: tuple[Key, ...]
    lengths: Tensor
    batch: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    token_level: frozenset[str] = frozenset()
    non_tensor_batch: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    meta_info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        rows = len(self.keys)
        if len(set(self.keys)) != rows:
            seen: set[Key] = set()
            twice = next(key for key in self.keys if key in seen or seen.add(key))
            raise ColumnError(f"key {twice} names two rows; keys are unique within a batch")
        if self.lengths.dtype != torch.int64 or self.lengths.shape != (rows,) or self.lengths.device.type != "cpu":
            raise ColumnError(
                f"lengths must be int64 [{rows}] on the CPU, "
                f"got {self.lengths.dtype} {list(self.lengths.shape)} on {self.lengths.device}"
            )
        lengths = cast("list[int]", self.lengths.tolist())
        if (shortest := min(lengths, default=0)) < 0:
            raise ColumnError(f"lengths must not be negative, got {shortest}")
        tokens = sum(lengths)
        if unknown := self.token_level - self.batch.keys():
            raise ColumnError(f"token_level names columns that are not there: {sorted(unknown)}")
        if both := self.batch.keys() & self.non_tensor_batch.keys():
            raise ColumnError(f"columns {sorted(both)} are both tensors and objects")
        for name, tensor in self.batch.items():
            want = tokens if name in self.token_level else rows
            if tensor.ndim == 0 or tensor.shape[0] != want:
                kind = "token" if name in self.token_level else "row"
                raise ColumnError(f"{kind}-level column {name!r} must have {want} entries, got shape {list(tensor.shape)}")
        for name, values in self.non_tensor_batch.items():
            if len(values) != rows:
                raise ColumnError(f"object column {name!r} must have {rows} entries, got {len(values)}")

    # ------------------------------------------------------------------------------------------ making one

    @classmethod
    def make(
        cls,
        keys: Iterable[Key],
        lengths: Sequence[int] | Tensor,
        *,
        token: Mapping[str, Tensor] | None = None,
        row: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """From columns by kind. Raises ColumnError where sizes, names or keys do not fit together."""
        token, row = dict(token or {}), dict(row or {})
        if both := token.keys() & row.keys():
            raise ColumnError(f"columns {sorted(both)} are given both per token and per row")
        return cls(
            keys=tuple(keys),
            lengths=lengths.to("cpu", torch.int64)
            if isinstance(lengths, Tensor)
            else torch.from_numpy(np.array(lengths, np.int64)),
            batch={**token, **row},
            token_level=frozenset(token),
            non_tensor_batch={name: tuple(values) for name, values in (objects or {}).items()},
            meta_info=dict(meta or {}),
        )

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> DataProto:
        """The standard columns of samples.

        Token level: `tokens` int64, `mask` bool, `rollout_logprobs` float32, and each column that all samples have.
        Row level: `temperature` float32, `full_support` bool. Objects: `policy` (run-length coded), `stop`.
        """

        def packed(arrays: Iterable[np.ndarray[Any, Any]]) -> Tensor:
            return torch.from_numpy(np.concatenate(list(arrays)))

        if not samples:
            raise ColumnError("a batch is made of at least one sample")
        shared = set(samples[0].columns).intersection(*(sample.columns for sample in samples))
        token = {
            "tokens": packed(sample.tokens for sample in samples),
            "mask": packed(sample.mask for sample in samples),
            "rollout_logprobs": packed(sample.logprobs for sample in samples),
        }
        return cls.make(
            (sample.key for sample in samples),
            [len(sample.tokens) for sample in samples],
            token=token | {name: packed(sample.columns[name] for sample in samples) for name in sorted(shared)},
            row={
                "temperature": torch.tensor([sample.temperature for sample in samples], dtype=torch.float32),
                "full_support": torch.tensor([sample.full_support for sample in samples]),
            },
            objects={"policy": [sample.policy for sample in samples], "stop": [sample.stop for sample in samples]},
        )

    # -------------------------------------------------------------------------------------------- looking

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor column `name`; raises ColumnError with the names there are."""
        try:
            return self.batch[name]
        except KeyError:
            raise ColumnError(f"no tensor column {name!r} in this batch; there are {sorted(self.batch)}") from None

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.batch) | frozenset(self.non_tensor_batch)

    def _kinds(self) -> dict[str, str]:
        tensors = {name: "token" if name in self.token_level else "row" for name in self.batch}
        return tensors | dict.fromkeys(self.non_tensor_batch, "object")

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> tuple[int, ...]:
        """B + 1 positions: row i owns packed tokens offsets[i] to offsets[i + 1]."""
        return tuple(accumulate(cast("list[int]", self.lengths.tolist()), initial=0))

    @property
    def row_of_token(self) -> Tensor:
        """int64 [N]: the row index that each packed token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @property
    def group_of_row(self) -> Tensor:
        """int64 [B]: which group each row belongs to, by its key; groups are counted in row order."""
        places: dict[GroupKey, int] = {}
        return torch.tensor([places.setdefault(key.group, len(places)) for key in self.keys], dtype=torch.int64)

    def objects(self, name: str) -> tuple[Any, ...]:
        """The object column `name`; raises ColumnError with the names there are."""
        try:
            return self.non_tensor_batch[name]
        except KeyError:
            raise ColumnError(f"no object column {name!r} in this batch; there are {sorted(self.non_tensor_batch)}") from None

    def ref(self) -> BatchRef:
        """The handle of these rows; the policy of a row is the oldest that sampled in it (column `policy`)."""
        runs = self.non_tensor_batch.get("policy", ((),) * len(self))
        oldest: list[PolicyRef | None] = [min((ref for ref, _ in row), default=None) for row in runs]
        return BatchRef(self.keys, self.columns, tuple(cast("list[int]", self.lengths.tolist())), tuple(oldest))

    # -------------------------------------------------------------------------------------------- columns

    def with_columns(
        self,
        *,
        token: Mapping[str, Tensor] | None = None,
        row: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> DataProto:
        """The same rows with columns added or replaced; a column may not change its kind."""
        token, row, objects = token or {}, row or {}, objects or {}
        levels = self.token_level | frozenset(token)
        changed = [n for n in row if n in levels] + [n for n in token if n in self.batch and n not in self.token_level]
        if changed:
            raise ColumnError(f"columns {sorted(changed)} would change between token level and row level")
        return replace(
            self,
            batch={**self.batch, **token, **row},
            token_level=levels,
            non_tensor_batch={**self.non_tensor_batch, **{name: tuple(values) for name, values in objects.items()}},
        )

    def only(self, names: Iterable[str]) -> DataProto:
        """The same rows with the named columns only. Raises ColumnError for a name that is not there."""
        wanted = frozenset(names)
        if wanted == self.columns:
            return self
        if missing := wanted - self.columns:
            raise ColumnError(f"no column {sorted(missing)} in this batch; there are {sorted(self.columns)}")
        return replace(
            self,
            batch={name: tensor for name, tensor in self.batch.items() if name in wanted},
            token_level=self.token_level & wanted,
            non_tensor_batch={name: values for name, values in self.non_tensor_batch.items() if name in wanted},
        )

    def join(self, other: DataProto) -> DataProto:
        """These rows with the columns of `other` added, matched by key; `other` must have every key of this batch."""
        found = other.by_keys(self.keys)
        if not torch.equal(found.lengths, self.lengths):
            raise ColumnError("joined rows differ in their number of tokens")
        return self.with_columns(
            token={name: found.batch[name] for name in found.token_level},
            row={name: tensor for name, tensor in found.batch.items() if name not in found.token_level},
            objects=found.non_tensor_batch,
        )

    # ----------------------------------------------------------------------------------------------- rows

    def _gather(self, rows: Sequence[int], keys: tuple[Key, ...]) -> DataProto:
        index = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.lengths[index]
        moved = (self.lengths.cumsum(0) - self.lengths)[index] - (lengths.cumsum(0) - lengths)  # how far each row's tokens come
        tokens = torch.arange(int(lengths.sum())) + torch.repeat_interleave(moved, lengths)
        return replace(
            self,
            keys=keys,
            lengths=lengths,
            batch={
                name: tensor.index_select(0, (tokens if name in self.token_level else index).to(tensor.device))
                for name, tensor in self.batch.items()
            },
            non_tensor_batch={name: tuple(values[i] for i in rows) for name, values in self.non_tensor_batch.items()},
        )

    def select(self, rows: Sequence[int]) -> DataProto:
        """The rows at these positions, in this order; views where they are consecutive. Raises ColumnError for no such position."""
        size = len(self)
        if wrong := [row for row in rows if not 0 <= row < size]:
            raise ColumnError(f"no row {wrong[0]} in a batch of {size} rows")
        if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
            return self if len(rows) == size else self._slice(rows[0], rows[0] + len(rows), self.offsets)
        return self._gather(rows, tuple(self.keys[i] for i in rows))

    def by_keys(self, keys: Iterable[Key]) -> DataProto:
        """The rows with these keys, in this order. Raises ColumnError for a key that is not there."""
        keys = tuple(keys)
        if keys == self.keys:
            return self
        place = {key: i for i, key in enumerate(self.keys)}
        if missing := [key for key in keys if key not in place]:
            raise ColumnError(f"no row with key {missing[0]} in this batch ({len(missing)} of {len(keys)} keys are missing)")
        return self.select([place[key] for key in keys])

    def reorder(self, rows: Sequence[int]) -> DataProto:
        """All rows in another order. Raises ColumnError unless `rows` is a permutation."""
        if sorted(rows) != list(range(len(self))):
            raise ColumnError(f"{list(rows)} is not a permutation of {len(self)} rows")
        return self.select(rows)

    @staticmethod
    def concat(parts: Sequence[DataProto], join: Join = torch.cat) -> DataProto:
        """All rows of `parts`, which must have the same columns; meta_info entries that differ are an error."""
        if not parts:
            raise ColumnError("nothing to concatenate")
        first = parts[0]
        meta: dict[str, Any] = {}
        for part in parts:
            if part._kinds() != first._kinds():
                differ = sorted({name for name, _ in part._kinds().items() ^ first._kinds().items()})
                raise ColumnError(f"batches differ in columns {differ}: missing in one of them, or of another kind")
            for name, value in part.meta_info.items():
                if name in meta and meta[name] != value:
                    raise ColumnError(f"meta_info {name!r} differs between the batches: {meta[name]!r} and {value!r}")
                meta[name] = value
        return DataProto(
            keys=tuple(key for part in parts for key in part.keys),
            lengths=torch.cat([part.lengths for part in parts]),
            batch={name: join([part.batch[name] for part in parts]) for name in first.batch},
            token_level=first.token_level,
            non_tensor_batch={
                name: tuple(value for part in parts for value in part.non_tensor_batch[name]) for name in first.non_tensor_batch
            },
            meta_info=meta,
        )

    def split(self, sizes: Sequence[int]) -> list[DataProto]:
        """Consecutive parts of these numbers of rows; token columns are views. Raises ColumnError unless they add up."""
        if sum(sizes) != len(self) or any(size < 0 for size in sizes):
            raise ColumnError(f"sizes {list(sizes)} do not add up to {len(self)} rows")
        offsets = self.offsets
        return [self._slice(a, b, offsets) for a, b in pairwise(accumulate(sizes, initial=0))]

    def _slice(self, a: int, b: int, offsets: Sequence[int]) -> DataProto:
        """Rows a to b, as views."""
        return replace(
            self,
            keys=self.keys[a:b],
            lengths=self.lengths[a:b],
            batch={
                name: tensor[offsets[a] : offsets[b]] if name in self.token_level else tensor[a:b]
                for name, tensor in self.batch.items()
            },
            non_tensor_batch={name: values[a:b] for name, values in self.non_tensor_batch.items()},
        )

    def chunk(self, num: int) -> list[DataProto]:
        """`num` consecutive parts whose row counts differ by at most one; some are empty where rows run out."""
        if num < 1:
            raise ColumnError(f"a batch is cut into at least one part, not {num}")
        small, more = divmod(len(self), num)
        return self.split([small + (i < more) for i in range(num)])

    def repeat(self, times: int) -> DataProto:
        """Each row `times` times in place; copy j of member m gets member m * times + j, so that keys stay unique."""
        if times < 1:
            raise ColumnError(f"rows are repeated at least once, not {times} times")
        rows = [i for i in range(len(self)) for _ in range(times)]
        return self._gather(rows, tuple(key._replace(member=key.member * times + j) for key in self.keys for j in range(times)))

    # -------------------------------------------------------------------------------------------- padding

    def pad(self, name: str, *, value: float = 0, side: Side = "right", width: int | None = None) -> Tensor:
        """Token column `name` as [B, T, ...], T being the longest row or `width`."""
        if name not in self.token_level:
            raise ColumnError(f"only token-level columns are padded, and {name!r} is not one; there are {sorted(self.token_level)}")
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if width is None else width
        if width < longest:
            raise ColumnError(f"width {width} is below the longest row, {longest} tokens")
        packed = self.batch[name]
        out = packed.new_full((len(self), width, *packed.shape[1:]), value)
        out[self.valid(side=side, width=width).to(out.device)] = packed
        return out

    def valid(self, *, side: Side = "right", width: int | None = None) -> Tensor:
        """Where the padded form of a token column holds tokens, bool [B, T]; made from lengths alone."""
        width = (int(self.lengths.max()) if len(self) else 0) if width is None else width
        at = torch.arange(width)[None]
        return at < self.lengths[:, None] if side == "right" else at >= width - self.lengths[:, None]

    @classmethod
    def pack(
        cls,
        keys: Iterable[Key],
        valid: Tensor,
        *,
        token: Mapping[str, Tensor],
        row: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
    ) -> DataProto:
        """From padded columns [B, T, ...]. valid: bool [B, T], true exactly at tokens, on either side or with holes."""
        if valid.dtype != torch.bool or valid.ndim != 2:
            raise ColumnError(f"valid must be bool [B, T], got {valid.dtype} {list(valid.shape)}")
        for name, tensor in token.items():
            if tensor.shape[:2] != valid.shape:
                raise ColumnError(f"padded column {name!r} has shape {list(tensor.shape)} where valid has {list(valid.shape)}")
        packed = {name: tensor[valid.to(tensor.device)] for name, tensor in token.items()}
        return cls.make(keys, valid.sum(1), token=packed, row=row, objects=objects)

    # ------------------------------------------------------------------------------- devices, other forms

    def to(self, device: torch.device | str) -> DataProto:
        """The same rows with tensors on `device`; `lengths` stay on the CPU."""
        return replace(self, batch={name: tensor.to(device) for name, tensor in self.batch.items()})

    def to_tensordict(self) -> TensorDict:
        """A TensorDict [B]: token columns right-padded with 0, objects as non-tensor data, `keys` and `lengths` beside."""
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        def stack(values: Iterable[Any]) -> NonTensorStack:
            return NonTensorStack(*(NonTensorData(value, batch_size=[]) for value in values))

        out = TensorDict({"lengths": self.lengths}, batch_size=[len(self)])
        for name, tensor in self.batch.items():
            out.set(("token" if name in self.token_level else "row", name), self.pad(name) if name in self.token_level else tensor)
        out.set("keys", stack(str(key) for key in self.keys))
        for name, values in self.non_tensor_batch.items():
            out.set(("objects", name), stack(values))
        out.set_non_tensor("meta_info", dict(self.meta_info))
        return out

    @classmethod
    def from_tensordict(cls, source: TensorDict) -> DataProto:
        """Inverse of `to_tensordict`."""
        parts: dict[str, Any] = {name: source.get(name, {}) for name in ("token", "row", "objects")}
        lengths: Tensor = source["lengths"]
        width = max((tensor.shape[1] for tensor in parts["token"].values()), default=0)
        valid = torch.arange(width)[None] < lengths[:, None].cpu()
        token = {name: tensor[valid.to(tensor.device)] for name, tensor in parts["token"].items()}
        objects = {name: parts["objects"].get(name).tolist() for name in parts["objects"].keys()}  # noqa: SIM118
        keys = [Key.parse(text) for text in cast("list[str]", source.get("keys").tolist())]
        meta = cast("dict[str, Any]", source.get_non_tensor("meta_info"))
        return cls.make(keys, lengths, token=token, row=dict(parts["row"].items()), objects=objects, meta=meta)

    def save(self, path: Path) -> None:
        """To one file. Object columns and meta_info may hold plain Python values, numpy-free, and `PolicyRef`."""
        torch.save(
            {
                "format": _FORMAT,
                "keys": [tuple(key) for key in self.keys],
                "lengths": self.lengths,
                "batch": {name: tensor.contiguous().clone() for name, tensor in self.batch.items()},
                "token_level": sorted(self.token_level),
                "non_tensor_batch": dict(self.non_tensor_batch),
                "meta_info": dict(self.meta_info),
            },
            path,
        )

    @classmethod
    def load(cls, path: Path) -> DataProto:
        """From a file that `save` wrote; nothing but data is ever executed. Raises ColumnError for anything else."""
        try:
            with torch.serialization.safe_globals([PolicyRef]):
                saved = torch.load(path, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise ColumnError(f"{path} is damaged or not a batch: {error}") from error
        if not isinstance(saved, dict) or cast("dict[str, Any]", saved).get("format") != _FORMAT:
            raise ColumnError(f"{path} is not a batch of format {_FORMAT}")
        data = cast("dict[str, Any]", saved)
        return cls(
            keys=tuple(Key(*key) for key in data["keys"]),
            lengths=data["lengths"],
            batch=data["batch"],
            token_level=frozenset(data["token_level"]),
            non_tensor_batch=data["non_tensor_batch"],
            meta_info=data["meta_info"],
        )
