"""Whole GRPO steps against TRL 1.16: CPU seconds a step, one thread, both in one process and taking turns.

    pip install trl==1.16.0 psutil      # in an environment of its own, beside Tandem
    python benchmarks/grpo_vs_trl.py    # the last line is JSON; exits with 1 where a ratio is below its floor

Both load the same 1.25M-parameter Qwen2 model with random weights, sample at temperature 1, judge with the same function, clip
the ratio and step AdamW on the token mean, in float32. TRL runs its GRPOTrainer (no gradient checkpointing, no autocast, no
KL), and a step of Tandem's own loop (recipe, engine, queue, plan, learner, publish, trackers) runs after each of its steps. The
lengths of the answers are forced on both sides and are the same: TRL's by a logits processor that allows the end token in its
place, Tandem's by an agent that asks for so many tokens and scores the answer. CPU time of Tandem's other processes, if it has
any, is counted too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np
import torch
import yaml
from lines import publish, row
from rich.console import Console

from tandem.assemble.model import build_model
from tandem.assemble.phases import Phase, main_phase
from tandem.assemble.rollout import open_rollout
from tandem.assemble.trackers import build_trackers
from tandem.ports import LLM
from tandem.recipe import load_recipe
from tandem.trainer import loop
from tandem.types import Episode, Key, Metrics, PolicyRef, SamplingParams, Task

CHARACTERS = [chr(code) for code in range(32, 127)]
IDS = {text: number for number, text in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
SHAPE = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
LONGEST = 256


@dataclass(frozen=True)
class Case:
    """prompts x group answers a step. length: of every answer; 0 draws them, log-normal (median 24, sigma 1), at most LONGEST."""

    name: str
    floor: float
    stretch: float
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 6
    length: int = 0

    @property
    def longest(self) -> int:
        return self.length or LONGEST

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    def lengths(self, step: int) -> list[int]:
        """Of the answers of step 0, 1, ..."""
        if self.length:
            return [self.length] * self.rows
        drawn = np.random.default_rng(step).standard_normal(self.rows)
        return np.clip(np.round(24 * np.exp(drawn)), 1, LONGEST).astype(int).tolist()


CASES = (
    Case("ragged", 5, 8.5),
    Case("all 16 long", 1.1, 1.5, length=16),
    Case("all 64 long", 1.0, 1.2, length=64),
    Case("prompts of 64, all 16 long", 2.5, 3.4, prompt_tokens=64, length=16),
    Case("4 x 4, all 16 long", 1.5, 2.0, prompts=4, group=4, length=16),
)


def score(text: str) -> float:
    return sum(map(ord, text)) % 7 / 7


class Forced:
    """An agent that asks for as many tokens as its episode is to have, whatever they are, and gives them their reward."""

    case: Case

    async def __call__(self, task: Task, llm: LLM, key: Key) -> Episode:
        step, place = divmod(key.ordinal * self.case.group + key.member, self.case.rows)
        params = SamplingParams(max_tokens=self.case.lengths(step)[place])
        tokens, stop = await llm.complete([IDS[character] for character in task.messages[0].content], params)
        text = "".join(CHARACTERS[token - 3] for token in tokens if 3 <= token < 3 + len(CHARACTERS))
        messages = (*task.messages, replace(task.messages[0], role="assistant", content=text))
        return Episode(key, task, llm.samples(), messages, stop, env_rewards=(score(text),))


def make_model(directory: Path) -> None:
    transformers, tokenizers = import_module("transformers"), import_module("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(IDS, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special).save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        **SHAPE, vocab_size=128, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)


def prompts(case: Case) -> list[str]:
    drawn = random.Random(0)
    return ["".join(drawn.choice("0123456789+-=*") for _ in range(case.prompt_tokens)) for _ in range(512)]


# -------------------------------------------------------------------------------------------------- Tandem's side


class Pause:
    """The loop's Hooks: the loop stands still between two steps until it is told to go on."""

    def __init__(self) -> None:
        self.go, self.done = asyncio.Event(), asyncio.Event()

    async def after_step(self, policy: PolicyRef, metrics: Metrics) -> None:
        del policy, metrics
        self.done.set()
        await self.go.wait()
        self.go.clear()

    async def step(self, task: asyncio.Task[Any]) -> None:
        self.done.clear()
        self.go.set()
        done = asyncio.create_task(self.done.wait())
        await asyncio.wait((task, done), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()


def recipe_file(case: Case, model: Path, directory: Path, steps: int) -> Path:
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts(case)))
    (template := directory / "template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    recipe = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": str(model), "template": str(template)},
        "data": {"train": {"path": str(data)}},
        "agent": f"{Path(__file__)}:Forced",
        "reward": {"function": "environment"},
        "algorithm": {"name": "grpo", "aggregation": "token-mean"},
        "rollout": {"groups_per_step": case.prompts, "group_size": case.group},
        "engine": {"slots": case.rows, "max_context": case.prompt_tokens + case.longest},
        "train": {"lr": 1.0e-4},
        "trainer": {"steps": steps},
        "logs": ["tensorboard"],
    }
    (path := directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return path


@asynccontextmanager
async def opened(case: Case, model: Path, directory: Path, steps: int) -> AsyncGenerator[tuple[Pause, asyncio.Task[Any]]]:
    """A run of Tandem whose loop waits for `Pause.step`."""
    recipe = load_recipe(recipe_file(case, model, directory, steps), ()).value
    made = build_model(recipe)
    print(made.describe(), file=sys.stderr)
    async with AsyncExitStack() as stack:
        rollout = await stack.enter_async_context(open_rollout(recipe, made))
        rollout.agent.case = case
        phase: Phase = main_phase(recipe, made, rollout, directory / "logs")
        (directory / "run").mkdir()
        await stack.enter_async_context(phase.workers)
        await phase.begin(directory / "initial")
        trackers = stack.enter_context(closing(build_trackers(recipe, phase, directory / "run", Console(stderr=True))))
        trackers.restore({})
        pause = Pause()
        running = loop.train(phase.source, phase.plan, phase.learner, phase.checkpoint, trackers, pause, steps=steps)
        task = asyncio.create_task(running)
        try:
            yield pause, task
        finally:
            task.cancel()
            await asyncio.wait((task,))


# ----------------------------------------------------------------------------------------------------- TRL's side


def measured(case: Case, model: Path, steps: int) -> dict[str, Any]:
    """Both sides' steps, in turns; each side's first is not counted."""
    trl, transformers, datasets, psutil = (import_module(name) for name in ("trl", "transformers", "datasets", "psutil"))
    ours = list[float]()
    marks: list[tuple[float, float]] = []  # TRL's clock as each step begins and ends

    def cpu() -> float:
        others = [child.cpu_times() for child in children]
        return time.process_time() + sum(times.user + times.system for times in others)

    def judge(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert [len(ids) for ids in completion_ids] == case.lengths(len(marks)), "the lengths are not those that were forced"
        return [score(text) for text in completions]

    class EndAt(transformers.LogitsProcessor):
        """Allows the end token in the last place of each row, and nowhere else."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            place = input_ids.shape[1] - case.prompt_tokens + 1
            last = torch.tensor(case.lengths(len(marks))) == place
            scores[:, 1] = float("-inf")
            scores[last] = float("-inf")
            scores[last, 1] = 0.0
            return scores

    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        directory = Path(name)
        run = opened(case, model, directory, steps + 3)
        pause, task = runner.run(run.__aenter__())
        children = psutil.Process().children(recursive=True)

        class Turns(transformers.TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.began = cpu()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                marks.append((self.began, cpu()))
                before = cpu()
                runner.run(pause.step(task))
                ours.append(cpu() - before)
                self.began = cpu()

        config = trl.GRPOConfig(
            output_dir=str(directory / "trl"),
            per_device_train_batch_size=case.rows,
            num_generations=case.group,
            max_completion_length=case.longest,
            max_steps=steps + 1,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
            model_init_kwargs={"dtype": "float32"},
            disable_tqdm=True,
            seed=0,
        )
        trainer = trl.GRPOTrainer(
            model=str(model),
            reward_funcs=judge,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts(case)}),
            processing_class=transformers.AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[Turns()],
        )
        trainer.remove_callback(import_module("transformers.trainer_callback").PrinterCallback)
        generate = trainer.model.generate
        trainer.model.generate = lambda **how: generate(**how, logits_processor=transformers.LogitsProcessorList([EndAt()]))
        torch.set_num_threads(1)
        trainer.train()
        runner.run(run.__aexit__(None, None, None))
    theirs = [end - begin for begin, end in marks]
    times = {"trl_s": round(statistics.median(theirs[1:]), 4), "tandem_s": round(statistics.median(ours[1:]), 4)}
    return row(
        case.name,
        f"trl {trl.__version__}",
        [a / b for a, b in zip(theirs[1:], ours[1:], strict=True)],
        case.floor,
        case.stretch,
        **times,
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--case", choices=[case.name for case in CASES], action="append")
    chosen = arguments.parse_args()
    try:
        import_module("trl")
    except ModuleNotFoundError as error:
        print(f"the peer is missing ({error}): pip install trl==1.16.0 psutil, in an environment of its own", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        rows = [measured(case, Path(name), chosen.steps) for case in CASES if not chosen.case or case.name in chosen.case]
    return publish("grpo_vs_trl", rows)


if __name__ == "__main__":
    sys.exit(main())
