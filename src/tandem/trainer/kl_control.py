"""KL coefficients that follow the KL: one for each column that an algorithm reads, kept from step to step.

    step n: the column holds c_n; the KL of the batch, between the policy before its update and the reference, makes c_(n+1)

The only stage with a state of its own, which is a few numbers and part of every snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch

from tandem.algos.columns import KLControl, kl_controls
from tandem.algos.kl import adapted_kl_coef, kl_divergence
from tandem.algos.terms import masked_mean
from tandem.data_proto import DataProto
from tandem.errors import NonFiniteError
from tandem.ports import TransferQueue
from tandem.trainer.plan import BatchStage
from tandem.trainer.stages import on_rows
from tandem.types import Algorithm, Json, Metrics

_NEEDS = frozenset({"mask", "old_logprobs", "ref_logprobs"})


class KLControls:
    """The adaptive coefficients of an algorithm, by the name of their column."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._controls = kl_controls(algorithm)
        self._coefs = {column: control.first for column, control in self._controls.items()}

    def stages(self, queue: TransferQueue) -> tuple[BatchStage, ...]:
        """A stage for each coefficient: a row column with the same number in every row of a batch."""
        return tuple(self._stage(column, control, queue) for column, control in self._controls.items())

    def state(self) -> dict[str, Json]:
        return {**self._coefs}

    def restore(self, state: Mapping[str, Json]) -> None:
        self._coefs = {column: cast("float", state[column]) for column in self._controls}

    def _stage(self, column: str, control: KLControl, queue: TransferQueue) -> BatchStage:
        def apply(rows: DataProto) -> tuple[DataProto, Metrics]:
            coef = self._coefs[column]
            kl = masked_mean(kl_divergence(rows["old_logprobs"], rows["ref_logprobs"], estimator=control.estimator), rows["mask"])
            if kl.count and not math.isfinite(kl.value):
                raise NonFiniteError(
                    f"the KL from the reference that {column} follows is {kl.value}: look at the logprobs of the two"
                )
            if kl.count:
                self._coefs[column] = adapted_kl_coef(
                    coef,
                    kl.value,
                    target=control.target,
                    horizon=control.horizon,
                    num_steps=len({key.place for key in rows.keys}),
                )
            metrics = Metrics.mean({f"train/{column}": coef}) + Metrics({f"train/{column}_follows": kl})
            return rows.with_columns(row={column: torch.full((len(rows),), coef)}), metrics

        return on_rows(column, _NEEDS, frozenset({column}), apply, queue, "batch")
