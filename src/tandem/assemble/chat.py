"""A conversation with a model, in a terminal or line by line from a pipe; answers appear as they are sampled.

Engine, session and renderer are those of a run, so that what is said here is what the policy would say there. A line is a turn;
`/new` begins another conversation.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from tandem.errors import ConfigError
from tandem.models.hf import load_decoder
from tandem.rollout.native import NativeConfig, NativeEngine
from tandem.rollout.session import Session
from tandem.text.renderer import TemplateRenderer
from tandem.text.tokenizer import load_tokenizer
from tandem.types import Key, Message, SamplingParams

_CONTEXT = 4096  # tokens of a conversation, where the model has as many positions
_NEW = "/new"


@dataclass(frozen=True)
class Chat:
    """How to talk. max_tokens: of one answer. system: a message before the first turn; null leaves it to the template."""

    temperature: float = 0.7
    max_tokens: int = 512
    seed: int = 0
    system: str | None = None
    dtype: str = "float32"

    @property
    def params(self) -> SamplingParams:
        try:
            return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)
        except ValueError as problem:
            raise ConfigError(str(problem)) from problem


def chat(model: Path, how: Chat, console: Console, lines: Iterable[str] | None = None) -> None:
    """model: a Hugging Face directory. lines: what the user says; null is standard input.

    Raises ModelError for a directory without a model, a tokenizer or a chat template, ConfigError for values out of range and for
    no directory.
    """
    params = how.params
    if not model.is_dir():
        raise ConfigError(
            f"there is no run and no model directory {model}: give the directory of a finished run, such as runs/quickstart, or "
            f"of a Hugging Face model; a GGUF file or an id of the hub becomes one by `tandem import`"
        )
    decoder, renderer = load_decoder(model, getattr(torch, how.dtype)), TemplateRenderer(load_tokenizer(model))
    context = min(decoder.config.max_positions, _CONTEXT)
    engine = NativeEngine(decoder, renderer.text, NativeConfig(slots=1, max_context=context, chunk_tokens=1), exact=False)
    shown = _Shown(renderer.text, console)
    beginning = [Message("system", how.system)] if how.system is not None else []

    async def talk() -> None:
        history, number, session = list(beginning), 0, None
        for line in map(str.strip, lines if lines is not None else _input(console)):
            if line == _NEW:
                history, number, session = list(beginning), number + 1, None
            if line in ("", _NEW):
                continue
            if session is None:
                session = Session(engine, renderer, Key("chat", number), params, seed=how.seed, max_context=context, heard=shown)
            shown.begin()
            history.append(Message("user", line))
            sampled = sum(int(sample.mask.sum()) for sample in session.samples()[-1:])
            reply = await session.chat(history, params=replace(params, max_tokens=sampled + params.max_tokens))
            history.append(reply.message)
            if reply.stop == "length":
                full = f"the context of {context} tokens is full: {_NEW} begins another conversation"
                note = f"cut off after {params.max_tokens} tokens" if reply.message.content else full
                console.print(f" ({note})", end="", style="dim", highlight=False)
            console.print()
        await engine.close()

    asyncio.run(talk())


def _input(console: Console) -> Iterator[str]:
    """Lines of standard input, until it ends; a terminal is asked for them."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    importlib.import_module("readline")  # with which lines can be edited
    console.print(f"an empty line is nothing, {_NEW} another conversation, Ctrl-D the end", style="dim")
    try:
        while True:
            yield console.input("[bold green]>[/bold green] ")
    except EOFError:
        console.print()


class _Shown:
    """Prints an answer's text while its tokens come; a character that is not whole yet waits."""

    def __init__(self, text: Callable[[Sequence[int]], str], console: Console) -> None:
        self._text, self._console = text, console
        self.begin()

    def begin(self) -> None:
        self._tokens: list[int] = []
        self._printed = 0

    def __call__(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        whole = self._text(self._tokens).rstrip("\ufffd")
        self._console.print(whole[self._printed :], end="", markup=False, highlight=False, soft_wrap=True)
        self._printed = max(len(whole), self._printed)
