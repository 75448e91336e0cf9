"""The queue of a phase, as the recipe's section `queue` says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias, cast

from tandem.assemble.workers import joining
from tandem.errors import ConfigError
from tandem.queue.cluster import ClusterQueue, Units
from tandem.queue.durable import DurableQueue
from tandem.queue.memory import MemoryQueue
from tandem.recipe import Recipe
from tandem.registry import resolve

Queue: TypeAlias = MemoryQueue | ClusterQueue

_UNITS = {"ray": "tandem.queue.units:start"}


def check_queue(recipe: Recipe) -> None:
    """Looks at values alone. Raises ConfigError for a queue that the runtime has no place for."""
    name, runtime = recipe.queue.name, recipe.placement.name
    if name == "ray" and runtime != "ray":
        raise ConfigError(
            f"queue.name=ray keeps rows on the nodes of a Ray cluster, and with runtime={runtime} there is none: add runtime=ray, "
            f"or use queue.name=memory, which other processes of this machine read without a copy"
        )


def check_room(recipe: Recipe, groups: int, whose: str) -> None:
    if groups > recipe.queue.max_groups:
        raise ConfigError(f"queue.max_groups={recipe.queue.max_groups} is below the {groups} groups that {whose} put there at once")


def queue_of_process(recipe: Recipe) -> Queue:
    """One that lives as long as this process. Raises RegistryError where its extra is not installed."""
    if recipe.queue.name != "ray":
        return MemoryQueue(recipe.queue, join=joining(recipe.placement))
    return ClusterQueue(cast("Callable[[], Awaitable[Units]]", resolve("ray", _UNITS, kind="queue")), recipe.queue)


def rollout_queue(recipe: Recipe, directory: Path) -> Queue:
    """directory: of the phase's files. What a durable queue offers again is taken in strict order of admission."""
    if recipe.queue.name != "durable":
        return queue_of_process(recipe)
    passing_over = {"trainer.window": recipe.trainer.window, "rollout.spare_groups": recipe.rollout.spare_groups}
    for name, groups in passing_over.items():
        if groups:
            raise ConfigError(
                f"{name}={groups} lets groups be passed over, and queue.name=durable gives back what outlived a process in order: "
                f"set {name}=0, or queue.name=memory"
            )
    return DurableQueue(directory / "queue", recipe.queue, join=joining(recipe.placement))
