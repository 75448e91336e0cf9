from itertools import product

import pytest

from tandem.data.builtin import HELDOUT_SHARE, REFUSAL, Demonstrations, NoiseConfig, Pairs, Problem, TaskSet, split_of
from tandem.data.tasks import TASKS
from tandem.data.tasks.arithmetic import Arithmetic
from tandem.data.tasks.calculator import Calculator
from tandem.data.tasks.countdown import Countdown
from tandem.data.tasks.largest import Largest
from tandem.data.tasks.sorting import Sorting
from tandem.errors import DataError
from tandem.registry import resolve
from tandem.types import Message

KINDS: list[type[Problem]] = [Arithmetic, Sorting, Countdown, Calculator, Largest]


def test_the_table_names_every_kind() -> None:
    assert [resolve(name, TASKS) for name in TASKS] == KINDS
    assert [kind.name for kind in KINDS] == list(TASKS)


def test_every_problem_is_in_one_split_with_all_its_variants() -> None:
    """Exhaustively where the problems can be listed."""
    arithmetic = [Arithmetic(*pair) for pair in product(range(100), repeat=2)]
    calculator = [
        Calculator(left, symbol, right)
        for left, symbol, right in product(range(10, 100), "+-*", range(10, 100))
        if symbol != "-" or left >= right
    ]
    sorting = [Sorting("".join(digits)) for digits in product("0123456789", repeat=6) if digits[0] <= "1"]
    splits: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for problem in (*arithmetic, *calculator, *sorting):
        splits[split_of(problem)].add(f"{problem.name}:{problem.canonical}")
    assert not splits["train"] & splits["heldout"]
    for kind in ("arithmetic", "calculator", "sorting"):
        held, trained = (sum(name.startswith(kind) for name in splits[split]) for split in ("heldout", "train"))
        assert 0.8 / HELDOUT_SHARE < held / (held + trained) < 1.2 / HELDOUT_SHARE
    for problem in arithmetic:
        assert split_of(problem) == split_of(Arithmetic(problem.right, problem.left))
    assert split_of(Sorting("314159")) == split_of(Sorting("951413"))
    assert split_of(Largest((12, 34, 56, 78, 90))) == split_of(Largest((56, 12, 90, 34, 78)))
    assert split_of(Countdown((1, 2, 3), 6, "1+2+3")) == split_of(Countdown((3, 1, 2), 6, "3*2*1"))


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_heldout_tasks_share_no_problem_for_any_seeds(kind: type[Problem]) -> None:
    def prompts(split: str, seed: int) -> set[str]:
        dataset = TaskSet(kind, split, seed=seed, size=300)
        return {dataset[i].messages[0].content for i in range(len(dataset))}

    trained = prompts("train", 0) | prompts("train", 1)
    held = prompts("heldout", 0) | prompts("heldout", 1)
    demonstrated = {Demonstrations(kind, size=500)[i].messages[0].content for i in range(500)}
    assert not held & (trained | demonstrated)
    assert len(prompts("heldout", 0)) == 300  # no repeats


@pytest.mark.parametrize("kind", KINDS)
def test_items_depend_on_seed_split_and_position_only(kind: type[Problem]) -> None:
    small, large = TaskSet(kind, "train", seed=3, size=5), TaskSet(kind, "train", seed=3, size=50)
    assert [small[i] for i in range(5)] == [large[i] for i in range(5)]
    assert small[0].messages != TaskSet(kind, "train", seed=4, size=5)[0].messages
    shown, again = Demonstrations(kind, seed=3, size=20), Demonstrations(kind, seed=3, size=50)
    assert [shown[i] for i in reversed(range(20))] == [again[i] for i in reversed(range(20))]


@pytest.mark.parametrize("kind", KINDS)
def test_characters_cover_all_that_is_written(kind: type[Problem]) -> None:
    shown = Demonstrations(kind, size=400, noise=NoiseConfig(0.6, 0.3))
    written = {character for i in range(400) for message in shown[i].messages for character in message.content}
    assert written <= set(kind.characters)
    assert len(set(kind.characters)) == len(kind.characters)


def test_problems_that_the_seeds_give_stay_as_they_are() -> None:
    """A change here changes every run: it needs a reason."""
    assert [TaskSet(kind, "heldout", seed=0, size=1)[0].messages[0].content for kind in KINDS] == [
        "14+82=",
        "617072=",
        "10 12 16=14:",
        "87*60=",
        "Which is the largest: 37, 94, 87, 95, 28?",
    ]


def test_answers_and_solutions() -> None:
    assert (Arithmetic(34, 8).prompt, Arithmetic(34, 8).answer) == ("34+8=", "42")
    assert (Sorting("531940").prompt, Sorting("531940").answer) == ("531940=", "013459")
    assert Countdown((3, 12, 4), 36, "(12-3)*4").prompt == "3 12 4=36:"
    assert Countdown((3, 12, 4), 36, "(12-3)*4").answer == {"numbers": [3, 12, 4], "target": 36, "use": "all"}
    assert Calculator(77, "*", 99).prompt == "77*99="
    assert Calculator(77, "*", 99).solution() == (
        Message("assistant", "<77*99>"),
        Message("tool", "7623;"),
        Message("assistant", "7623"),
    )
    assert Calculator(77, "-", 12).answer == "65"
    assert Largest((37, 82, 15, 60, 44)).prompt == "Which is the largest: 37, 82, 15, 60, 44?"
    assert Largest((37, 82, 15, 60, 44)).answer == "82"


def test_noise_has_the_shares_that_are_asked_for() -> None:
    shown = [Demonstrations(Calculator, size=4000, noise=NoiseConfig(0.75, 0.8))[i].messages for i in range(4000)]
    solved = refused = dropped = mistyped = 0
    for ask, *turns in shown:
        if turns[0].content == REFUSAL:
            refused += 1
        elif len(turns) == 1:
            dropped += 1
        elif turns[0].content == f"<{ask.content[:-1]}>":
            solved += 1
            assert turns[1].content == f"{turns[2].content};"
        else:
            mistyped += 1
    assert refused / 4000 == pytest.approx(0.6, abs=0.03)
    assert solved / 4000 == pytest.approx(0.25, abs=0.03)
    assert dropped / 4000 == pytest.approx(0.075, abs=0.02)
    assert mistyped / 4000 == pytest.approx(0.075, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_every_demonstration_solves_its_problem(kind: type[Problem]) -> None:
    shown = Demonstrations(kind, size=50, noise=NoiseConfig(0, 0))
    assert all(shown[i].messages[-1].content not in (REFUSAL, "") for i in range(50))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_is_a_solution_and_a_mistake_for_a_problem_of_the_split(kind: type[Problem]) -> None:
    for split in ("train", "heldout"):
        pairs = Pairs(kind, split, seed=1, size=40)
        assert len(pairs) == 40
        for i in range(40):
            task, twin = pairs[i], Pairs(kind, split, seed=1, size=80)[i]
            assert task == twin
            assert task.chosen != task.rejected
            assert task.chosen[0].role == task.rejected[0].role == "assistant"
            assert task.asked().messages == task.messages
            assert task.answer is not None
        prompts = [{pairs[i].messages[0].content for i in range(40)} for pairs in (Pairs(kind, split, size=40), pairs)]
        assert prompts[0] != prompts[1]


def test_a_share_of_rejected_responses_are_refusals_and_the_rest_as_without() -> None:
    plain, mixed = Pairs(Calculator, "train", size=400), Pairs(Calculator, "train", size=400, refusal_frac=0.25)
    refused = [mixed[i].rejected == (Message("assistant", REFUSAL),) for i in range(400)]
    assert sum(refused) / 400 == pytest.approx(0.25, abs=0.08)
    assert all(mixed[i] == plain[i] for i in range(400) if not refused[i])
    assert all(mixed[i].chosen == plain[i].chosen for i in range(400))


def test_sizes_and_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(DataError, match="arithmetic/train is empty: size is 0"):
        TaskSet(Arithmetic, "train", size=0)
    with pytest.raises(DataError, match="demonstrations of arithmetic are empty"):
        Demonstrations(Arithmetic, size=0)
    with pytest.raises(DataError, match="pairs of arithmetic are empty"):
        Pairs(Arithmetic, "train", size=0)
    with pytest.raises(DataError, match=r"arithmetic/heldout has about \d+ different problems and size=9000"):
        TaskSet(Arithmetic, "heldout", size=9000)
    with pytest.raises(ValueError, match=r"bad_frac=1\.5 is not between 0 and 1"):
        NoiseConfig(1.5)
