"""Batches as they come: rows of any length with holes, episodes of several rows, groups in no order; and what may be done
to them without changing the update.

Legend: B rows, N packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algos.columns import unit_of
from tandem.algos.functions import CORRECTIONS, LOSSES
from tandem.algos.table import ALGORITHMS, parameter_types
from tandem.types import Algorithm
from tests.algos.pipeline import OF_ROWS, Rows, algorithm

modestly = settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
"""For laws that are checked on every subject."""


def _subjects() -> dict[str, Algorithm]:
    """Every row, with the KL from the reference wherever it can be had; every loss and correction that no row names."""
    found = {
        name: algorithm(name, **({"kl_coef": 0.1} if "kl_coef" in parameter_types(row) else {})) for name, row in ALGORITHMS.items()
    }
    named = {part for row in ALGORITHMS.values() for part in row.loss.split("+")}
    plain = algorithm("grpo")
    found |= {f"grpo with {loss}": replace(plain, loss=f"ppo_clip+{loss}") for loss in LOSSES.keys() - named}
    variants: dict[str, dict[str, Any]] = {f"grpo with {name}": {"correction": name} for name in CORRECTIONS}
    variants |= {f"grpo with normalised {name}": {"correction": {name: {"normalize": True}}} for name in ("token_tis", "seq_tis")}
    variants["grpo with what m2po keeps"] = {"correction": {"m2po": {"m2_threshold": 1e-3}}, "denominator": "kept"}
    found |= {name: algorithm("grpo", **params) for name, params in variants.items()}
    found["reinforce_pp with a penalty"] = algorithm("reinforce_pp", reward_kl_coef=0.1)
    found["kl_cov with many"] = algorithm("kl_cov", cov_frac=0.4)
    found["clip_cov with many"] = algorithm("clip_cov", cov_frac=0.4, cov_low=1e-4)
    return found


SUBJECTS = _subjects()
OF_PAIRS = {name for name, chosen in SUBJECTS.items() if unit_of(chosen) == "group"}
"""Those whose loss compares the two rows of a pair, and knows no other row."""


def make_batch(
    lengths: Sequence[int],
    *,
    mask: Sequence[bool] | None = None,
    groups: Sequence[int] | None = None,
    episodes: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
    seed: int = 0,
    spread: float = 0.1,
) -> Rows:
    """Every column that some algorithm reads, in multiples of 2^-16, float64. rewards, groups: of each episode, by its id.

    spread: how far the policies are from each other, in logprobs.
    """
    seeded, total, num = torch.Generator().manual_seed(seed), sum(lengths), len(lengths)
    episode = list(range(num)) if episodes is None else list(episodes)

    def drawn(size: Sequence[int] | int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=seeded, dtype=torch.float64)

    def near(logprobs: Tensor, scale: float) -> Tensor:
        return -(logprobs + drawn(total, scale)).abs() - 1e-3

    rollout = -torch.rand(total, generator=seeded, dtype=torch.float64) - 0.1
    old = near(rollout, spread)
    of_episode = {
        "rewards": torch.tensor(
            list(rewards) if rewards is not None else [0.25 * (e % 4) for e in range(num)], dtype=torch.float64
        ),
        "groups": torch.tensor(list(groups) if groups is not None else [e % 2 for e in range(num)]),
        "reward_baselines": torch.rand(num, generator=seeded, dtype=torch.float64),
        "reward_components": torch.rand(num, 2, generator=seeded, dtype=torch.float64),
    }
    made = {
        **{name: column[episode] for name, column in of_episode.items()},
        "episode": torch.tensor(episode),
        "lengths": torch.tensor(list(lengths)),
        "temperature": torch.ones(num),
        "mask": torch.tensor(list(mask) if mask is not None else [True] * total, dtype=torch.bool),
        "tokens": torch.arange(total),
        "turns": torch.arange(total) // 2,
        "rollout_logprobs": rollout,
        "old_logprobs": old,
        "logprobs": near(old, spread),
        "ref_logprobs": near(old, 0.3),
        "teacher_logprobs": near(old, 0.3),
        "teacher_topk_ids": torch.arange(3 * total).view(total, 3),
        "teacher_topk_logprobs": -torch.rand(total, 3, generator=seeded, dtype=torch.float64) - 1.2,
        "topk_logprobs": -torch.rand(total, 3, generator=seeded, dtype=torch.float64) - 1.2,
        "values": drawn(total),
        "returns": drawn(total),
        "prm_logprobs": near(old, 0.5),
        "sum_pi_squared": torch.rand(total, generator=seeded, dtype=torch.float64),
        "uniforms": torch.rand(total, generator=seeded, dtype=torch.float64),
    }
    return {name: (column * 65536).round() / 65536 if column.is_floating_point() else column for name, column in made.items()}


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """Up to six rows of up to six tokens, of which one counts at least."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    num, total = len(lengths), sum(lengths)
    mask = draw(st.lists(st.sampled_from([True, True, False]), min_size=total, max_size=total))
    mask[draw(st.integers(0, total - 1))] = True
    return make_batch(
        lengths,
        mask=mask,
        groups=draw(st.lists(st.sampled_from([400, -7]), min_size=num, max_size=num)),
        episodes=draw(st.one_of(st.just(range(num)), st.lists(st.integers(0, num - 1), min_size=num, max_size=num))),
        rewards=draw(st.lists(st.integers(0, 4).map(lambda k: k / 4), min_size=num, max_size=num)),
        seed=draw(st.integers(0, 1000)),
        spread=draw(st.sampled_from([0.05, 0.5])),
    )


@st.composite
def pairs(draw: st.DrawFn) -> Rows:
    """Up to three pairs, in any order; each row counts with a token at least."""
    places = draw(st.integers(1, 3).flatmap(lambda num: st.permutations([(g, c) for g in range(num) for c in (True, False)])))
    lengths = [draw(st.integers(1, 5)) for _ in places]
    mask = [flag for n in lengths for flag in [*draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)), True]]
    rows = make_batch(lengths, mask=mask, groups=[group for group, _ in places], seed=draw(st.integers(0, 1000)))
    return rows | {"chosen": torch.tensor([chosen for _, chosen in places]), "margins": rows["groups"].double() / 4}


def batches_of(name: str) -> st.SearchStrategy[Rows]:
    """For this subject."""
    return pairs() if name in OF_PAIRS else batches()


# ------------------------------------------------------------------------------------------- another layout

Token = int | None
"""The place of a token in the batch it comes from; None is a masked token that was not there, full of garbage."""


@dataclass(frozen=True)
class Layout:
    """rows: for each row the one it takes its columns from, and its tokens."""

    rows: list[tuple[int, list[Token]]]

    @property
    def tokens(self) -> list[Token]:
        return [token for _, tokens in self.rows for token in tokens]

    def of(self, rows: Rows, garbage: float = torch.nan) -> Rows:
        """The batch in this layout."""
        lengths = torch.tensor([len(tokens) for _, tokens in self.rows], dtype=torch.int64)
        return {
            name: lengths
            if name == "lengths"
            else column[[row for row, _ in self.rows]]
            if name in OF_ROWS
            else self.column(column, filled(name, column.dtype, garbage))
            for name, column in rows.items()
        }

    def column(self, column: Tensor, fill: float) -> Tensor:
        """A column of tokens."""
        index = torch.tensor([-1 if token is None else token for token in self.tokens], dtype=torch.int64)
        if not len(column):
            return column.new_full((len(index), *column.shape[1:]), fill)
        new = (index < 0).reshape(-1, *(1,) * (column.ndim - 1))
        return torch.where(new, torch.tensor(fill, dtype=column.dtype), column[index.clamp(min=0)])


def filled(name: str, dtype: torch.dtype, garbage: float) -> float:
    """What stands under the mask: garbage in numbers, true in choices."""
    return 0 if name == "mask" else garbage if dtype.is_floating_point else 1


def layout_of(rows: Rows) -> Layout:
    """As it is."""
    ends = [0, *rows["lengths"].cumsum(0).tolist()]
    return Layout([(row, [*range(ends[row], ends[row + 1])]) for row in range(len(rows["lengths"]))])


def draw_parts(draw: st.DataObject, rows: Rows, *, whole_groups: bool) -> list[Layout]:
    """Rows or groups dealt to parts: each is what a micro-batch on some rank holds."""
    num = draw.draw(st.integers(1, 3))
    units = rows["groups"].tolist() if whole_groups else range(len(rows["lengths"]))
    owner = {unit: draw.draw(st.integers(0, num - 1)) for unit in dict.fromkeys(units)}
    whole = layout_of(rows).rows
    return [Layout([row for row, unit in zip(whole, units, strict=True) if owner[unit] == each]) for each in range(num)]


def draw_order(draw: st.DataObject, rows: Rows) -> Layout:
    return Layout(draw.draw(st.permutations(layout_of(rows).rows)))


def draw_idle_rows(draw: st.DataObject, rows: Rows) -> Layout:
    """With more rows of the same episodes, without tokens or with masked ones, anywhere among the others."""
    found = list(layout_of(rows).rows)
    for length in draw.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
        found.insert(draw.draw(st.integers(0, len(found))), (draw.draw(st.integers(0, len(rows["lengths"]) - 1)), [None] * length))
    return Layout(found)


def draw_observations(draw: st.DataObject, rows: Rows) -> Layout:
    """With masked tokens among the others and behind them."""
    found: list[tuple[int, list[Token]]] = []
    for row, tokens in layout_of(rows).rows:
        now = list(tokens)
        for _ in range(draw.draw(st.integers(0, 3))):
            now.insert(draw.draw(st.integers(0, len(now))), None)
        found.append((row, now + [None] * draw.draw(st.integers(0, 2))))
    return Layout(found)


def under_the_mask(rows: Rows, garbage: float) -> Rows:
    """The same with garbage in every masked token."""
    layout = layout_of(rows)
    counts = iter(rows["mask"].tolist())
    masked = Layout([(row, [token if next(counts) else None for token in tokens]) for row, tokens in layout.rows])
    return masked.of(rows, garbage)
