"""What a model gives for each token of a batch: the part of a training engine that is about its model, and not about gradients.

A decoder gives log-probabilities and what goes with them, a value model gives values. Everything is packed, [N, ...], 0 where
masked. A sharded engine calls `given` where the weights are whole.

Legend: N packed tokens, K tokens looked up at one place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.algos.terms import TOPK_IDS, LossInputs
from tandem.data_proto import DataProto
from tandem.models.heads import row_logprobs, row_sum_pi_squared, row_top, row_values
from tandem.models.language_model import LanguageModel
from tandem.models.values import ValueModel

_POLICY = frozenset({"logprobs", "entropy", "sum_pi_squared", "top_ids", "top_logprobs"})
_BASE = frozenset({"base_logprobs"})
_VALUES = frozenset({"values"})
_AT_TOPK = "at_topk"  # [N, K], of the tokens that column TOPK_IDS names


def gives(model: LanguageModel) -> frozenset[str]:
    """The outputs that may be asked of this model; see ports.TrainEngine.forward."""
    policy = _POLICY if model.adapter is None else _POLICY | _BASE
    return _VALUES if isinstance(model, ValueModel) else policy


def given(model: LanguageModel, part: DataProto, want: frozenset[str], top: int = 0) -> dict[str, Tensor]:
    """The wanted outputs of these rows; logprobs, entropy and values with gradient."""
    padded = part.pad("tokens"), part.lengths, part.pad("mask"), part["temperature"]
    found: dict[str, Tensor] = {}
    if isinstance(model, ValueModel):
        found["values"] = row_values(model, *padded[:3])
    if want & {"logprobs", "entropy"}:
        targets = torch.cat([part["tokens"][:, None], part[TOPK_IDS]], 1) if _AT_TOPK in want else part["tokens"][:, None]
        wide = part.with_columns(token={TOPK_IDS: targets}).pad(TOPK_IDS)
        logprobs, entropy = row_logprobs(model, *padded, "entropy" in want, wide)
        found |= {"logprobs": logprobs[..., 0], _AT_TOPK: logprobs[..., 1:]}
        found |= {} if entropy is None else {"entropy": entropy}
    if "base_logprobs" in want and model.adapter is not None:
        with torch.no_grad(), model.adapter.switched_off():
            found["base_logprobs"], _ = row_logprobs(model, *padded)
    if "sum_pi_squared" in want:
        found["sum_pi_squared"] = row_sum_pi_squared(model, *padded)
    if want & {"top_ids", "top_logprobs"}:
        found["top_ids"], found["top_logprobs"] = row_top(model, *padded, top)
    valid = part.valid()
    return {name: found[name][valid] for name in want}


def wanted_by_losses(model: LanguageModel, part: DataProto) -> frozenset[str]:
    """What a loss on these rows may read of the model."""
    if isinstance(model, ValueModel):
        return _VALUES
    return frozenset({"logprobs", "entropy"} | ({_AT_TOPK} if TOPK_IDS in part.columns else set[str]()))


def loss_inputs(found: Mapping[str, Tensor], part: DataProto) -> LossInputs:
    """These outputs of the model and the columns of the rows, as a loss takes them."""
    return LossInputs(
        found.get("logprobs"),
        part["mask"],
        part.lengths,
        part.batch,
        entropy=found.get("entropy"),
        groups=part.group_of_row,
        at_topk=found.get(_AT_TOPK),
        keys=part.keys,
        values=found.get("values"),
    )
