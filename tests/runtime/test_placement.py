"""placement: seats for every rank, or who asked for how much."""

from __future__ import annotations

import pytest

from tandem.device import Hardware
from tandem.errors import DeviceError
from tandem.runtime.placement import Rank, ResourcePool, RuntimeConfig, Seat, check, place, table

POOLS = [ResourcePool("trainer", 2, cores=2, devices=2), ResourcePool("rollout", 3, devices=1), ResourcePool("rewards", 1)]


def test_every_rank_has_a_seat_and_no_device_two() -> None:
    seats = place(POOLS, Hardware(8, "cuda", 8))
    assert seats[1] == Seat("trainer", 1, 2, "cuda", (2, 3))
    assert [seat.devices for seat in seats] == [(0, 1), (2, 3), (4,), (5,), (6,), ()]
    assert table(seats, {"policy": "trainer", "reference": "trainer", "engine": "rollout"}) == (
        "pool     rank  cores  devices        roles\n"
        "trainer  0     2      cuda:0 cuda:1  policy, reference\n"
        "trainer  1     2      cuda:2 cuda:3  policy, reference\n"
        "rollout  0     1      cuda:4         engine\n"
        "rollout  1     1      cuda:5         engine\n"
        "rollout  2     1      cuda:6         engine\n"
        "rewards  0     1      -              -"
    )


@pytest.mark.parametrize(
    ("there", "match"),
    [
        (
            Hardware(7, "cuda", 8),
            r"8 cores are asked for and this machine has 7: trainer 4 \(2 x 2\), rollout 3 \(3 x 1\), rewards 1",
        ),
        (
            Hardware(8, "cuda", 6),
            r"7 cuda devices are asked for and this machine has 6: trainer 4 \(2 x 2\), rollout 3 \(3 x 1\)\. Use",
        ),
        (Hardware(8), r"7 accelerators are asked for and this machine has 0"),
    ],
)
def test_what_is_not_there_is_said_with_who_asks_for_it(there: Hardware, match: str) -> None:
    with pytest.raises(DeviceError, match=match):
        place(POOLS, there)


@pytest.mark.parametrize(
    ("there", "match"),
    [
        (
            {"a": Hardware(4, "cuda", 7), "b": Hardware(3)},
            r"8 cores are asked for and the cluster \(a 4, b 3\) has 7: trainer 4 \(2 x 2\), rollout 3 \(3 x 1\), rewards 1",
        ),
        (
            {"a": Hardware(4, "cuda", 4), "b": Hardware(4, "cuda", 2)},
            r"7 cuda devices are asked for and the cluster \(a 4, b 2\) has 6",
        ),
        (dict.fromkeys("abcdefgh", Hardware(1, "cuda", 2)), r"2 cores are asked for one rank, and no node of the cluster \(a 1, "),
        ({}, r"8 cores are asked for and the cluster \(\) has 0"),
    ],
)
def test_what_no_node_has_is_said_with_who_asks_for_it(there: dict[str, Hardware], match: str) -> None:
    with pytest.raises(DeviceError, match=match):
        check(POOLS, there)


def test_what_the_nodes_have_together_is_enough() -> None:
    check(POOLS, {"a": Hardware(4, "cuda", 3), "b": Hardware(4, "cuda", 4)})


def test_nodes_are_named_where_there_are_some() -> None:
    seats = [Seat("trainer", 0, 2, "cuda", ("0", "1"), "node-a"), Seat("trainer", 1, 2, "cpu", (), "b")]
    assert table(seats, {"policy": "trainer"}) == (
        "pool     rank  node    cores  devices        roles\n"
        "trainer  0     node-a  2      cuda:0 cuda:1  policy\n"
        "trainer  1     b       2      -              policy"
    )


def test_values_that_cannot_be() -> None:
    for options in ({"ranks": 0}, {"ranks": 1, "cores": 0}, {"ranks": 1, "devices": -1}):
        with pytest.raises(ValueError, match="of pool 'p' must be at least"):
            ResourcePool("p", **options)
    with pytest.raises(ValueError, match="p, p"):
        place([ResourcePool("p", 1), ResourcePool("p", 1)], Hardware(8))


def test_ranks_that_share_rows_have_one_part() -> None:
    assert [Rank(index, 4, 2).part for index in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("given", "beside_generation", "name", "pools"),
    [
        (RuntimeConfig(), False, "inline", {}),
        (RuntimeConfig(), True, "process", {"trainer": 1}),
        (RuntimeConfig("inline"), True, "inline", {}),
        (RuntimeConfig("process"), False, "process", {"trainer": 2}),
        (RuntimeConfig("ray"), True, "ray", {"trainer": 1}),
        (RuntimeConfig(pools={"policy": 3}), False, "process", {"policy": 3}),
    ],
)
def test_what_a_recipe_leaves_out_follows_from_what_it_asks_for(
    given: RuntimeConfig, beside_generation: bool, name: str, pools: dict[str, int]
) -> None:
    settled = given.settled(beside_generation=beside_generation)
    assert (settled.name, settled.pools) == (name, pools)
    assert settled.settled(beside_generation=beside_generation) == settled


def test_one_process_has_no_pools() -> None:
    with pytest.raises(ValueError, match=r"runtime\.pools=\{'trainer': 1\}, and with runtime=inline all is in this process"):
        RuntimeConfig("inline", {"trainer": 1}).settled(beside_generation=False)
    with pytest.raises(ValueError, match=r"runtime\.replicas=2, and with runtime=inline"):
        RuntimeConfig(replicas=2).settled(beside_generation=False)
