"""WorkerGroups, the arms of the single controller, and the names that a worker's author needs."""

from tandem.ports import Collect, Dispatch, WorkerGroup, register
from tandem.runtime.placement import Rank, ResourcePool

__all__ = ["Collect", "Dispatch", "Rank", "ResourcePool", "WorkerGroup", "register"]
