"""Tokenizers from GGUF metadata against the ones that the metadata were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from tandem.errors import ModelError
from tandem.text.gguf import gguf_tokenizer
from tandem.text.renderer import TemplateRenderer
from tandem.types import Message
from tests.models.gguf_files import SPECIAL, TEMPLATE, TEXT, bpe

TEXTS = [TEXT, "fish 2025\n\n7 fish", "<|im_start|>user\nnaïve 12  fish<|im_end|>\n", "", "   ", "日本語 🎉", "e\u0301"]


def metadata(backend: Backend, pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    merges = json.loads(backend.to_str())["model"]["merges"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    here = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (here | changes).items()} | {"tokenizer.chat_template": TEMPLATE}


@pytest.mark.parametrize(("pre", "digits"), [("smollm", True), ("gpt-2", False)])
def test_ids_are_those_of_the_tokenizer_that_it_was_written_from(pre: str, digits: bool, tmp_path: Path) -> None:
    backend = bpe(300, digits)
    ours = gguf_tokenizer(metadata(backend, pre), "m.gguf")
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        want = backend.encode(text).ids
        assert list(ours.encode(text)) == want == theirs(text)["input_ids"]
        assert ours.decode(want, skip_special=False) == text
    assert not digits or len(ours.encode("345")) == 3
    assert (ours.stop_ids, ours.specials) == ((2,), {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]})
    messages = [{"role": "user", "content": "red fish"}, {"role": "assistant", "content": "blue"}, {"role": "user", "content": "?"}]
    want = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(TemplateRenderer(ours).opening([Message(m["role"], m["content"]) for m in messages])) == want


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "ab 123\n\n4", ["ab", "Ġ", "1", "2", "3", "ĊĊ", "4"]),
        ("gpt-2", "ab 123\n\n4", ["ab", "Ġ123", "Ċ", "Ċ", "4"]),
        ("qwen2", "ab 123\n\n4 It'S", ["ab", "Ġ", "1", "2", "3", "ĊĊ", "4", "ĠIt", "'S"]),
        ("llama-bpe", "ab 1234\n\n4 It'S", ["ab", "Ġ", "123", "4", "ĊĊ", "4", "ĠIt", "'S"]),
    ],
)
def test_text_is_split_by_the_rule_that_the_file_names(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer(metadata(bpe(300), pre), "m.gguf")
    splitter = tokenizer._backend.pre_tokenizer
    assert splitter is not None
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def test_a_rule_may_compose_characters_and_a_beginning_may_be_marked(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(metadata(bpe(300), "qwen2", add_bos_token=True, eot_token_id=0), "m.gguf")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert tokenizer.stop_ids == (2, 0)
    tokenizer.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("fish")["input_ids"] == [1, *tokenizer.encode("fish")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer 'llama' with the splitting rule 'smollm' is not read, only 'gpt2' with one of gpt-2, "),
        ({"pre": "viking"}, "the splitting rule 'viking' is not read"),
        ({"pre": None}, "the splitting rule None is not read"),
        ({"merges": ["a b", "ab"]}, "its tokens, their types and its merges do not fit together"),
        ({"token_type": [1]}, "its tokens, their types and its merges do not fit together"),
        ({"eos_token_id": 4000}, r"\{'eos_token': 4000\} are outside its 300 tokens"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gguf_tokenizer(metadata(bpe(300), **changes), "m.gguf")
