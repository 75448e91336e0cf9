"""Plain torch that generates what benchmarks/rollout.py asks for, as fast as it simply goes: a floor, not an engine.

Fused projections, rotation as one complex product, a prefill a prompt, no operation for a row that has ended. All rows share
a clock: what a row writes at time t is column t of its slot, so that a new key is a slice and rows of one age need no mask.
There is no exactness, no request but a length, no stop, no interruption, no delivery, and one way to sample. Qwen2 shapes.

Legend: n live rows, D width, H heads, K key-value heads, d head size, G = H / K.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from turns import serve


class Floor:
    def __init__(self, path: Path) -> None:
        config, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width, self.eps = config["hidden_size"], config["rms_norm_eps"]
        self.size = config.get("head_dim") or self.width // self.heads
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        halves = torch.arange(self.size).view(2, -1).t().flatten()  # a pair that is rotated stands side by side

        def paired(weight: Tensor) -> Tensor:
            return weight.unflatten(0, (-1, self.size))[:, halves].flatten(0, 1)

        self.layers: list[tuple[Tensor, ...]] = []
        for i in range(config["num_hidden_layers"]):
            layer = {name.removeprefix(f"model.layers.{i}."): weight for name, weight in weights.items()}

            def qkv(kind: str, layer: dict[str, Tensor] = layer) -> Tensor:
                q, k, v = (layer[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
                return torch.cat([paired(q), paired(k), v])

            gate_up = torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]])
            self.layers.append(
                (
                    layer["input_layernorm.weight"],
                    qkv("weight"),
                    qkv("bias"),
                    layer["self_attn.o_proj.weight"],
                    layer["post_attention_layernorm.weight"],
                    gate_up,
                    layer["mlp.down_proj.weight"],
                )
            )
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        angles = torch.outer(torch.arange(2048.0), theta ** -(torch.arange(0, self.size, 2) / self.size))
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), weight, self.eps)

    def _split(self, x: Tensor, layer: tuple[Tensor, ...], turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [.., H, d], keys and values [.., K, d]."""
        out = F.linear(self._rms(x, layer[0]), layer[1], layer[2]).unflatten(-1, (-1, self.size))
        turned, v = out.split((self.heads + self.kv_heads, self.kv_heads), -2)
        turned = torch.view_as_real(torch.view_as_complex(turned.unflatten(-1, (-1, 2))) * turns).flatten(-2)
        q, k = turned.split((self.heads, self.kv_heads), -2)
        return q, k, v

    def _rest(self, x: Tensor, attended: Tensor, layer: tuple[Tensor, ...]) -> Tensor:
        x = x + F.linear(attended, layer[3])
        gate, up = F.linear(self._rms(x, layer[4]), layer[5]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer[6])

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._rms(x, self.norm), self.embedding)

    def _prefill(self, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [layers, P, K, T, d] and the logits of the next token [P, V] of prompts [P, T]."""
        x, keys, values, grouped = F.embedding(prompts, self.embedding), [], [], self.heads != self.kv_heads
        turns = self.turns[: prompts.shape[1], None]
        for layer in self.layers:
            q, k, v = (part.transpose(1, 2) for part in self._split(x, layer, turns))
            keys.append(k)
            values.append(v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            x = self._rest(x, out.transpose(1, 2).flatten(2), layer)
        return torch.stack(keys), torch.stack(values), self._logits(x[:, -1])

    @torch.inference_mode()
    def generate(self, rows: list[list[int]], lengths: list[int], slots: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and their logprobs for rows of equal length; equal rows are prefilled once."""
        own: dict[tuple[int, ...], int] = {}
        prompt_of = torch.tensor([own.setdefault(tuple(row), len(own)) for row in rows])
        prompt_keys, prompt_values, first = self._prefill(torch.tensor(list(own)))
        P, longest = len(rows[0]), max(lengths)
        columns = P + longest * (1 if len(rows) <= slots else 2)
        shape = (len(self.layers), min(slots, len(rows)), self.kv_heads, columns, self.size)
        keys, values, ends = torch.zeros(shape), torch.zeros(shape), torch.tensor(lengths)
        hidden = torch.zeros(shape[1], 1, 1, columns)  # -inf in columns before a row begins
        state = torch.zeros(3, shape[1], dtype=torch.int64)  # of each slot: its row, the column it began at, where it ends
        logits, K, d, G = torch.empty(shape[1], first.shape[1]), self.kv_heads, self.size, self.heads // self.kv_heads
        history: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        n, now, waiting = 0, P, 0
        while True:
            if waiting < len(rows) and n < shape[1]:
                new = torch.arange(waiting, min(len(rows), waiting + shape[1] - n))
                at, of = slice(n, n + len(new)), prompt_of[new]
                keys[:, at, :, now - P : now], values[:, at, :, now - P : now] = prompt_keys[:, of], prompt_values[:, of]
                hidden[at] = 0
                hidden[at, :, :, : now - P] = float("-inf")
                state[:, at] = torch.stack([new, torch.full_like(new, now), now + ends[new]])
                logits[at] = first[of]
                n, waiting = n + len(new), waiting + len(new)
            logprobs = torch.log_softmax(logits[:n], -1)
            tokens = (logprobs.exp().cumsum_(-1) < torch.rand(n, 1) * 0.999999).sum(-1)
            history.append((state[0, :n].clone(), now - state[1, :n], tokens.clone(), logprobs.gather(1, tokens[:, None])[:, 0]))
            over = (state[2, :n] == now + 1).nonzero()[:, 0]
            if len(over):
                n -= len(over)
                into = over[over < n]
                if len(into):
                    moved = torch.ones(n + len(over), dtype=torch.bool)
                    moved[over] = False
                    come = moved[n:].nonzero()[:, 0] + n
                    keys[:, into], values[:, into] = keys[:, come], values[:, come]
                    hidden[into], state[:, into], tokens[into] = hidden[come], state[:, come], tokens[come]
                tokens = tokens[:n]
            if n == 0 and waiting == len(rows):
                break
            if n == 0:
                now = P
                continue
            begin = int(state[1, :n].min()) - P
            if now + 1 == columns:  # the clock goes back
                for cache in (keys, values):
                    cache[:, :n, :, : now - begin] = cache[:, :n, :, begin:now].clone()
                state[1:, :n] -= begin
                hidden.zero_().masked_fill_(torch.arange(columns) < (state[1] - P)[:, None, None, None], float("-inf"))
                now, begin = now - begin, 0
            window = slice(begin, now + 1)
            bias = hidden[:n, :, :, window].expand(n, K, G, -1).reshape(n * K, G, -1)
            turns = self.turns[now - state[1, :n] + P][:, None]
            x = F.embedding(tokens, self.embedding)
            for i, layer in enumerate(self.layers):
                q, k, v = self._split(x, layer, turns)
                keys[i, :n, :, now], values[i, :n, :, now] = k, v
                k, v = (cache[i, :n].view(n * K, columns, d)[:, window] for cache in (keys, values))
                weights = torch.baddbmm(bias, q.reshape(n * K, G, d), k.transpose(1, 2), alpha=d**-0.5).softmax(-1)
                x = self._rest(x, torch.bmm(weights, v).view(n, -1), layer)
            logits[:n] = self._logits(x)
            now += 1
        return self._collected(history, lengths)

    def _collected(self, history: list[tuple[Tensor, ...]], lengths: list[int]) -> tuple[list[list[int]], list[list[float]]]:
        row, place, token, logprob = (torch.cat(part) for part in zip(*history, strict=True))
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        logprobs = torch.zeros(len(lengths), max(lengths))
        tokens[row, place], logprobs[row, place] = token, logprob
        found = zip(tokens.tolist(), logprobs.tolist(), lengths, strict=True)
        both = [(of_row[:length], of_logprobs[:length]) for of_row, of_logprobs, length in found]
        return [one for one, _ in both], [one for _, one in both]


def main() -> None:
    torch.set_num_threads(1)
    floor = Floor(Path(sys.argv[1]))

    def do(job: dict[str, Any]) -> None:
        floor.generate(job["rows"], job["lengths"], job["slots"])

    serve(do)


if __name__ == "__main__":
    main()
