"""Tasks of the package reasoning-gym, by the name of one of its generators. An extra: `reasoning`.

Which split a question is in is a property of the question, as for built-in tasks, so that the splits cannot overlap. A task says in
its info how its entry is made again, which its reward needs to judge an answer.
"""

from __future__ import annotations

from typing import Any, cast

from tandem.data.builtin import HELDOUT_SHARE, Split, split_of_text
from tandem.errors import DataError
from tandem.types import Json, Message, Task

PREFIX = "reasoning_gym/"


class ReasoningTasks:
    """`size` different questions of one split. Implements the Dataset port.

    name: "reasoning_gym/chain_sum" and the like. Raises DataError where the package is missing, has no such generator, or makes
    fewer different questions than asked for.
    """

    def __init__(self, name: str, split: Split, *, seed: int = 0, size: int) -> None:
        if size < 1:
            raise DataError(f"the dataset {name} is empty: size is {size} and must be at least 1")
        self.name = f"{name}/{split}"
        generator, draws = name.removeprefix(PREFIX), 4 * HELDOUT_SHARE * size + 64  # made one after the other, as they are needed
        tasks: dict[str, Task] = {}
        for index, entry in enumerate(_entries(generator, draws, seed)):
            question = str(entry["question"])
            if question not in tasks and split_of_text(f"{name}:{question}") == split:
                made: dict[str, Json] = {"name": generator, "size": draws, "seed": seed, "index": index}
                identity = f"{self.name}/{seed}/{len(tasks)}"
                tasks[question] = Task(identity, (Message("user", question),), str(entry["answer"]), name, {"reasoning_gym": made})
            if len(tasks) == size:
                break
        if len(tasks) < size:
            raise DataError(f"{self.name} has about {len(tasks)} different questions and size={size} are asked for: ask for fewer")
        self._tasks = tuple(tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]


def _entries(generator: str, draws: int, seed: int) -> Any:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingTypeStubs]
    except ModuleNotFoundError:
        raise DataError(
            f"the task {PREFIX}{generator} is made by the package reasoning-gym, which is not installed: "
            f"pip install 'tandem-rl[reasoning]'"
        ) from None
    try:
        return cast("Any", reasoning_gym).create_dataset(generator, size=draws, seed=seed)
    except ValueError as problem:
        raise DataError(f"the task {PREFIX}{generator} cannot be made: {problem}; see reasoning-gym's gallery for names") from None
