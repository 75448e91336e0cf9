from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data_proto import DataProto
from tandem.errors import ColumnError
from tandem.types import Key, PolicyRef, Sample


def keys(num: int, space: str = "train") -> tuple[Key, ...]:
    return tuple(Key(space, i) for i in range(num))


def batch(lengths: list[int], space: str = "train") -> DataProto:
    """Rows whose every value says which row and position it belongs to."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    at = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64)
    return DataProto.make(
        keys(len(lengths), space),
        lengths,
        token={"tokens": 100 * rows + at, "wide": torch.stack([rows, at], 1).float()},
        row={"temperature": torch.arange(len(lengths)).float()},
        objects={"stop": [f"stop{i}" for i in range(len(lengths))]},
        meta={"step": 3},
    )


LENGTHS = st.lists(st.integers(0, 5), min_size=0, max_size=6)


def same(a: DataProto, b: DataProto) -> None:
    assert a.keys == b.keys
    assert a.token_level == b.token_level
    assert dict(a.non_tensor_batch) == dict(b.non_tensor_batch)
    assert dict(a.meta_info) == dict(b.meta_info)
    assert a.batch.keys() == b.batch.keys()
    torch.testing.assert_close([a.lengths, *a.batch.values()], [b.lengths, *(b.batch[n] for n in a.batch)], rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------------- making


def test_from_samples_names_the_standard_columns() -> None:
    def sample(i: int, n: int, **columns: np.ndarray) -> Sample:
        mask = [False] + [True] * (n - 1)
        policy = ((PolicyRef(version=i + 1), n - 1),) if n > 1 else ()
        return Sample(Key("train", i), range(n), mask, [-0.5 * m for m in mask], policy, "length", 0.5, i == 0, columns)  # type: ignore[arg-type]

    made = DataProto.from_samples([sample(0, 3, extra=np.ones(3), only_here=np.ones(3)), sample(1, 1, extra=np.zeros(1))])
    assert made.token_level == {"tokens", "mask", "rollout_logprobs", "extra"}
    assert made.columns == made.token_level | {"temperature", "full_support", "policy", "stop"}
    assert made["tokens"].tolist() == [0, 1, 2, 0]
    assert made["rollout_logprobs"].tolist() == [0, -0.5, -0.5, 0]
    assert made["full_support"].tolist() == [True, False]
    assert made.ref().policies == (PolicyRef(version=1), None)
    assert made.ref().lengths == (3, 1)
    with pytest.raises(ColumnError, match="at least one sample"):
        DataProto.from_samples([])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token": {"a": torch.zeros(4)}}, "token-level column 'a' must have 3 entries"),
        ({"row": {"a": torch.zeros(3)}}, "row-level column 'a' must have 2 entries"),
        ({"row": {"a": torch.tensor(1.0)}}, "row-level column 'a'"),
        ({"objects": {"a": [1]}}, "object column 'a' must have 2 entries"),
        ({"row": {"a": torch.zeros(2)}, "objects": {"a": [1, 2]}}, "both tensors and objects"),
        ({"row": {"a": torch.zeros(2)}, "token": {"a": torch.zeros(3)}}, "both per token and per row"),
        ({"keys": (Key("t", 0), Key("t", 0))}, "t:0.0.0 names two rows"),
        ({"lengths": [1, -2]}, "not be negative"),
        ({"lengths": [1, 2, 3]}, r"lengths must be int64 \[2\]"),
    ],
)
def test_make_refuses_what_does_not_fit(wrong: dict[str, object], says: str) -> None:
    facts: dict[str, object] = {"keys": keys(2), "lengths": [1, 2]}
    with pytest.raises(ColumnError, match=says):
        DataProto.make(**(facts | wrong))  # type: ignore[arg-type]


def test_the_structure_is_frozen_and_columns_are_shared() -> None:
    a = batch([2, 1])
    b = a.with_columns(row={"reward": torch.zeros(2)})
    assert b["tokens"] is a["tokens"]
    assert "reward" not in a.columns
    assert a.select([0, 1]) is a
    with pytest.raises(AttributeError):
        a.keys = ()  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------- columns


def test_missing_columns_are_named() -> None:
    a = batch([2, 1])
    for wrong in (lambda: a["nope"], lambda: a.objects("nope"), lambda: a.only(["nope"]), lambda: a.pad("nope")):
        with pytest.raises(ColumnError, match="nope"):
            wrong()
    assert a.only(["tokens", "stop"]).columns == {"tokens", "stop"}


def test_a_column_does_not_change_its_kind() -> None:
    a = batch([1, 1])  # N == B: the kind cannot be told from the shape
    with pytest.raises(ColumnError, match="between token level and row level"):
        a.with_columns(row={"tokens": torch.zeros(2)})
    with pytest.raises(ColumnError, match="between token level and row level"):
        a.with_columns(token={"temperature": torch.zeros(2)})
    with pytest.raises(ColumnError, match="both tensors and objects"):
        a.with_columns(objects={"tokens": [1, 2]})
    replaced = a.with_columns(token={"tokens": torch.tensor([7, 8])}, objects={"stop": ["x", "y"]})
    assert replaced["tokens"].tolist() == [7, 8]
    assert replaced.objects("stop") == ("x", "y")


@given(LENGTHS, st.randoms())
def test_join_is_by_key(lengths: list[int], random: object) -> None:
    a = batch(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    same(a.only(["tokens"]).join(a.reorder(order)), a)


def test_join_refuses_missing_rows_and_other_lengths() -> None:
    a = batch([2, 1])
    with pytest.raises(ColumnError, match="no row with key train:1"):
        a.join(a.select([0]))
    with pytest.raises(ColumnError, match="differ in their number of tokens"):
        a.join(batch([1, 2]))


# ---------------------------------------------------------------------------------------------------------- rows


@given(LENGTHS, st.data())
def test_select_moves_whole_rows(lengths: list[int], data: st.DataObject) -> None:
    a = batch(lengths)
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True)) if lengths else []
    b = a.select(rows)
    assert b.keys == tuple(a.keys[i] for i in rows)
    assert b["temperature"].tolist() == rows
    assert b["tokens"].tolist() == [100 * i + t for i in rows for t in range(lengths[i])]
    assert b.objects("stop") == tuple(f"stop{i}" for i in rows)
    same(b, a.by_keys(b.keys))


def test_select_refuses_rows_that_are_not_there() -> None:
    a = batch([2, 1])
    for rows in ([2], [-1]):
        with pytest.raises(ColumnError, match="row"):
            a.select(rows)
    with pytest.raises(ColumnError, match="names two rows"):
        a.select([0, 0])
    with pytest.raises(ColumnError, match="not a permutation"):
        a.reorder([0])


@given(LENGTHS, st.integers(1, 8))
def test_chunks_concatenate_to_the_whole(lengths: list[int], num: int) -> None:
    a = batch(lengths)
    parts = a.chunk(num)
    assert len(parts) == num
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    same(DataProto.concat(parts), a)


def test_split_gives_views_and_must_add_up() -> None:
    a = batch([2, 0, 1])
    first, second = a.split([2, 1])
    assert first["tokens"].untyped_storage().data_ptr() == a["tokens"].untyped_storage().data_ptr()
    assert second["tokens"].tolist() == [200]
    for sizes in ([1, 1], [4, -1]):
        with pytest.raises(ColumnError, match="add up to 3 rows"):
            a.split(sizes)
    with pytest.raises(ColumnError, match="at least one part"):
        a.chunk(0)


def test_concat_refuses_different_columns_meta_and_keys() -> None:
    a, b = batch([2]), batch([1], space="eval")
    assert DataProto.concat([a, b]).keys == (Key("train", 0), Key("eval", 0))
    with pytest.raises(ColumnError, match=r"\['stop'\]"):
        DataProto.concat([a, b.only(["tokens", "wide", "temperature"])])
    as_object = b.only(["tokens", "wide", "stop"]).with_columns(objects={"temperature": [0.0]})
    with pytest.raises(ColumnError, match=r"\['temperature'\]"):
        DataProto.concat([a, as_object])
    with pytest.raises(ColumnError, match="'step' differs"):
        DataProto.concat([a, DataProto.make(b.keys, b.lengths, token={"tokens": b["tokens"]}, meta={"step": 4}).join(b)])
    with pytest.raises(ColumnError, match="names two rows"):
        DataProto.concat([a, a])
    with pytest.raises(ColumnError, match="nothing to concatenate"):
        DataProto.concat([])


def test_repeat_keeps_keys_unique() -> None:
    a = batch([2, 1]).repeat(2)
    assert a.keys == (Key("train", 0, 0), Key("train", 0, 1), Key("train", 1, 0), Key("train", 1, 1))
    assert a["tokens"].tolist() == [0, 1, 0, 1, 100, 100]
    again = a.repeat(3)
    assert len(set(again.keys)) == 12
    with pytest.raises(ColumnError, match="at least once"):
        a.repeat(0)


# ------------------------------------------------------------------------------------------------------- padding


@given(LENGTHS, st.sampled_from(["left", "right"]), st.integers(0, 3))
def test_pad_and_pack_are_inverse(lengths: list[int], side: str, more: int) -> None:
    a = batch(lengths)
    width = max(lengths, default=0) + more
    padded = {name: a.pad(name, value=-7, side=side, width=width) for name in a.token_level}  # type: ignore[arg-type]
    valid = a.valid(side=side, width=width)  # type: ignore[arg-type]
    assert valid.sum(1).tolist() == lengths
    assert bool((padded["tokens"][~valid] == -7).all())
    back = DataProto.pack(a.keys, valid, token=padded, row={"temperature": a["temperature"]}, objects=a.non_tensor_batch)
    same(back, DataProto.make(a.keys, a.lengths, token={n: a[n] for n in a.token_level}).join(back))
    assert torch.equal(back["tokens"], a["tokens"])
    assert torch.equal(back["wide"], a["wide"])


def test_pack_takes_holes_and_checks_shapes() -> None:
    valid = torch.tensor([[True, False, True], [False, True, False]])
    packed = DataProto.pack(keys(2), valid, token={"a": torch.arange(6).view(2, 3)})
    assert packed["a"].tolist() == [0, 2, 4]
    assert packed.lengths.tolist() == [2, 1]
    with pytest.raises(ColumnError, match="bool"):
        DataProto.pack(keys(2), valid.long(), token={})
    with pytest.raises(ColumnError, match="'a' has shape"):
        DataProto.pack(keys(2), valid, token={"a": torch.zeros(2, 2)})
    with pytest.raises(ColumnError, match="below the longest row"):
        packed.pad("a", width=1)


# --------------------------------------------------------------------------------------------------- other forms


@settings(max_examples=20)
@given(LENGTHS)
def test_tensordict_round_trip(lengths: list[int]) -> None:
    a = batch(lengths)
    same(DataProto.from_tensordict(a.to_tensordict()), a)


def test_file_round_trip(tmp_path: Path) -> None:
    a = batch([2, 0, 1]).with_columns(objects={"policy": [((PolicyRef(version=2), 1),), (), ()]})
    part = a.split([1, 2])[0]  # a view: the file must not hold the whole
    part.save(tmp_path / "rows.pt")
    same(DataProto.load(tmp_path / "rows.pt"), part)
    a.to("cpu").save(tmp_path / "all.pt")
    same(DataProto.load(tmp_path / "all.pt"), a)


def test_load_refuses_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.pt"
    torch.save({"format": 99}, path)
    with pytest.raises(ColumnError, match="not a batch of format"):
        DataProto.load(path)
    path.write_bytes(b"garbage")
    with pytest.raises(ColumnError, match="damaged or not a batch"):
        DataProto.load(path)
    path.write_bytes(pickle.dumps(Path("x"), protocol=2))
    with pytest.raises(ColumnError, match="damaged or not a batch"):
        DataProto.load(path)
    batch([3, 4]).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ColumnError, match="damaged or not a batch"):
        DataProto.load(path)


def test_rows_are_joined_in_memory_of_the_callers_choice() -> None:
    made: list[torch.Tensor] = []

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        made.append(torch.cat(list(parts)))
        return made[-1]

    joined = DataProto.concat([batch([2]), batch([1], space="eval")], join)
    assert [joined[name].data_ptr() for name in joined.batch] == [tensor.data_ptr() for tensor in made]
