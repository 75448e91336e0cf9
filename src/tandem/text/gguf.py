"""The tokenizer that a GGUF file describes in its metadata: byte-level BPE with the splitting rule that it names.

llama.cpp knows each rule by a name alone (`tokenizer.ggml.pre`), so that they are listed here. SentencePiece vocabularies are
not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tandem.errors import ModelError
from tandem.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Rule(NamedTuple):
    """How text is split before BPE. pattern: None is GPT-2's; digits: each alone; whole: a piece that is a token is not merged."""

    pattern: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False


_RULES = {
    "gpt-2": _Rule(),
    "smollm": _Rule(digits=True),
    "qwen2": _Rule(_WORDS.format(numbers=r"\p{N}"), composed=True),
    "llama-bpe": _Rule(_WORDS.format(numbers=r"\p{N}{1,3}"), whole=True),
}
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_tokenizer(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """metadata: of the file; origin: what messages call it. Raises ModelError for a tokenizer of another kind, or none."""
    here = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    if here.get("model") != "gpt2" or here.get("pre") not in _RULES:
        raise ModelError(
            f"{origin}: tokenizer {here.get('model')!r} with the splitting rule {here.get('pre')!r} is not read, only 'gpt2' with "
            f"one of {', '.join(_RULES)} is; take the tokenizer of the model's Hugging Face directory"
        )
    tokens, merges, kinds = (cast("list[Any]", here.get(name) or []) for name in ("tokens", "merges", "token_type"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    numbers = {name: here[f"{kind}_token_id"] for kind, name in _SPECIAL.items() if f"{kind}_token_id" in here}
    if not tokens or len(kinds) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ModelError(f"{origin}: its tokens, their types and its merges do not fit together; fetch the file again")
    if wrong := {name: number for name, number in numbers.items() if not 0 <= number < len(tokens)}:
        raise ModelError(f"{origin}: {wrong} are outside its {len(tokens)} tokens; fetch the file again")
    rule = _RULES[here["pre"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, cast("list[tuple[str, str]]", pairs), ignore_merges=rule.whole))
    if rule.composed:
        backend.normalizer = normalizers.NFC()
    first = pre_tokenizers.Digits(individual_digits=True) if rule.digits else None
    if rule.pattern is not None:
        first = pre_tokenizers.Split(Regex(rule.pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None)
    backend.pre_tokenizer = bytes_ if first is None else pre_tokenizers.Sequence([first, bytes_])
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(token, normalized=False, special=special) for token, k in zip(tokens, kinds, strict=True) if k == kind]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    specials = {name: tokens[number] for name, number in numbers.items()}
    if here.get("add_bos_token") and (bos := specials.get("bos_token")):
        parts = {"single": f"{bos} $A", "pair": f"{bos} $A {bos} $B"}
        backend.post_processor = processors.TemplateProcessing(**parts, special_tokens=[(bos, numbers["bos_token"])])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **specials}
    further = {"eos_token_id": here["eot_token_id"]} if "eot_token_id" in here else {}
    return Tokenizer(backend, config, further, metadata.get("tokenizer.chat_template"), origin)
