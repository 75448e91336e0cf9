"""Dynamic sampling: which groups are worth training on. A filter takes the rewards of one group, [n], and says so."""

from __future__ import annotations

from torch import Tensor

from tandem.algos.checks import checked


@checked
def varied_rewards(rewards_n: Tensor) -> bool:
    """Rewards differ, so that a group baseline leaves something to learn (DAPO, arXiv 2503.14476, section 3.2)."""
    return bool((rewards_n != rewards_n[:1]).any())
