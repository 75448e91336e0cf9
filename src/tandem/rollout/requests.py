"""What a request may ask of an engine: looked at where it is made, so that what cannot be served is refused at once."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import EngineError
from tandem.types import GenerateRequest, PolicyRef


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int, policy: PolicyRef) -> None:
    """policy: that the engine holds. Raises EngineError for a request that cannot be served, saying why and what to change."""

    def refuse(why: str) -> EngineError:
        return EngineError(f"request {request.key}: {why}")

    params, num = request.params, len(request.tokens)
    if not 0 <= request.sampled < num:
        raise refuse(f"{num} tokens of which {request.sampled} were sampled; a request begins with at least one prompt token")
    longest = num - request.sampled + params.max_tokens
    if longest > max_context:
        raise refuse(
            f"{num - request.sampled} prompt tokens and max_tokens={params.max_tokens} make {longest}, but the context is "
            f"{max_context}; shorten the prompt, lower max_tokens or raise max_context"
        )
    for name, ids in (("prompt token", request.tokens), ("stop id", params.stop_ids)):
        if bad := _outside(ids, vocab_size):
            raise refuse(f"{name} {bad[0]} is not in the vocabulary of {vocab_size}; is it another tokenizer's?")
    if request.adapter is not None:
        raise refuse(f"adapter {request.adapter!r} is asked for and this engine has no adapters")
    if request.extra:
        raise refuse(f"extra parameters {sorted(request.extra)} are not known to this engine")
    if request.min_policy is not None and policy < request.min_policy:
        raise refuse(f"it needs policy {request.min_policy} or later and the engine holds {policy}; publish first")


def _outside(ids: Sequence[int], size: int) -> list[int]:
    return [token for token in ids if not 0 <= token < size] if ids and not (min(ids) >= 0 and max(ids) < size) else []
