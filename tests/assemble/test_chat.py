"""`tandem chat`: turns of one conversation, another one, what is cut off, and text that comes in pieces."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tandem.assemble.chat import Chat, _Shown, chat
from tandem.errors import ConfigError, ModelError
from tandem.models.hf import load_decoder, save_decoder
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import character_tokenizer, load_tokenizer
from tandem.types import Message
from tests.models.tiny import config, loud

LETTERS = "abcdefghijklmnop"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = character_tokenizer(LETTERS, template=PLAIN_TEMPLATE)
    decoder = loud(config(vocab_size=tokenizer.vocab_size, max_positions=64))
    with torch.no_grad():
        decoder.model.embed_tokens.weight[tokenizer.vocabulary["<unk>"]].zero_()  # which no text shows
    save_decoder(decoder, tmp_path, tokenizer.eos_id)
    tokenizer.save(tmp_path)
    return tmp_path


def said(model: Path, *lines: str, how: Chat) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    chat(model, how, console, lines)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def greedy(path: Path, text: str, limit: int) -> str:
    """A token at a time from whole rows, without engine and session."""
    decoder, tokenizer = load_decoder(path), load_tokenizer(path)
    tokens = list(tokenizer.encode(text))
    start = len(tokens)
    while len(tokens) < start + limit and (len(tokens) == start or tokens[-1] != tokenizer.eos_id):
        with torch.no_grad():
            tokens.append(int((decoder.prefill(torch.tensor([tokens]))[0, -1] @ decoder.output_weight.T).argmax()))
    return tokenizer.decode(tokens[start:])


def test_answers_are_the_model_s_and_turns_go_on(model: Path) -> None:
    how = Chat(temperature=0.0, max_tokens=5)
    first, second, again = said(model, "abc", "", "dad", "/new", "abc", how=how)
    assert first == again
    want = greedy(model, "abc", 5)
    assert first in (want, f"{want} (cut off after 5 tokens)")
    so_far = [Message("user", "abc"), Message("assistant", want), Message("user", "dad")]
    rendered = TemplateRenderer(load_tokenizer(model)).opening(so_far)
    assert second.split(" ")[0] == greedy(model, load_tokenizer(model).decode(rendered, skip_special=False), 5)


def test_a_system_message_comes_first_and_seeds_differ(model: Path) -> None:
    how = {"temperature": 1.0, "max_tokens": 8}
    plain = said(model, "abc", how=Chat(**how))
    assert plain == said(model, "abc", how=Chat(**how))
    assert plain != said(model, "abc", how=Chat(**how, seed=1))
    assert said(model, "abc", how=Chat(temperature=0.0, system="d")) == said(model, "dabc", how=Chat(temperature=0.0))


def test_a_full_context_is_said(model: Path) -> None:
    found = said(model, *["abcdefgh"] * 8, how=Chat(temperature=0.0, max_tokens=8))
    assert found[-1] == " (the context of 64 tokens is full: /new begins another conversation)"


def test_characters_of_several_tokens_appear_whole() -> None:
    console = Console(file=io.StringIO())
    shown = _Shown(lambda tokens: bytes(tokens).decode(errors="replace"), console)
    seen = []
    assert isinstance(console.file, io.StringIO)
    for byte in "aé🎉".encode():
        shown((byte,))
        seen.append(console.file.getvalue())
    assert seen == ["a", "a", "aé", "aé", "aé", "aé", "aé🎉"]


def test_what_is_wrong_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run and no model directory .*nowhere: give"):
        said(tmp_path / "nowhere", how=Chat())
    with pytest.raises(ConfigError, match="sampling parameter temperature=-1 must be 0"):
        said(model, how=Chat(temperature=-1))
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        said(model, how=Chat())
