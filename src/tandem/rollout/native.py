"""The native rollout engine: continuous batching over the slots of a KV cache, on the decoder that training uses.

Running requests sit in slots 0 to n - 1 without gaps, so a step costs what its live rows cost. One step:

    seat     waiting requests take the places of those that ended, the last rows move into places still open, long rows
             before short ones where the short would read much of their window in vain
    fill     keys and values of all tokens but the last are written for new rows; requests with equal prompts share
             one prefill, also with a request that is running already, and a turn that goes on after an earlier one of its
             episode reads what is new
    decode   every row's last token goes through the decoder, unless all rows are new: then it was filled with the others
    sample   the next token of every row, from what came out
    deliver  chunks of rows that ended or have `chunk_tokens` undelivered tokens

The decoder, its heads and its numerics come from models/, so logprobs equal the trainer's bit for bit where the
start-up probe says so. It does not page its cache, and it runs on the CPU.

Once a later turn was seen, rows that end are kept where they lie, in places that no running request has: those of live rows come
first, kept ones behind them, and the one that ended first gives way where a place is wanted.

Legend: n live rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.faults import crash_point
from tandem.models.decoder import Decoder
from tandem.models.heads import next_logprobs
from tandem.models.kv_cache import KVCache
from tandem.models.probe import TOLERANCE
from tandem.models.windows import SPARED, spread, window_cut
from tandem.ports import Held, Place, WeightSource
from tandem.rollout import weights
from tandem.rollout.randomness import base, uniforms
from tandem.rollout.sampling import Choices, sample
from tandem.rollout.stepping import SteppingEngine, Stream
from tandem.types import Key, PolicyRef
from tandem.weights import WeightBlock


@dataclass(frozen=True)
class NativeConfig:
    """slots: requests that run at once. max_context: tokens of one row, prompt and answer together.

    chunk_tokens: tokens that gather before a consumer hears of them (stop strings are looked for at every token).
    prefill_tokens: padded tokens of one prefill call at most, unless a single row has more.
    """

    slots: int = 64
    max_context: int = 1024
    chunk_tokens: int = 16
    prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("slots", "max_context", "chunk_tokens", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class _Kept(NamedTuple):
    """A row that has ended: where it lies, and the tokens whose keys and values lie there."""

    slot: int
    tokens: list[int]


class NativeEngine(SteppingEngine):
    """Implements ports.RolloutEngine. text: tokens to text, for stop strings. exact: what the start-up probe found; tolerance: of
    logprobs, where it found otherwise.

    After `load_weights` and after `place("device")` the keys and values of running requests are computed again under
    the weights held then, from their prompts and the tokens sampled so far: a stale cache is never used. Weights that
    are shared with a trainer change when the trainer's do, so pause the engine around the update.
    """

    def __init__(
        self,
        decoder: Decoder,
        text: Callable[[Sequence[int]], str],
        config: NativeConfig,
        *,
        exact: bool,
        tolerance: float = TOLERANCE,
        policy: PolicyRef | None = None,
    ) -> None:
        if config.max_context > decoder.config.max_positions:
            raise ConfigError(
                f"max_context {config.max_context} is more than the model's {decoder.config.max_positions} positions; lower it"
            )
        sizes = {"vocab_size": decoder.config.vocab_size, "max_context": config.max_context}
        super().__init__(text, **sizes, policy=policy or PolicyRef())
        self.config = config
        self._decoder, self._exact, self._tolerance = decoder, exact, tolerance
        self._cache: KVCache | None = None
        self._spent: KVCache | None = None  # of weights that are gone; its memory is used again
        self._seats: list[Stream | None] = []  # slot -> request; None where one ended since the last step
        self._slot_of: dict[Stream, int] = {}
        self._turns = False  # whether a request has gone on after an earlier turn
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()  # the one that ended first stands first
        self._read: dict[int, int] = {}  # slot of a new row -> tokens whose keys and values lie there already
        self._table = _slot_table(config)
        self._stop_ids = np.full((config.slots, 1), -1, np.int64)

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"batch_invariant", "exact"} if self._exact else ())

    async def load_weights(self, source: WeightSource, policy: PolicyRef) -> None:
        """What comes is waited for in a thread; nothing is sampled meanwhile."""
        crash_point("publish.before_load")
        self._deliver_all()
        if not source.shared:
            await self._halted(weights.load, self._decoder, source)
        crash_point("publish.in_load")
        self._policy = policy
        self._spent, self._cache = self._cache or self._spent, None
        self._kept.clear()
        crash_point("publish.after_load")

    async def held(self, blocks: Sequence[Sequence[WeightBlock]], rows: Sequence[Sequence[int]]) -> Held:
        """The logprobs are those of generation: token by token, with a cache of their own."""
        parameters = dict(self._decoder.named_parameters())
        hashes = tuple(weights.wire_hash(parameters, part) for part in blocks)
        return Held(hashes, tuple(map(self._logprobs, rows)), 0.0 if self._exact else self._tolerance)

    @torch.inference_mode()
    def _logprobs(self, row: Sequence[int]) -> npt.NDArray[np.float32]:
        """Of each token from the second on."""
        tokens, found = torch.tensor(row), np.zeros(len(row) - 1, np.float32)
        cache = KVCache(self._decoder.config, 1, len(row))
        for place in range(len(found)):
            hidden = self._decoder.decode(tokens[place : place + 1], torch.tensor([place]), cache)
            found[place] = next_logprobs(self._decoder, hidden, torch.ones(1), cache)[0, tokens[place + 1]].item()
        return found

    async def place(self, where: Place) -> Mapping[str, int]:
        """On the host the cache is freed; weights stay, since they may be the trainer's."""
        held = await super().place(where)
        if where == "host":
            self._reset()
        return held

    # ------------------------------------------------------------------------------------------------- one step

    @torch.inference_mode()
    def _step(self) -> None:
        new = self._seat()
        if self._cache is None:
            sizes = self._decoder.config, self.config.slots, self.config.max_context
            self._cache, self._spent = self._spent.emptied() if self._spent else KVCache(*sizes), None
            new = list(range(len(self._seats)))
        hidden = self._fill(self._cache, new)
        if hidden is None:
            self._sort()
        rows = self._table[: len(self._seats)]
        if hidden is None:
            hidden = self._decoder.decode(torch.from_numpy(rows["token"]), torch.from_numpy(rows["position"]), self._cache)
        logprobs = next_logprobs(self._decoder, hidden, torch.from_numpy(rows["temperature"]), self._cache)
        draws = torch.from_numpy(uniforms(rows["base"], rows["position"] + 1))
        choices = Choices(*(torch.from_numpy(rows[name]) for name in _CHOICES)) if rows["chooses"].any() else None
        tokens, chosen = sample(logprobs, draws, choices)
        self._record(rows, tokens.numpy(), chosen.numpy())

    def _seat(self) -> list[int]:
        """Closes the gaps, with waiting requests first and then with the last rows; returns the slots of new requests."""
        seats, new = self._seats, list[int]()
        gaps = [slot for slot, stream in enumerate(seats) if stream is None]
        while self._waiting and (gaps or len(seats) < self.config.slots):
            stream, _ = self._waiting.popitem(last=False)
            if not gaps:
                gaps.append(len(seats))
                seats.append(None)
            new.append(gaps.pop(0))
            self._find(new[-1], stream)
            self._take(new[-1], stream)
        num = len(self._slot_of)
        targets = [slot for slot in gaps if slot < num]
        sources = [slot for slot in range(num, len(seats)) if seats[slot] is not None]
        if sources:
            self._move(sources, targets)
        del seats[num:]
        return new

    def _sort(self) -> None:
        """Swaps rows so that long ones stand before short ones, where two windows then spare many more keys than now."""
        positions = self._table["position"][: len(self._seats)]
        if spread(positions) <= 2 * SPARED:
            return
        order = np.argsort(-positions, kind="stable")
        cut, spared = window_cut(positions[order])
        if spared > 2 * max(window_cut(positions)[1], SPARED):
            long = order[:cut]
            behind, before = np.sort(long[long >= cut]).tolist(), np.setdiff1d(np.arange(cut), long).tolist()
            self._move(behind + before, before + behind)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """All at the same time; what is kept at a target goes where the row that comes there was."""
        source_of = dict(zip(targets, sources, strict=True))
        kept = {key: each for key, each in self._kept.items() if each.slot in source_of}
        if self._cache is not None:
            written = max(int(self._table["position"][sources].max()), *(len(each.tokens) for each in kept.values()), 0)
            away = [each.slot for each in kept.values()]
            begin, end = [*sources, *away], [*targets, *(source_of[slot] for slot in away)]
            self._cache.copy(torch.tensor(begin), torch.tensor(end), written)
        for key, each in kept.items():
            self._kept[key] = each._replace(slot=source_of[each.slot])
        self._table[targets], self._stop_ids[targets] = self._table[sources], self._stop_ids[sources]
        for stream, target in zip([self._seats[source] for source in sources], targets, strict=True):
            assert stream is not None
            self._seats[target], self._slot_of[stream] = stream, target

    def _find(self, slot: int, stream: Stream) -> None:
        """Has `slot` hold what is kept of the request's earlier turns; what is kept there of another goes elsewhere, or is lost."""
        self._turns |= stream.request.turn > 0
        own, moves = self._kept.pop(stream.request.key, None), list[tuple[int, int, int]]()
        if own is not None and stream.tokens[:-1][: len(own.tokens)] == own.tokens:
            self._read[slot] = len(own.tokens)
            if own.slot != slot:
                moves.append((own.slot, slot, len(own.tokens)))
        other = next((key for key, kept in self._kept.items() if kept.slot == slot), None)
        if other is not None:
            place = self._spare_place() if own is None else own.slot
            if other in self._kept:
                moves.append((slot, place, len(self._kept[other].tokens)))
                self._kept[other] = self._kept[other]._replace(slot=place)
        if moves and self._cache is not None:
            sources, targets, lengths = zip(*moves, strict=True)
            self._cache.copy(torch.tensor(sources), torch.tensor(targets), max(lengths))

    def _spare_place(self) -> int:
        """One that nobody has; where there is none, that of the kept row which ended first."""
        taken = {kept.slot for kept in self._kept.values()}
        for place in range(len(self._seats), self.config.slots):
            if place not in taken:
                return place
        return self._kept.popitem(last=False)[1].slot

    def _take(self, slot: int, stream: Stream) -> None:
        params, position = stream.request.params, len(stream.tokens) - 1
        self._seats[slot], self._slot_of[stream] = stream, slot
        row = self._table[slot]
        row["token"], row["position"], row["left"], row["unsent"] = stream.tokens[-1], position, stream.left, 0
        row["due"] = 1 if params.stop else self.config.chunk_tokens
        row["base"] = base(stream.request.seed, stream.request.key, stream.request.turn)
        row["temperature"], row["greedy"] = params.temperature, params.temperature == 0
        row["top_p"], row["top_k"], row["min_p"] = params.top_p, params.top_k, params.min_p
        row["chooses"] = params.temperature == 0 or params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        num = len(params.stop_ids)
        if num > self._stop_ids.shape[1]:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, num - self._stop_ids.shape[1])), constant_values=-1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, :num] = params.stop_ids

    def _fill(self, cache: KVCache, slots: list[int]) -> Tensor | None:
        """Writes keys and values of all tokens but the last of the requests in `slots`; the others are written.

        Where `slots` are all requests, the last tokens are read, too, and what `decode` would give for them is given: [n, D].
        """
        if not slots:
            return None
        inside, whole = set(slots), len(slots) == len(self._seats)
        owners = {stream.prompt: slot for slot, stream in enumerate(self._seats) if stream is not None and slot not in inside}
        read: list[int] = []
        copies: list[tuple[int, int, int]] = []
        for slot in slots:
            stream = self._seats[slot]
            assert stream is not None
            begun = len(stream.tokens) > len(stream.request.tokens)
            if not begun and stream.prompt in owners:
                copies.append((owners[stream.prompt], slot, len(stream.tokens) - (not whole)))
            else:
                if not (whole and begun):  # what comes out behind its last token is not what comes out behind the prompt
                    owners.setdefault(stream.prompt, slot)
                read.append(slot)
        order, hidden = self._prefill(cache, read, whole)
        if copies:
            sources, targets, lengths = zip(*copies, strict=True)
            cache.copy(torch.tensor(sources), torch.tensor(targets), max(lengths))
        if not whole:
            return None
        place = {slot: place for place, slot in enumerate(order)}
        place |= {target: place[source] for source, target, _ in copies}
        return torch.cat(hidden).index_select(0, torch.tensor([place[slot] for slot in range(len(slots))]))

    def _prefill(self, cache: KVCache, slots: list[int], whole: bool) -> tuple[list[int], list[Tensor]]:
        """In calls of rows of similar length, the longest first: the slots in this order, and of each the last hidden state.

        whole: with the last token of each.
        """
        order, hidden, rows = list[int](), list[Tensor](), list[tuple[int, list[int], int]]()
        for slot in slots:
            stream = self._seats[slot]
            assert stream is not None
            rows.append((slot, stream.tokens[: len(stream.tokens) - (not whole)], self._read.get(slot, 0)))
        self._read.clear()
        for part in self._calls([row for row in rows if row[1] and not row[2]]):
            states = self._decoder.prefill(
                _padded([tokens for _, tokens, _ in part]), cache, torch.tensor([row[0] for row in part])
            )
            hidden.append(states[torch.arange(len(part)), torch.tensor([len(tokens) - 1 for _, tokens, _ in part])])
            order += [slot for slot, _, _ in part]
        for part in self._calls([row for row in rows if 0 < row[2] < len(row[1])]):
            new = [tokens[kept:] for _, tokens, kept in part]
            facts = (torch.tensor(each) for each in ([row[0] for row in part], [row[2] for row in part]))
            hidden.append(self._decoder.extend(_padded(new), torch.tensor([len(row) for row in new]), cache, *facts))
            order += [slot for slot, _, _ in part]
        return order, hidden

    def _calls(self, rows: list[tuple[int, list[int], int]]) -> Iterator[list[tuple[int, list[int], int]]]:
        """Rows (slot, tokens, how many of them are read already) for one call each."""
        rows = sorted(rows, key=lambda row: -len(row[1]))
        while rows:
            num = max(1, self.config.prefill_tokens // len(rows[0][1]))
            yield rows[:num]
            self._counts["prefill_tokens"] += sum(len(tokens) - kept for _, tokens, kept in rows[:num])
            rows = rows[num:]

    def _record(self, rows: npt.NDArray[np.void], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> None:
        """Notes one new token a row; ends and delivers what is due."""
        num = len(rows)
        self._counts["steps"] += 1
        self._counts["sampled_tokens"] += num
        at = np.arange(num)
        rows["tokens"][at, rows["unsent"]], rows["logprobs"][at, rows["unsent"]] = tokens, logprobs
        rows["token"] = tokens
        for name, change in (("unsent", 1), ("position", 1), ("left", -1)):
            rows[name] += change
        stopped = (self._stop_ids[:num] == tokens[:, None]).any(1)
        for slot in np.flatnonzero(stopped | (rows["left"] == 0) | (rows["unsent"] == rows["due"])).tolist():
            stream = self._seats[slot]
            assert stream is not None
            stop = self._verdict(stream, rows["tokens"][slot, : rows["unsent"][slot]].tolist())
            if stop is None:
                self._deliver(stream)
            else:
                self._end(stream, stop)

    def _unsent(self, stream: Stream) -> tuple[list[int], list[float]]:
        slot = self._slot_of.get(stream)
        if slot is None:
            return [], []
        row = self._table[slot]
        num, row["unsent"] = int(row["unsent"]), 0
        return row["tokens"][:num].tolist(), row["logprobs"][:num].tolist()

    def _vacate(self, stream: Stream) -> None:
        slot = self._slot_of.pop(stream, None)
        if slot is None:
            return
        self._seats[slot] = None
        self._kept.pop(stream.request.key, None)
        if self._turns and self._cache is not None:
            self._kept[stream.request.key] = _Kept(slot, stream.tokens[: int(self._table["position"][slot])])

    def _reset(self) -> None:
        self._cache = self._spent = None
        self._kept.clear()


def _padded(rows: Sequence[list[int]]) -> Tensor:
    """[B, T], with zeros on the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


_CHOICES = ("greedy", "top_p", "top_k", "min_p")


def _slot_table(config: NativeConfig) -> npt.NDArray[np.void]:
    """One record a slot: the token to decode next and its position, how to sample, and what is not delivered yet."""
    fields: list[tuple[Any, ...]] = [
        ("token", np.int64),
        ("position", np.int64),
        ("left", np.int64),
        ("base", np.uint64),
        ("temperature", np.float32),
        ("greedy", np.bool_),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("min_p", np.float64),
        ("chooses", np.bool_),
        ("due", np.int64),
        ("unsent", np.int64),
        ("tokens", np.int64, config.chunk_tokens),
        ("logprobs", np.float32, config.chunk_tokens),
    ]
    return np.zeros(config.slots, np.dtype(fields, align=True))
