"""Tokenizers: text to ids and back, for ordinary Hugging Face fast tokenizers and for one token a character.

Reads and writes the files of a tokenizer directory itself, because importing transformers takes seconds; what is saved
here, `AutoTokenizer.from_pretrained` loads with the same ids. Chats are rendered in renderer.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tandem.errors import DataError, ModelError

_SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # what transformers can read
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A fast tokenizer with its end of text, its stop ids and its chat template.

    config: as in tokenizer_config.json; generation: as in generation_config.json; template: the chat template (Jinja),
    if it has a file of its own. origin: what messages call it. Raises ModelError where there is no EOS token.
    """

    def __init__(
        self, backend: Backend, config: Mapping[str, Any], generation: Mapping[str, Any], template: str | None, origin: str
    ) -> None:
        self._backend = backend
        self._config = dict(config)
        self._generation = dict(generation)
        self._template = template
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.origin = origin
        self.specials = {name: _token(config[name]) for name in _SPECIAL if config.get(name) is not None}
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        if "eos_token" not in self.specials:
            candidates = sorted(token for token, i in self._vocab.items() if i in self.special_ids)
            raise ModelError(
                f"the tokenizer of {origin} has no EOS token, so no answer could ever end: set `eos_token` in "
                f"tokenizer_config.json to the token that ends an answer (its special tokens: {candidates or 'none'})"
            )
        self.eos_id = self._id("eos_token")
        self.pad_id = self._id("pad_token") if "pad_token" in self.specials else None
        self._unk_id = self._vocab.get(self.specials.get("unk_token", ""))
        # Some tokenizers mark the beginning of a text (SentencePiece's leading space); a later part must not have it.
        splitter = backend.pre_tokenizer
        self._marks_beginning = splitter is not None and b'"prepend_scheme":"first"' in splitter.__getstate__()

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The id of each token."""
        return self._vocab

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._vocab.values()) + 1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """EOS, then the further `eos_token_id` of generation_config.json."""
        further: int | list[int] | None = self._generation.get("eos_token_id")
        match further:
            case None:
                return (self.eos_id,)
            case int():
                return tuple(dict.fromkeys((self.eos_id, further)))
            case _:
                return tuple(dict.fromkeys((self.eos_id, *further)))

    @property
    def template(self) -> str | None:
        """The chat template, from its own file or from tokenizer_config.json (the one named "default" of several)."""
        if self._template is not None:
            return self._template
        inline: str | list[dict[str, str]] | None = self._config.get("chat_template")
        if isinstance(inline, list):
            return next((entry["template"] for entry in inline if entry["name"] == "default"), None)
        return inline

    def encode(self, text: str, *, beginning: bool = True) -> tuple[int, ...]:
        """Ids of `text`; special tokens only where the text spells them out.

        beginning: False for a part that goes on after other tokens. Raises DataError for a character that the
        vocabulary does not have, and for half of one.
        """
        if not beginning and self._marks_beginning:
            return self._ids(self.specials["eos_token"] + text)[1:]
        return self._ids(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def save(self, path: Path) -> None:
        """Writes the tokenizer's files into the directory `path`, which is made if need be."""
        path.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(path / "tokenizer.json"))
        generation = {**self._generation, "eos_token_id": list(self.stop_ids)}
        (path / "tokenizer_config.json").write_text(_dump(self._config), encoding="utf-8")
        (path / "generation_config.json").write_text(_dump(generation), encoding="utf-8")
        if self._template is not None:
            (path / "chat_template.jinja").write_text(self._template, encoding="utf-8")

    def _ids(self, text: str) -> tuple[int, ...]:
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except TypeError:  # as the library has it
            shown = ascii(_shortened(text))
            raise DataError(f"the text {shown} has half a character, which no token is: give text that was read as UTF-8") from None
        if self._unk_id is not None and self._unk_id in encoding.ids:
            for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if i == self._unk_id and text[start:end] != self.specials["unk_token"]:
                    raise DataError(
                        f"{text[start:end]!r} in the text {_shortened(text)!r} is not in the vocabulary of {self.origin}: "
                        "add the character to the tokenizer or take it out of the data"
                    )
        return tuple(encoding.ids)

    def _id(self, name: str) -> int:
        token = self.specials[name]
        if token not in self._vocab:
            raise ModelError(f"the {name} {token!r} of {self.origin} is not in its vocabulary: correct tokenizer_config.json")
        return self._vocab[token]


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a Hugging Face directory with a fast tokenizer (tokenizer.json); never asks a network.

    Raises ModelError where the directory or a file is missing, a file is not what it should be, or there is no EOS token.
    """
    if not path.is_dir():
        raise ModelError(
            f"there is no directory {path} with a model or its tokenizer: give the path of one with tokenizer.json; of a model of "
            f"the hub, `tandem import OWNER/NAME DIRECTORY` makes one"
        )
    if not (path / "tokenizer.json").is_file():
        slow = [name for name in _SLOW if (path / name).is_file()]
        if slow:
            raise ModelError(
                f"{path} has no tokenizer.json but {', '.join(slow)}: load it once with transformers' AutoTokenizer and save it "
                f"with save_pretrained, which writes the fast format"
            )
        raise ModelError(
            f"{path} holds no tokenizer: there is no tokenizer.json, nor {' or '.join(_SLOW)}. Copy tokenizer.json and "
            f"tokenizer_config.json from where the model comes from; in a recipe, model.tokenizer may name another directory"
        )
    document = _read(path / "tokenizer.json")
    if "model" not in document:
        raise ModelError(f"{path / 'tokenizer.json'} is not a fast tokenizer: it has no `model`")
    template = path / "chat_template.jinja"
    return Tokenizer(
        Backend.from_str(json.dumps(document)),
        config={**_read(path / "special_tokens_map.json"), **_read(path / "tokenizer_config.json")},
        generation=_read(path / "generation_config.json"),
        template=template.read_text(encoding="utf-8") if template.is_file() else None,
        origin=str(path),
    )


def character_tokenizer(
    characters: str, *, eos: str = "<eos>", pad: str | None = None, unk: str = "<unk>", template: str | None = None
) -> Tokenizer:
    """One token a character of `characters` (repeats do not matter), after the special tokens; decodes exactly.

    Padding needs no token of its own: pad is None or a further token. unk exists for readers of the saved files only:
    `encode` raises instead. Raises ModelError where special tokens coincide or `characters` is empty.
    """
    special = [eos, *([] if pad is None else [pad]), unk]
    if len(set(special)) < len(special) or not characters:
        raise ModelError(f"a character tokenizer needs distinct special tokens (given: {special}) and at least one character")
    vocab = {token: i for i, token in enumerate((*special, *dict.fromkeys(characters)))}
    backend = Backend(models.WordLevel(vocab, unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "unk_token": unk,
        **({} if pad is None else {"pad_token": pad}),
    }
    return Tokenizer(backend, config, {}, template, f"the character tokenizer with {len(vocab)} tokens")


def _token(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else str(entry["content"])


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch or save the tokenizer again") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} must hold a JSON object and holds a {type(document).__name__}: save the tokenizer again")
    return cast("dict[str, Any]", document)


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
