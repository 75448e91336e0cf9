"""WorkerGroups: the arms of the single controller."""
