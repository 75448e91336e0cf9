"""vLLM's CPU engine, in this process and with logprobs, as a side of benchmarks/rollout.py."""

from __future__ import annotations

import os
import sys
from typing import Any

# an engine in this process, and no compiler: warming up would cost minutes and the first request tens of seconds
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR")

from turns import serve
from vllm import LLM, SamplingParams


def main() -> None:
    engine = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=int(sys.argv[2]),
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
    )

    def do(job: dict[str, Any]) -> None:
        how = [SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0) for length in job["lengths"]]
        out = engine.generate([{"prompt_token_ids": row} for row in job["rows"]], how, use_tqdm=False)
        assert [len(one.outputs[0].token_ids) for one in out] == job["lengths"]

    serve(do)


if __name__ == "__main__":
    main()
