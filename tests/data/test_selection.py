from collections import Counter

import pytest

from tandem.data.fake import FakeDataset
from tandem.data.selection import Kept, Mixture
from tandem.errors import DataError


def test_what_is_kept_keeps_its_order_and_what_is_not_is_counted() -> None:
    kept = Kept(FakeDataset(size=5), lambda task: task.answer != "2", "a 2 in them")
    assert [kept[i].answer for i in range(len(kept))] == ["0", "1", "3", "4"]
    assert kept.notes == ("1 of 5 tasks of fake have a 2 in them and are left out",)
    assert Kept(FakeDataset(), lambda _: True, "anything").notes == ()
    twice = Kept(kept, lambda task: task.answer != "0", "a 0 in them", order=lambda task: -int(str(task.answer)))
    assert [twice[i].answer for i in range(len(twice))] == ["4", "3", "1"]
    assert twice.notes == (*kept.notes, "1 of 4 tasks of fake have a 0 in them and are left out")
    with pytest.raises(DataError, match="all 5 tasks of fake have more, and none is left: loosen the filter"):
        Kept(FakeDataset(size=5), lambda _: False, "more")


def test_a_mixture_gives_each_dataset_its_share_and_leaves_no_task_out() -> None:
    mixture = Mixture([FakeDataset(size=10, name="a"), FakeDataset(size=3, name="b")], [1.0, 3.0])
    assert (mixture.name, mixture.counts) == ("a+b", (10, 30))
    tasks = [mixture[i] for i in range(len(mixture))]
    assert Counter((task.source, task.answer) for task in tasks) == {
        **{("a", str(i)): 1 for i in range(10)},
        **{("b", str(i)): 10 for i in range(3)},
    }
    assert len({task.id for task in tasks}) == 40
    assert [mixture[i].id for i in (0, 10, 13)] == ["0/a-0", "1/b-0", "1/b-0/1"]


def test_weights_that_are_the_sizes_put_one_after_the_other() -> None:
    assert Mixture([FakeDataset(size=7), FakeDataset(size=3)], [7, 3]).counts == (7, 3)
    for weights in ([1.0, 1e-12], [1e300, 1e-300]):
        with pytest.raises(DataError, match=r"sources of \[7, 3\] tasks make one pass .* above 67,108,864"):
            Mixture([FakeDataset(size=7), FakeDataset(size=3)], weights)
    assert Mixture([FakeDataset(size=7), FakeDataset(size=3)], [0.5, 0.5]).counts == (7, 7)
