"""transformers' generate as a side of benchmarks/rollout.py: static batches of `slots` rows, each padded to its longest answer."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from turns import serve


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

    def do(job: dict[str, Any]) -> None:
        rows, lengths, slots = job["rows"], job["lengths"], job["slots"]
        for start in range(0, len(rows), slots):
            tokens, longest = torch.tensor(rows[start : start + slots]), max(lengths[start : start + slots])
            out = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
            assert out.shape[1] == tokens.shape[1] + longest

    serve(do)


if __name__ == "__main__":
    main()
