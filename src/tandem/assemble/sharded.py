"""The workers of a role that has many ranks, which hold its model together. Imported where they are made, and only there."""

from __future__ import annotations

from tandem import device
from tandem.assemble.workers import Blueprint, Job, worker
from tandem.ports import TransferQueue
from tandem.runtime.placement import Rank, RuntimeConfig
from tandem.train.fsdp import FsdpConfig, fsdp_engine
from tandem.trainer.workers import ModelWorker


def sharded(rank: Rank, model: Blueprint, job: Job, queue: TransferQueue, config: RuntimeConfig) -> ModelWorker:
    """One rank's worker."""
    engine = fsdp_engine(model.build(), job.train, FsdpConfig(config.replicas), device.select("cpu"), limit_s=config.limit_s)
    return worker(rank, engine, job, queue)
