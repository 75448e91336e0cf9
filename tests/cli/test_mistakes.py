"""The list of what newcomers get wrong: each is one message that names it and exit code 2, and no file of theirs is changed."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch

from tandem.models.hf import load_value_model, save_decoder
from tests.e2e.runs import RECIPE, tandem, write_recipe

GOOD = '{"prompt": "2+2", "answer": "4"}\n'
NOT_A_TASK = "data.train.task=null"


@dataclass(frozen=True)
class Mistake:
    """A command in a directory that holds the recipe tiny.yaml, good.jsonl and `files`, and what its message has to name.

    made: called with that directory and the one of a finished run, to make what a file is not. held: what goes on meanwhile.
    without: a package that is not installed. begins: the run, since nobody can know before.
    """

    command: str
    says: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    made: Callable[[Path, Path], None] | None = None
    held: Callable[[Path], Any] = nullcontext
    without: str | None = None
    begins: bool = False


def train(overrides: str, *says: str, **more: Any) -> Mistake:
    return Mistake(f"train tiny.yaml run.dir=run trainer.steps=1 warmup=null {overrides}", says, **more)


def trained_on(name: str, content: str, *says: str) -> Mistake:
    """A file that is named as data.train."""
    return train(f"{NOT_A_TASK} data.train.path={name}", *says, files={name: content})


ONE_TURN = "'agent={name: single_turn, env: null}'"


def late(prompt: object, **more: object) -> str:
    """A file whose last prompt this is."""
    rows = [{"prompt": f"{i}+1=", "answer": "1"} | more for i in range(99)] + [{"prompt": prompt, "answer": "1"}]
    return "".join(json.dumps(row) + "\n" for row in rows)


def asked_late(prompt: object, *says: str) -> Mistake:
    return train(f"{ONE_TURN} {NOT_A_TASK} data.train.path=late.jsonl", *says, files={"late.jsonl": late(prompt)})


def unread(function: str, rows: str, *says: str, overrides: str = "") -> Mistake:
    """Answers that a verifier cannot read, in the last of the tasks."""
    told = f"{ONE_TURN} {NOT_A_TASK} data.train.path=a.jsonl reward.function={function} {overrides}"
    return train(told, *says, files={"a.jsonl": rows})


UNANSWERED = '{"prompt": "1+1="}\n'


def answered(*answers: object) -> str:
    return "".join(json.dumps({"prompt": f"1+{i}=", "answer": answer}) + "\n" for i, answer in enumerate(answers))


def asked_of_config(overrides: str, *says: str) -> Mistake:
    return Mistake(f"config tiny.yaml {overrides}", says)


def own(source: str, *says: str, overrides: str = "") -> Mistake:
    """An environment of the user's own, whose class is E."""
    imports = "from tandem.ports import StepResult\nfrom tandem.types import Message\n"
    return train(f"agent.env=mine.py:E {overrides}", *says, files={"mine.py": f"{imports}{source}\n"})


def env(start: str) -> str:
    return f"""
class E:
    def __init__(self, task): self.task = task
    async def start(self): {start}
    async def step(self, action): return StepResult((), done=True)
    async def close(self): pass
"""


def check(name: str, content: str, *says: str) -> Mistake:
    return Mistake(f"data check {name}", says, files={name: content})


def verls(*says: str, **columns: object) -> Mistake:
    """A row that is nearly verl's; a column of None is left out."""
    row = {"data_source": "s", "prompt": [{"role": "user", "content": "1+1="}]} | columns
    given = {name: value for name, value in row.items() if value is not None}
    told = ("a.jsonl:1", "verl's layout", "lacks", "reward_model.ground_truth", *says)
    return trained_on("a.jsonl", json.dumps(given) + "\n", *told)


def reward(source: str, *says: str) -> Mistake:
    """A reward's source, with f in it."""
    return Mistake("reward check tiny.yaml -n 2 reward.function=mine.py:f", says, files={"mine.py": f"{source}\n"})


def reward_of(overrides: str, *says: str, **files: str) -> Mistake:
    return Mistake(f"reward check tiny.yaml -n 2 {overrides}", says, files=files)


def raising(source: str, *says: str, overrides: str = "", raised: str = "ZeroDivisionError") -> Mistake:
    """A run with such a reward: nothing is left of it."""
    told = f"reward.function=mine.py:f {overrides}" if "reward=" not in overrides else overrides
    found = (*says, raised, "mine.py:", "task 'calculator/", "tandem reward check")
    return train(told, *found, files={"mine.py": f"{source}\n"})


def model(change: Callable[[Path], object], *says: str) -> Mistake:
    """A model directory that lost something."""

    def made(here: Path, finished: Path) -> None:
        change(shutil.copytree(finished / "final", here / "model"))

    return train("model.new=null model.path=model", *says, made=made)


def resumed(overrides: str, *says: str, recipe: str = RECIPE, **more: Any) -> Mistake:
    """The finished run, with two steps and not one, taken up with something else."""

    def made(here: Path, finished: Path) -> None:
        shutil.copytree(finished, here / "run")
        write_recipe(here, recipe=recipe)

    return Mistake(f"train tiny.yaml run.dir=run trainer.steps=3 warmup=null {overrides}", says, made=made, **more)


@contextmanager
def locked(here: Path) -> Generator[None]:
    descriptor = os.open(here / "run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def edit(name: str, **values: object) -> Callable[[Path], object]:
    """Sets keys of a JSON file, or removes those that are None."""

    def change(directory: Path) -> None:
        content = json.loads((directory / name).read_text()) | values
        (directory / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def other_tensors(directory: Path) -> None:
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    weights["model.extra.weight"] = weights.pop("model.norm.weight")
    safetensors.torch.save_file(weights, directory / "model.safetensors")


def not_finite(directory: Path) -> None:
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    weights["model.norm.weight"][:2] = math.nan
    safetensors.torch.save_file(weights, directory / "model.safetensors")


def broken(here: Path, finished: Path) -> None:
    """A model directory with numbers that are none."""
    not_finite(shutil.copytree(finished / "final", here / "broken"))


def damaged(here: Path, finished: Path) -> None:
    """A GGUF file that was cut off."""
    (here / "a.gguf").write_bytes(b"GGUF" + bytes(60))


UNENDED = ("begun has no final/", "--resume", "tandem export begun DIRECTORY")


def begun(here: Path, finished: Path) -> None:
    """A run that was stopped."""
    shutil.rmtree(shutil.copytree(finished, here / "begun") / "final")


def first_steps(here: Path, finished: Path) -> None:
    """A run that was stopped before its first snapshot."""
    begun(here, finished)
    shutil.rmtree(here / "begun/snapshots")
    (here / "begun/snapshots").mkdir()


def other_vocabulary(here: Path, finished: Path) -> None:
    """A teacher whose last character has another id."""
    tokenizer = json.loads((shutil.copytree(finished / "final", here / "other") / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["~"] = vocabulary.pop(max(vocabulary, key=lambda token: vocabulary[token]))
    (here / "other/tokenizer.json").write_text(json.dumps(tokenizer))


def scorer(here: Path, finished: Path) -> None:
    shutil.copytree(finished / "final", here / "scorer")
    save_decoder(load_value_model(finished / "final"), here / "scorer")


def parquet(here: Path, _: Path) -> None:
    rows = [{"data_source": "s", "question": "a", "reward_model": {"ground_truth": "b"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), here / "verl.parquet")


def utf16(here: Path, _: Path) -> None:
    (here / "a.jsonl").write_bytes(GOOD.encode("utf-16"))


def precious(here: Path, _: Path) -> None:
    (here / "run").mkdir()
    (here / "run/thesis.tex").write_text("precious")


TO_GPU = "run.device=cuda"
HTTP = "reward={function: null, url: 'http://127.0.0.1:1/score'"

MISTAKES: dict[str, Mistake] = {
    # ----------------------------------------------------------------------------------------------- the recipe
    "no recipe": Mistake("train none.yaml", ("none.yaml", "No such file")),
    "a directory as the recipe": Mistake("train .", ("cannot be read", "directory")),
    "an empty recipe": Mistake("train empty.yaml", ("model", "data.train"), files={"empty.yaml": ""}),
    "no YAML": Mistake("train broken.yaml", ("broken.yaml:1", "not YAML"), files={"broken.yaml": "run: ["}),
    "a misspelt command": Mistake("tarin tiny.yaml", ("tarin", "train")),
    "a misspelt command of a group": Mistake("data chek", ("'chek'", "'check'", "`tandem data --help`")),
    "a misspelt option": train("--rezume", "--rezume", "--resume", "`tandem train --help`"),
    "an option for a value of the recipe": train("--steps 3", "'--steps'", "no dashes: trainer.steps=10"),
    "an option that stands before the command": Mistake("--resume train tiny.yaml", ("'--resume'", "`tandem --help`")),
    "no argument": Mistake("train", ("missing argument 'RECIPE'", "`tandem train --help`")),
    "an argument too many": Mistake("algos grpo gspo", ("unexpected extra argument (gspo)",)),
    "an option without its value": Mistake("eval tiny.yaml --model", ("'--model' requires an argument",)),
    "an option that takes a number": Mistake("export run out --step last", ("'--step'", "'last'", "integer")),
    "an option out of range": Mistake("reward check tiny.yaml -n 0", ("'-n'", "0 is not in the range")),
    "an option of a few values": Mistake("chat run --dtype half", ("'half'", "'float32', 'bfloat16'")),
    "a misspelt key": train("trainer.step=3", "trainer.step", "trainer.steps"),
    "a key without its section": train("steps=3", "'steps'", "trainer.steps"),
    "an override without a value": train("trainer.steps", "trainer.steps", "KEY=VALUE"),
    "a wrong type": train("trainer.steps=many", "trainer.steps", "many", "an integer"),
    "a number that is none": train("train.lr=1e-3x", "train.lr", "1e-3x", "a number"),
    "a text for a list": train("logs=console", "logs", "list", "console"),
    "a file for a section": train("data.train=train.jsonl", "data.train", "path", "train.jsonl"),
    "a value out of range": train("sampling.temperature=-1", "temperature", "-1", "at least"),
    "no learning rate": train("train.lr=0", "lr must be positive"),
    "no steps": train("trainer.steps=0", "trainer.steps=0", "at least 1"),
    "a mode that is not known": train("trainer.mode=async", "async", "separate_async"),
    "two sides in one process": train("trainer.mode=separate_async runtime=inline", "separate_async", "runtime=process"),
    "a schedule that is not known": train("train.schedule=cosin", "cosin", "cosine"),
    "more mini-batches than groups": train("learner.minibatches=3", "learner.minibatches=3", "2 groups"),
    "more layers than there are": train("train.top_layers=99", "top_layers=99", "1 layers"),
    "a buffer longer than an answer": train("rollout.shaping.overlong_buffer_tokens=9", "=9", "sampling.max_tokens=8"),
    "a GPU where there is none": train(TO_GPU, "cuda", "cpu"),
    "a device that is not known": train("run.device=gpu", "'gpu'", "cuda"),
    # -------------------------------------------------------------------------------------------- the algorithm
    "an unknown algorithm": train("algorithm=gpro", "gpro", "grpo"),
    "an unknown parameter": train("algorithm.clip_hi=0.3", "clip_hi", "clip_high"),
    "an unknown parameter that nothing is run with": asked_of_config("algorithm.clip_hi=0.3", "clip_hi", "clip_high"),
    "all that is unknown below algorithm": asked_of_config(
        "algorithm.clip_hi=0.3 algorithm.nonsense=1 trainer.stepz=3", "3 problems", "clip_high", "'nonsense'", "trainer.steps"
    ),
    "an unknown parameter of a critic": asked_of_config(
        "algorithm=ppo critic.huber_delt=0.5", "critic: ", "'huber_delt'", "huber_delta"
    ),
    "an unknown parameter of a correction": asked_of_config(
        "'algorithm.correction={icepop: {lo: 0.5}}'", "correction icepop", "'lo'", "low"
    ),
    "a critic that nothing reads and that nothing is run with": asked_of_config("critic.train.lr=1e-3", "critic", "grpo", "values"),
    "a parameter out of range": train("algorithm.clip_low=2", "clip_low", "2"),
    "an unknown correction": train("algorithm.correction=icepopp", "icepopp", "icepop"),
    "an algorithm in a file that is not there": train("algorithm=no.py:ROW", "no file no.py"),
    "groups of one": train("rollout.group_size=1", "rollout.group_size=1", "grpo"),
    "a critic that nothing reads": train("critic.train.lr=1e-3", "critic", "grpo", "values"),
    "a process model that nothing reads": train("process_model.warmup_steps=1", "process_model", "grpo", "prm_logprobs"),
    "a reference that nothing reads": train("reference.path=no/such", "reference", "grpo", "ref_logprobs"),
    "a reset before the beginning": train("algorithm.kl_coef=0.1 reference.reset_every=-1", "reset_every", "-1"),
    "no teacher": train("algorithm=opd", "opd", "teacher.path"),
    "a teacher that is not there": train("algorithm=opd teacher.path=no/such", "no/such"),
    "a teacher with other tokens": train(
        "algorithm=opd teacher.path=other", "other", "another vocabulary", "2 tokens differ", made=other_vocabulary
    ),
    "a policy that is never trained": train("algorithm=prime process_model.warmup_steps=1", "warmup_steps=1", "trainer.steps=1"),
    "a parameter in two places": train(
        "algorithm=prime process_model.implicit_beta=0.1", "process_model.implicit_beta", "algorithm.implicit_beta"
    ),
    "a critic's objective as a policy's": train("algorithm=value", "algorithm.name=value", "critic", "ppo or vapo"),
    "a process model's objective": train("algorithm=implicit_prm", "algorithm.name=implicit_prm", "process_model", "prime"),
    "an objective's parameter out of range": train("algorithm=ppo critic.huber_delta=0.0", "critic: ", "huber_delta", "0.0"),
    "no such parameter of an objective": train("algorithm=prime process_model.implicit_bet=0.1", "implicit_bet", "implicit_beta"),
    "parts that nobody names": train("algorithm=gdpo", "gdpo", "reward.components"),
    "a part that a reward lacks": train("algorithm=gdpo reward.components=[format]", "'format'", "reward.components", begins=True),
    "weights for other parts": train(
        "algorithm=gdpo algorithm.reward_weights=[1.0,2.0] reward.components=[right]", "reward_weights=[1.0, 2.0]", "right"
    ),
    "shaping that nothing reads": train(
        "algorithm=gdpo reward.components=[right] rollout.shaping.stop_coef=0.5", "rollout.shaping", "gdpo"
    ),
    # ------------------------------------------------------------------------------------------------ the model
    "no such model": train("model.new=null model.path=no/such/model", "no/such/model"),
    "two models": train("model.path=no/such", "one of path", "new"),
    "a model without config.json": model(lambda path: (path / "config.json").unlink(), "model/config.json", "Hugging Face"),
    "a model without weights": model(lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
    "weights that were cut off": model(
        lambda path: (path / "model.safetensors").write_bytes(b"1" * 99), "model/model.safetensors", "fetch or save"
    ),
    "weights of another model": model(other_tensors, "model.norm.weight", "model.extra.weight"),
    "a model without a tokenizer": model(
        lambda path: [file.unlink() for file in path.glob("*token*")],
        "model holds no tokenizer",
        "tokenizer.json",
        "model.tokenizer",
    ),
    "a tokenizer of the slow kind": model(
        lambda path: (path / "tokenizer.json").rename(path / "vocab.json"), "no tokenizer.json but vocab.json", "save_pretrained"
    ),
    "a family that is not known": model(edit("config.json", model_type="mamba"), "'mamba'", "llama", "transformers"),
    "a tokenizer without eos": model(edit("tokenizer_config.json", eos_token=None), "eos_token"),
    "no such template": train("model.template=no/such.jinja", "model.template", "no/such.jinja"),
    "a shape that no family can be written as": train("model.new.hidden_size=33", "model.new: ", "hidden_size", "num_heads"),
    "a stop id that the model has not": train("'sampling.stop_ids=[99999]'", "sampling.stop_ids", "99999", "20 tokens"),
    "heads that do not divide": train("model.new.num_heads=3 model.new.num_kv_heads=2", "num_heads", "3"),
    "a width that no machine has": train("model.new.hidden_size=1000000", "this machine has", "GiB", "weights"),
    "layers that no machine has": train("model.new.num_layers=100000000", "this machine has", "GiB", "weights"),
    "positions that no machine has": train("model.new.max_positions=10000000000000", "rotary positions", "GiB"),
    "a cache that no machine has": train("engine.slots=1000000000", "this machine has", "rollout KV cache", "GiB", "engine.slots"),
    "a model that is not a number": model(not_finite, "model: 2 of the 32 numbers of model.norm.weight", "NaN"),
    "an import of what is not a number": Mistake("import broken out", ("2 of the 32 numbers of model.norm.weight",), made=broken),
    "a teacher that is not a number": train(
        "algorithm=opd teacher.path=broken", "broken: 2 of the 32 numbers of model.norm.weight", made=broken
    ),
    "a GGUF file that was cut off": Mistake("import a.gguf out", ("a.gguf", "fetch it again"), made=damaged),
    "a model by its id on the hub": train("model.new=null model.path=HuggingFaceTB/SmolLM2-135M", "tandem import OWNER/NAME"),
    "a chat by an id on the hub": Mistake(
        "chat HuggingFaceTB/SmolLM2-135M", ("no model directory HuggingFaceTB/SmolLM2-135M", "`tandem import`")
    ),
    "context beyond the model's": train("engine.max_context=65", "65", "64", "model.new.max_positions"),
    "context beyond the model's that nothing is run with": asked_of_config("engine.max_context=65", "65", "64"),
    "context beyond that of a model with weights": train(
        "model.new=null model.path=model engine.max_context=65",
        "engine.max_context=65",
        "64 positions",
        made=lambda here, finished: shutil.copytree(finished / "final", here / "model") and None,
    ),
    "answers longer than the context": train("sampling.max_tokens=64", "sampling.max_tokens=64", "engine.max_context=64"),
    "answers longer than the context that nothing is run with": asked_of_config(
        "sampling.max_tokens=100", "sampling.max_tokens=100", "engine.max_context=64"
    ),
    "measured answers longer than the context": asked_of_config(
        "evaluation.max_tokens=100", "evaluation.max_tokens=100", "engine.max_context=64"
    ),
    "answers that the longest prompt leaves no room for": train(
        f"{ONE_TURN} {NOT_A_TASK} data.train.path=late.jsonl sampling.max_tokens=20",
        "task 'late-99'",
        "has 50 tokens",
        "max_tokens=20",
        "engine.max_context=64",
        files={"late.jsonl": late("1+" * 25)},
    ),
    "measured answers that the longest prompt leaves no room for": train(
        f"{ONE_TURN} data.heldout.task=null data.heldout.path=late.jsonl evaluation.tasks=100 evaluation.max_tokens=20",
        "task 'late-99'",
        "has 50 tokens",
        "max_tokens=20",
        "engine.max_context=64",
        files={"late.jsonl": late("1+" * 25)},
    ),
    "a GGUF file that is none": Mistake("import a.gguf out", ("a.gguf is no GGUF file", "b'hell'"), files={"a.gguf": "hello"}),
    "an import of nothing": Mistake("import none.gguf out", ("none.gguf", "owner/name")),
    "an import over something": Mistake("import none.gguf .", (".", "not an empty directory")),
    "a chat with no model": Mistake(
        "chat runs/nope", ("no run and no model directory runs/nope", "directory of a finished run", "Hugging Face model")
    ),
    "a chat that is colder than cold": Mistake("chat no/such --temperature -1", ("temperature=-1", "0 (greedy)")),
    # ------------------------------------------------------------------------------------------------- the data
    "no such data": train(f"{NOT_A_TASK} data.train.path=none.parquet", "none.parquet", "correct the path"),
    "no such data, told before a model is looked for": train(
        f"{NOT_A_TASK} data.train.path=none.parquet model.new=null model.path=no/model", "none.parquet"
    ),
    "no such held-out data, told before a model is looked for": train(
        "data.heldout.task=null data.heldout.path=none.jsonl model.new=null model.path=no/model", "none.jsonl"
    ),
    "no such data among several": train(
        "data.train={sources: [{task: calculator, size: 8}, {path: none.csv}]} model.new=null model.path=no/model", "none.csv"
    ),
    "an empty file": trained_on("a.jsonl", "\n", "a.jsonl", "empty"),
    "a line that is no JSON": trained_on("a.jsonl", f'{GOOD}{{"prompt": \n', "a.jsonl:2", "not valid JSON"),
    "JSON and not JSON lines": check("a.jsonl", json.dumps([{"prompt": "a"}], indent=1), "a.jsonl:1", "not valid JSON"),
    "a JSON file": check("a.json", "[]", "a.json", ".jsonl, .parquet, .csv"),
    "Python and not JSON": check("a.jsonl", "{'prompt': 'a'}\n", "a.jsonl:1", "not valid JSON"),
    "another encoding": Mistake("data check a.jsonl", ("a.jsonl:1", "not UTF-8"), made=utf16),
    "other column names": trained_on(
        "a.jsonl", '{"question": "a", "solution": "b"}\n', "question, solution", "columns=", "--column"
    ),
    "verl's layout without a prompt": Mistake(
        "data check verl.parquet", ("verl.parquet row 0", "verl's layout", "lacks prompt;", "question", "columns="), made=parquet
    ),
    "verl's layout without an answer": verls("has style", reward_model={"style": "rule"}),
    "verl's layout with an answer of another name": verls("has answer", reward_model={"answer": "4"}),
    "verl's layout as a text": verls("and no object", reward_model='{"ground_truth": "4"}'),
    "verl's layout without a prompt and an answer": verls("prompt and reward_model.ground_truth", prompt=None, reward_model={}),
    "parquet by name only": check("a.parquet", GOOD, "a.parquet", "not a parquet file"),
    "ShareGPT's keys": check("a.jsonl", '{"messages": [{"from": "human", "value": "a"}]}\n', "message 0", "the role None"),
    "parts of content": check(
        "a.jsonl",
        '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}\n',
        "message 0: content",
        "must be a text",
    ),
    "one id twice": check("a.jsonl", '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', "a.jsonl:2", "'1'", "unique"),
    "no rejected": check("a.jsonl", '{"prompt": "a", "chosen": "b"}\n', "lacks rejected"),
    "two answers": check("a.jsonl", '{"prompt": "a", "answer": 1, "ground_truth": 2}\n', "both answer and ground_truth"),
    "commas in CSV": trained_on("a.csv", "prompt,answer\nWhat, is it?,4\n", "a.csv:2", "3 cells", "quote commas"),
    "semicolons in CSV": check("a.csv", "prompt;answer\na;4\n", "has ';' and no comma", "separate cells by commas"),
    "tabs in CSV": trained_on("a.csv", "prompt\tanswer\na\t4\n", "has '\\t' and no comma", "separate cells by commas"),
    "a directory as data": Mistake("data check .", (". is a directory", "hub")),
    "a limit without a tokenizer": Mistake("data check good.jsonl --max-tokens 5", ("--max-tokens 5", "--tokenizer")),
    "half a column": Mistake("data check good.jsonl --column prompt=", ("--column prompt=", "OURS=THEIRS")),
    "a column that is not there": Mistake("data check good.jsonl --column prompt=ask", ("no column 'ask'", "prompt, answer")),
    "no tokenizer": Mistake("data check good.jsonl --tokenizer no/such", ("no/such",)),
    "an unknown data set": Mistake("data prepare gsm9k out", ("gsm9k", "gsm8k")),
    "a file for a prepared data set's directory": Mistake(
        "data prepare gsm8k good.jsonl --train good.jsonl", ("good.jsonl", "name another")
    ),
    "an unknown task": train("data.train.task=calculater", "calculater", "calculator"),
    "an unknown environment": train("agent.env=calc", "calc", "calculator"),
    "more tasks than there are": train("data.heldout.size=1000000", "1000000"),
    "a task and a file": train("data.train.path=a.jsonl", "data.train", "one of task", "path"),
    "no data": train(NOT_A_TASK, "data.train", "one of task"),
    "a renamed column that is none": train(
        f"'data.train={{path: good.jsonl, columns: {{question: prompt}}}}' {NOT_A_TASK}",
        "columns renames question",
        "messages, prompt",
    ),
    "sources beside a task": train("'data.train.sources=[{path: a.jsonl}]'", "data.train", "sources"),
    "a source of nothing": train("'data.train={task: null, sources: [{weight: 1.0}]}'", "data.train.sources.0", "one of task"),
    "a weight of 0": train(
        "'data.train={task: null, sources: [{path: a.jsonl, weight: 0.0}]}'", "weight=0.0", "leave a source out"
    ),
    "one weight of two": train(
        "'data.train={task: null, sources: [{path: a.jsonl, weight: 1.0}, {path: b.jsonl}]}'", "some sources have a weight"
    ),
    "an unknown source": train("'data.train={task: null, sources: [{task: calculatr}]}'", "calculatr", "calculator"),
    "refusals where there are no pairs": train("data.train.refusal_frac=0.5", "refusal_frac=0.5", "pairs"),
    "a limit that nothing keeps": train("data.train.max_tokens=1", "calculator/train", "max_tokens=1", "none is left"),
    "a prompt longer than the context": train("engine.max_context=6", "6", "max_context"),
    "a demonstration longer than the context": Mistake(
        "train tiny.yaml run.dir=run engine.max_context=8 warmup.steps=1", ("tokens", "8")
    ),
    "characters that the tokenizer has not": trained_on("a.jsonl", '{"prompt": "7 plus 2?", "answer": "9"}\n', "'7 plus 2?'"),
    "a late task with characters that the tokenizer has not": asked_late("7 plus 2?", "task 'late-99'", "'7 plus 2?'"),
    "a late task that is longer than the context": asked_late("1+" * 40, "task 'late-99'", "80 tokens and the context 64"),
    "a late task that asks nothing": asked_late([{"role": "assistant", "content": "1"}], "task 'late-99'", "has no tokens"),
    "a late demonstration that is longer than the context": train(
        f"algorithm=sft reward=null {ONE_TURN} {NOT_A_TASK} data.train.path=late.jsonl learner.minibatches=1",
        "task 'late-99'",
        "81 tokens, above max_context=64",
        files={
            "late.jsonl": late([{"role": "user", "content": "1+" * 30}, {"role": "assistant", "content": "1" * 20}], completion="1")
        },
    ),
    "a held-out task that is longer than the context": train(
        f"{ONE_TURN} data.heldout.task=null data.heldout.path=late.jsonl evaluation.tasks=100",
        "task 'late-99'",
        "80 tokens and the context 64",
        files={"late.jsonl": late("1+" * 40)},
    ),
    "an environment whose prompt is longer than the context": own(
        env("return (Message('tool', '1' * 99),)"), "task 'calculator/train/", "the prompt has", "the context 64"
    ),
    "an environment with characters that the tokenizer has not": own(
        env("return (Message('tool', 'Hello?'),)"), "the prompt: ", "'H'"
    ),
    "an environment that always fails": own(env("return (1 / 0,)"), "'mine.py:E'", "asks the policy nothing", "ZeroDivisionError"),
    "an agent that is none": train("'agent={name: \"mine.py:a\", env: null}'", "mine.py:a", files={"mine.py": "a = 3\n"}),
    "a prompt of the calculator that is longer than the context": train(
        f"{NOT_A_TASK} data.train.path=late.jsonl",
        "task 'late-99'",
        "80 tokens and the context 64",
        files={"late.jsonl": late("1+" * 40)},
    ),
    # ---------------------------------------------------------------------------------------------- the reward
    **{
        f"{function} on data without answers": unread(function, UNANSWERED, "'a-0'", "no answer", f"reward.function={function}")
        for function in ("exact_match", "arithmetic", "countdown", "sorting", "largest", "numeric", "choice", "math", "code")
    },
    "json_schema without a schema": unread("json_schema", UNANSWERED, "'a-0' has no schema", "params.schema"),
    "exact_match on lists": unread("exact_match", answered("1", [1, 2]), "'a-1'", "'[1, 2]'", "a text or a number"),
    "numeric on words": unread("numeric", answered("1", "one"), "'a-1'", "'one'", "no number"),
    "arithmetic on words": unread("arithmetic", answered("1", "one"), "'a-1'", "'one'", "no whole number"),
    "choice on numbers": unread("choice", answered("A", "4"), "'a-1'", "'4'", "none of the choices"),
    "math on nothing": unread("math", answered("1", ""), "'a-1'", "math-verify"),
    "countdown on a number": unread("countdown", answered(7), "'a-0'", "'7'", "'numbers'"),
    "code on a number": unread("code", answered(7), "'a-0'", "has no tests"),
    "code on tests that are not Python": unread("code", answered("assert f(1) =="), "'a-0'", "is not Python"),
    "code on tests that test nothing": unread("code", answered("import math"), "'a-0'", "call nothing"),
    "reasoning_gym on other data": unread("reasoning_gym", answered("1"), "'a-0'", "reasoning_gym/"),
    "a part that cannot read the answers": train(
        f"{ONE_TURN} {NOT_A_TASK} data.train.path=a.jsonl 'reward={{function: null, parts: {{a: {{function: numeric}}}}}}'",
        "reward.parts.a.function=numeric",
        "'one'",
        files={"a.jsonl": answered("one")},
    ),
    "data without the answers that verl's form of a reward takes": train(
        f"{ONE_TURN} {NOT_A_TASK} data.train.path=a.jsonl reward.function=mine.py:f",
        *("task 'a-0'", "takes ground_truth", "no answer", "ground_truth=None"),
        files={"a.jsonl": UNANSWERED, "mine.py": "def f(solution_str, ground_truth): return 1.0\n"},
    ),
    "held-out data without answers": train(
        f"{ONE_TURN} data.heldout.task=null data.heldout.path=a.jsonl reward.function=numeric data.train.task=arithmetic",
        "'a-0'",
        "no answer",
        files={"a.jsonl": UNANSWERED},
    ),
    "no reward": train("reward=null", "reward.function", "reward.url", "reward_model.path"),
    "no reward to check": reward_of("reward=null", "no reward to check"),
    "an unknown reward": train("reward.function=exact_mach", "exact_mach", "exact_match"),
    "a reward file without a colon": train("reward.function=mine.py", "'mine.py' is a file", "'mine.py:NAME'"),
    "a reward file that is not there": train("reward.function=no/such.py:f", "no/such.py"),
    "a function that is not in it": train("reward.function=mine.py:score", "'score'", "scores", files={"mine.py": "scores = 1\n"}),
    "a reward of a module that is not there": train("reward.function=nosuch.mine:f", "'nosuch'", "installed"),
    "a package that a reward needs": reward("import nltkk\ndef f(solution_str): return 1.0", "needs the package 'nltkk'"),
    "a missing extra of a reward": train(
        "reward.function=math", "needs the package 'math_verify'", "pip install 'tandem-rl[verify]'", without="math_verify"
    ),
    "a syntax error": reward("def f(solution_str) return 1.0", "SyntaxError", "mine.py:1"),
    "other arguments": reward("def f(text, gold): return 1.0", "(text, gold)", "(task, group)", "solution_str", "completions"),
    "arguments of two": reward("def f(completions, solution_str): return 1.0", "verl's and TRL's"),
    "an argument that nobody gives": reward("def f(solution_str, tokenizer): return 1.0", "'tokenizer'"),
    "a column that the data has not": reward("def f(completions, solution): return [1.0]", "'solution'"),
    "one number for many": reward("def f(completions): return 1.0", "returned 1.0", "a list with one number"),
    "a dict without a score": reward("def f(solution_str): return {'reward': 1.0}", "a dict must have a score"),
    "a text as a reward": reward("def f(solution_str): return 'good'", "returned 'good'"),
    "too few rewards": reward("def f(task, group): return [1.0]", "returned 1"),
    "always an exception": reward("def f(solution_str): return 1 / 0", "none of 4 answers could be judged", "ZeroDivisionError"),
    "an exception in each answer to a held-out task": raising("def f(task, group): return [1 / 0 for _ in group]", "eval:0.0.0"),
    "an exception in each answer to a task": raising(
        "def f(task, group): return [1 / 0 for _ in group]", "train:0.0.0", "all 8 episodes", overrides="data.heldout=null"
    ),
    "an exception in a package that a reward calls": raising(
        "import json\ndef f(solution_str):\n    return json.loads('{')",
        "mine.py:3, in a call of",
        "json/decoder.py",
        raised="JSONDecodeError",
    ),
    "an exception in a part of a reward": raising(
        "def f(solution_str): return 1 / 0",
        "part 'a'",
        overrides="'reward={function: null, parts: {a: {function: \"mine.py:f\"}}}'",
    ),
    "a column that the data of a run has not": train(
        "reward.function=mine.py:f", "'solution'", files={"mine.py": "def f(completions, solution): return [1.0]\n"}
    ),
    "arguments that nobody gives, in a dry run": train(
        "reward.function=mine.py:f --dry-run", "(text, gold)", files={"mine.py": "def f(text, gold): return 1.0\n"}
    ),
    "arguments that nobody gives, in a dry run of what judges held-out answers alone": train(
        "algorithm=sft data.train.demonstrations={} data.heldout=null reward.function=mine.py:f --dry-run",
        "(text, gold)",
        files={"mine.py": "def f(text, gold): return 1.0\n"},
    ),
    "a judge that is down, in a dry run of what judges held-out answers alone": train(
        f'algorithm=sft data.train.demonstrations={{}} "{HTTP}}}" --dry-run', "cannot be reached", "start the judge"
    ),
    "a column that the last of the tasks has not": train(
        f"{ONE_TURN} {NOT_A_TASK} data.train.path=a.jsonl reward.function=mine.py:f",
        "'solution'",
        "task 'a-1'",
        files={
            "mine.py": "def f(completions, solution): return [1.0 for _ in completions]\n",
            "a.jsonl": '{"prompt": "1+1=", "solution": "2"}\n{"prompt": "1+2=", "answer": "3"}\n',
        },
    ),
    "params that it does not take": reward_of("'reward.params={k: 1}'", "'k'"),
    "a tolerance that is none": train(
        "reward.function=numeric 'reward.params={tolerance: abc}'", "params.tolerance='abc'", "a number"
    ),
    "a negative tolerance": train(
        "reward.function=numeric 'reward.params={tolerance: -1.0}'", "reward numeric: tolerance=-1.0", "not negative"
    ),
    "no choices": train("reward.function=choice 'reward.params={choices: \"\"}'", "reward choice: choices=''", "ABCD"),
    "a list of choices": train("reward.function=choice 'reward.params={choices: [A]}'", "params.choices=['A']", "a text"),
    "a limit of the sandbox out of range": train("reward.function=code 'reward.params={wall_s: -1.0}'", "wall_s=-1.0", "above 0"),
    "no memory for the sandbox": train("reward.function=code 'reward.params={memory_mb: 0}'", "memory_mb=0", "above 0"),
    "a sandbox that is not known": train("reward.function=code 'reward.params={sandbox: docker}'", "'docker'", "isolated, process"),
    "no pattern": reward_of("reward.function=regex", "'pattern'"),
    "a pattern that is none": reward_of("reward.function=regex 'reward.params={pattern: \"(\"}'", "the pattern '('"),
    "two rewards": reward_of("'reward.parts={a: {function: regex}}'", "give one of function"),
    "a part of nothing": reward_of(
        "'reward={function: null, parts: {a: {weight: 1.0}}}'", "reward.parts.a", "give one of function"
    ),
    "a function and a service": train("reward.url=http://localhost/score", "function", "url"),
    "no address of a judge": train("'reward={function: null, url: \"localhost:80\"}'", "url='localhost:80'", "http://"),
    "a judge that is down": train(f'"{HTTP}}}"', "reward url http://127.0.0.1:1/score cannot be reached", "start the judge"),
    "a judge without a model": reward_of(
        "'reward={function: null, judge: {url: \"http://h/v1\"}}'", "reward.judge.model is required"
    ),
    "a key that is not set": reward_of(f'"{HTTP}, key_env: TANDEM_NO_SUCH_KEY}}"', "TANDEM_NO_SUCH_KEY", "export it"),
    "a try longer than all": reward_of(f'"{HTTP}, try_limit_s: 99.0}}"', "try_limit_s=99.0 is above"),
    "workers and a limit of what is called where the loop runs": train(
        "reward.function=environment reward.limit_s=5 trainer.stepz=3",
        "3 problems",
        "tiny.yaml:8: reward: workers=1 is of functions in worker processes, and environment",
        "reward.limit_s=5: reward: limit_s=5.0",
        "leave limit_s out",
    ),
    "a try of a function": train("reward.try_limit_s=1.0", "try_limit_s=1.0", "url"),
    "answers of other data": reward_of(
        "--answers answers.jsonl", "'gsm8k-1'", "ids are like", **{"answers.jsonl": '{"task": "gsm8k-1", "text": "4"}\n'}
    ),
    "no reward model": train("reward_model.path=no/such", "reward_model.path=no/such", "recipes/reward_model.yaml"),
    "a reward model that scores nothing": train(
        "reward_model.path=scorer",
        "reward_model.path=scorer holds no reward model but one of language",
        made=lambda here, finished: shutil.copytree(finished / "final", here / "scorer") and None,
    ),
    "a reward model with other tokens": train(
        "reward_model.path=scorer data.train.task=sorting data.heldout.task=sorting 'agent={name: single_turn, env: null}'",
        "reward_model.path=scorer has another vocabulary than the policy",
        made=scorer,
    ),
    "a reward model where parts are credited": train(
        "reward_model.path=scorer algorithm=gdpo reward.components=[right]",
        "reward_model is set, and gdpo with its parameters reads no rewards",
        made=scorer,
    ),
    # ------------------------------------------------------------------------------- the run and its directory
    "an unknown tracker": train("logs=[wandbb]", "'wandbb'", "'wandb'"),
    "a tracker that takes nothing": train(
        "logs=[mine.py:T]", "mine.py:T", "takes a TrackedRun", files={"mine.py": "class T: pass\n"}
    ),
    "a missing extra of a tracker": train(
        "logs=[trackio]", "needs the package 'trackio'", "pip install 'tandem-rl[trackio]'", without="trackio"
    ),
    "a run that leaves its directory": train("run.dir=null run.name=..", "name='..'"),
    "a run with too long a name": train(f"run.dir=null run.name={'a' * 300}", "run: 'aaaa", "of 300 characters"),
    "a run whose directory has a zero in it": train("'run.dir=\"a\\0b\"'", "run: 'a\\x00b'"),
    "a run in a file": train("run.dir=notes/run", "notes is no directory", "run.dir", files={"notes": "precious"}),
    "a run where nothing can be written": train("run.dir=/proc/run", "/proc/run", "nothing can be written", "run.dir"),
    "a run in a directory of something else": train("", "run is not empty", "run.dir", made=precious),
    "two runs in one directory": resumed("", "run is in use", "run.dir", held=locked),
    "a resumed run that is not there": train("--resume", "--resume", "no run in run"),
    "a dry run of a resumed run that is not there": train("--resume --dry-run", "--resume", "no run in run"),
    "a dry run that resumes with another seed": resumed("--resume --dry-run seed=5", "seed=5 (it had 0)", "run.dir"),
    "another seed on resuming": resumed("--resume seed=5", "seed=5 (it had 0)", "run.dir"),
    "another algorithm on resuming": resumed("--resume algorithm=gspo", "algorithm.name=gspo (it had grpo)"),
    "another model on resuming": resumed(
        "--resume", "model.new.hidden_size=48 (it had 32)", recipe=RECIPE.replace("hidden_size: 32", "hidden_size: 48")
    ),
    "a copy of what is gone": resumed("--resume algorithm.kl_coef=0.1", "reference would be a copy of the policy as the run began"),
    "no such run to show": Mistake("show no/such", ("there is no run no/such", "`tandem runs`")),
    "no directory of runs": Mistake("runs no/such", ("no directory no/such",)),
    "no run to measure": Mistake("eval no/such", ("no recipe and no run no/such", "directory of a run")),
    "a run to measure that has not ended": Mistake("eval begun", UNENDED, made=begun),
    "a run to talk with that has not ended": Mistake("chat begun", UNENDED, made=begun),
    "an exported model below a file": Mistake(
        "export begun good.jsonl/out", ("good.jsonl/out cannot be made", "Not a directory", "name another"), made=begun
    ),
    "an imported model below a file": Mistake(
        "import model good.jsonl/out",
        ("good.jsonl/out cannot be made", "Not a directory", "name another"),
        made=lambda here, finished: shutil.copytree(finished / "final", here / "model") and None,
    ),
    "no run to export": Mistake("export no/such out", ("there is no run no/such", "`tandem runs`")),
    "a run without a snapshot yet to export": Mistake("export begun out", ("no snapshots in begun/snapshots",), made=first_steps),
    "a directory to export that is none of a run": Mistake("export . out", ("not the directory of a run", "config.yaml")),
}


def tree(directory: Path) -> dict[str, bytes | None]:
    """Each file with its content, and each directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if "__pycache__" not in path.parts
    }


def hide(package: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this process and those that it starts."""
    place.mkdir()
    (place / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
    monkeypatch.syspath_prepend(place)
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name.startswith("tandem.track.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message(
    mistake: Mistake,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    for name, content in {"good.jsonl": GOOD, **mistake.files}.items():
        Path(name).write_text(content)
    if mistake.made is not None:
        mistake.made(tmp_path, finished)
    if mistake.without is not None:
        hide(mistake.without, tmp_path / "hidden", monkeypatch)
    before = tree(tmp_path)
    with mistake.held(tmp_path):
        code = tandem(*shlex.split(mistake.command))
    message = capsys.readouterr().err
    assert code == 2, message
    assert "Traceback" not in message
    assert message.startswith("error: "), message
    assert len(re.findall("^[Ee]rror:", message, re.MULTILINE)) == 1, message
    assert "Usage:" not in message
    assert [word for word in mistake.says if word not in message] == [], message
    after = tree(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert mistake.begins or after.keys() == before.keys()
