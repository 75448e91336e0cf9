"""`tandem import`: what comes out of a file and of a directory, and every way in which there is nothing to import."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx2
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoModelForCausalLM

from tandem.assemble.imports import import_model
from tandem.errors import ModelError, RegistryError
from tandem.models.hf import load_decoder
from tandem.text.tokenizer import load_tokenizer
from tests.models.gguf_files import TEMPLATE, TEXT, bpe, write
from tests.models.tiny import config, loud, tokens


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "m.gguf", loud(config(vocab_size=300)), tokenizer=bpe(300))
    return tmp_path / "m.gguf"


def test_a_gguf_file_becomes_a_directory_that_transformers_reads_too(file: Path, tmp_path: Path) -> None:
    said = import_model(str(file), tmp_path / "out")
    assert said.endswith("parameters in float32, 300 tokens, with a chat template")
    ours, rows = load_decoder(tmp_path / "out"), tokens(2, 20, 300)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for name, weight in loud(config(vocab_size=300)).weights().items():
        assert torch.equal(ours.weights()[name], weight), name
    with torch.no_grad():
        torch.testing.assert_close(ours.prefill(rows) @ ours.output_weight.T, theirs(rows).logits, rtol=0, atol=1e-4)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert list(tokenizer.encode(TEXT)) == bpe(300).encode(TEXT).ids
    assert (tokenizer.template, theirs.generation_config.eos_token_id) == (TEMPLATE, [2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_a_directory_is_written_again_with_another_type(file: Path, tmp_path: Path) -> None:
    import_model(str(file), tmp_path / "one")
    said = import_model(str(tmp_path / "one"), tmp_path / "two", "bfloat16")
    assert "in bfloat16" in said
    assert json.loads((tmp_path / "two" / "config.json").read_text())["dtype"] == "bfloat16"
    one, two = load_decoder(tmp_path / "one"), load_decoder(tmp_path / "two")
    for name, weight in one.weights().items():
        assert torch.equal(two.weights()[name], weight.bfloat16().float()), name
    assert load_tokenizer(tmp_path / "two").encode(TEXT) == load_tokenizer(tmp_path / "one").encode(TEXT)
    assert (tmp_path / "two" / "model.safetensors").stat().st_size < 0.6 * (tmp_path / "one" / "model.safetensors").stat().st_size


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", loud(config()), tokenizer=bpe(300))
    with pytest.raises(ModelError, match="has 300 tokens in its tokenizer and 61 in its model"):
        import_model(str(tmp_path / "m.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(ModelError, match="is there and not an empty directory"):
            import_model("nothing", taken)


def test_what_is_no_model_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("nowhere", "./a/b", "a/b/c"):
        with pytest.raises(ModelError, match=f"there is no file or directory {source}, and it is no id of a model on the hub"):
            import_model(source, tmp_path / "out")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        import_model(str(tmp_path), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "tandem.models.gguf", raising=False)
    with pytest.raises(RegistryError, match="needs the package 'gguf'"):
        import_model(str(file), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "tandem.models.hub", raising=False)
    with pytest.raises(RegistryError, match="needs the package 'huggingface_hub'"):
        import_model("owner/name", tmp_path / "out")


def test_an_id_is_fetched_from_the_hub(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_model(str(file), tmp_path / "there")
    response = httpx2.Response(404, request=httpx2.Request("GET", "https://hub"))
    problems = {"owner/none": RepositoryNotFoundError("not found", response=response)}
    problems |= {"owner/far": LocalEntryNotFoundError("no internet"), "owner/a b": HFValidationError("no blanks")}
    asked: list[tuple[str, tuple[str, ...]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        if name in problems:
            raise problems[name]
        return str(tmp_path / "there")

    monkeypatch.setattr("tandem.models.hub.snapshot_download", snapshot_download)
    import_model("owner/name", tmp_path / "out")
    assert torch.equal(load_decoder(tmp_path / "out").output_weight, load_decoder(tmp_path / "there").output_weight)
    assert asked == [("owner/name", ("*.json", "*.safetensors", "*.jinja"))]
    said = {
        "owner/none": r"and the hub gives no such model \(404\): correct the name or, where it asks for a login, set HF_TOKEN$",
        "owner/far": "and the hub, .*, is not reached from this machine: fetch the model elsewhere and give the path of its",
        "owner/a b": "and it is no id of a model on the hub: no blanks$",
    }
    for name, message in said.items():
        with pytest.raises(ModelError, match=f"^there is no file or directory {name}, {message}"):
            import_model(name, tmp_path / "more")
