import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from tandem.errors import DataError, ModelError
from tandem.text.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from tests.text.chats import STYLES, byte_level

TEXT = "What is 7*9?\n\nansw <ans>  é 中 \U0001f600"


@pytest.mark.parametrize("pad", [None, "<pad>"])
def test_characters_round_trip_one_token_each(pad: str | None, tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789+=\n é0", pad=pad, template="{{ messages[0].content }}")
    ids = tokenizer.encode("12+é\n =")
    assert len(ids) == 7
    assert tokenizer.decode(ids) == "12+é\n ="
    assert tokenizer.decode((*ids, tokenizer.eos_id)) == "12+é\n ="
    assert tokenizer.decode((tokenizer.eos_id,), skip_special=False) == "<eos>"
    assert tokenizer.encode("<eos>1") == (tokenizer.eos_id, tokenizer.encode("1")[0])
    assert tokenizer.vocab_size == 15 + (2 if pad is None else 3)
    assert tokenizer.pad_id != tokenizer.eos_id

    tokenizer.save(tmp_path / "deep" / "saved")
    again = load_tokenizer(tmp_path / "deep" / "saved")
    assert (again.encode("12+é"), again.eos_id, again.pad_id, again.template) == (
        tokenizer.encode("12+é"),
        tokenizer.eos_id,
        tokenizer.pad_id,
        "{{ messages[0].content }}",
    )


@pytest.mark.parametrize("style", STYLES)
def test_saved_directories_load_in_transformers_with_the_same_ids(style: str, tmp_path: Path) -> None:
    tokenizer = STYLES[style](tmp_path / "made")
    tokenizer.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    text = TEXT if style != "plain" else TEXT.encode("ascii", "ignore").decode()
    again = load_tokenizer(tmp_path / "saved")
    assert list(tokenizer.encode(text)) == theirs.encode(text, add_special_tokens=False) == list(again.encode(text))
    assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_id, tokenizer.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert again.stop_ids == tokenizer.stop_ids
    assert again.template == tokenizer.template == theirs.chat_template
    assert tokenizer.vocab_size == len(theirs)


def test_generation_config_gives_further_stop_ids_and_is_kept(tmp_path: Path) -> None:
    tokenizer = STYLES["llama3"](tmp_path)
    assert [tokenizer.decode([i], skip_special=False) for i in tokenizer.stop_ids] == [
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
    ]
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.6
    single = byte_level(tmp_path / "one", special=["<e>", "<f>"], tokenizer_config={"eos_token": "<e>"})
    (single / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert load_tokenizer(single).stop_ids == (load_tokenizer(single).eos_id, 3)


def test_of_several_templates_the_default_counts(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = byte_level(tmp_path, special=["<e>"], tokenizer_config={"eos_token": "<e>", "chat_template": templates})
    assert load_tokenizer(path).template == "D"


def test_names_of_special_tokens_are_also_read_from_the_older_file(tmp_path: Path) -> None:
    path = byte_level(tmp_path, special=["<e>"], special_tokens_map={"eos_token": {"content": "<e>"}})
    assert load_tokenizer(path).decode([load_tokenizer(path).eos_id], skip_special=False) == "<e>"


def sentencepiece_like() -> Tokenizer:
    """Writes a space before a text but not before its later parts."""
    vocab = {"<e>": 0, "<unk>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<e>", "<unk>"])
    return Tokenizer(backend, {"eos_token": "<e>", "unk_token": "<unk>"}, {}, None, "test")


def test_a_later_part_is_not_marked_as_a_beginning() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.encode("ab") == (5, 4)
    assert tokenizer.encode("ab", beginning=False) == (3, 4)
    assert tokenizer.encode("b<e>ab") == (2, *tokenizer.encode("b<e>ab", beginning=False))


def test_a_character_outside_the_vocabulary_is_named_with_its_text() -> None:
    with pytest.raises(DataError, match=r"'x' in the text '1x2'.*character tokenizer with 4 tokens"):
        character_tokenizer("12").encode("1x2")
    with pytest.raises(DataError, match="'c' in the text"):
        sentencepiece_like().encode("abc")
    with pytest.raises(DataError, match=r"\.\.\.'"):
        character_tokenizer("1").encode("1" * 100 + "x")
    assert character_tokenizer("1").encode("1<unk>") == (2, 1)  # the text spells it out


def test_half_a_character_is_refused() -> None:
    with pytest.raises(DataError, match=r"the text '1\\ud800' has half a character"):
        character_tokenizer("12").encode("1\ud800")


@pytest.mark.parametrize(
    ("options", "match"), [({"pad": "<eos>"}, "distinct"), ({"characters": ""}, "at least one"), ({"unk": "<eos>"}, "distinct")]
)
def test_character_tokenizers_that_cannot_be(options: dict[str, str], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        character_tokenizer(**{"characters": "12", **options})


def test_bad_directories_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no directory .* with a model or its tokenizer"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelError, match="holds no tokenizer: there is no tokenizer"):
        load_tokenizer(tmp_path)
    no_eos = byte_level(tmp_path / "no_eos", special=["<|im_end|>"], tokenizer_config={"bos_token": "<|im_end|>"})
    with pytest.raises(ModelError, match=r"no EOS token.*set `eos_token` in tokenizer_config.json.*<\|im_end\|>"):
        load_tokenizer(no_eos)
    null_eos = byte_level(tmp_path / "null", special=["<e>"], tokenizer_config={"eos_token": None})
    with pytest.raises(ModelError, match="no EOS token"):
        load_tokenizer(null_eos)
    absent = byte_level(tmp_path / "absent", special=["<e>"], tokenizer_config={"eos_token": "</s>"})
    with pytest.raises(ModelError, match=r"eos_token '</s>' of .* is not in its vocabulary"):
        load_tokenizer(absent)
    for content, match in (("{", "not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "has no `model`")):
        (no_eos / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=match):
            load_tokenizer(no_eos)
