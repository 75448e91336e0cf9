"""What `tandem algos` prints: every row has its line and page, and every setting it names exists."""

from __future__ import annotations

import re

import pytest

from tandem.algos.describe import description, listing, own_defaults
from tandem.algos.functions import CORRECTIONS
from tandem.algos.notes import NOTES
from tandem.algos.table import ALGORITHMS, configure, parameter_types
from tandem.errors import RegistryError

REQUIRED = {"dr_grpo": {"length_constant": 8.0}}


def test_every_row_has_a_note_and_every_note_a_row() -> None:
    assert NOTES.keys() == ALGORITHMS.keys()


def test_the_list_names_each_row_with_its_source_needs_and_defaults() -> None:
    text = "\n".join(listing())
    for name, row in ALGORITHMS.items():
        assert f"\n{name}: " in f"\n{text}"
        assert row.source in text
    assert "values" in text.split("\nppo: ")[1].split("\nvapo: ")[0]
    assert own_defaults(ALGORITHMS["dapo"]) == {"clip_high": 0.28, "aggregation": "token-mean", "keep": "varied_rewards"}
    for correction in CORRECTIONS:
        assert correction in text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_has_formula_parameters_and_defaults(name: str) -> None:
    text = "\n".join(description(name))
    for parameter in parameter_types(ALGORITHMS[name]):
        assert re.search(rf"^ +{parameter} ", text, re.MULTILINE), parameter
    assert NOTES[name].choose[:20] in text
    assert max(map(len, text.splitlines())) < 160
    assert "typing" not in text


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_has_a_page(name: str) -> None:
    assert "rollout_logprobs" in "\n".join(description(name))


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(RegistryError, match="did you mean"):
        description("gsspo")


@pytest.mark.parametrize(("name", "framework"), [(name, peer) for name, note in NOTES.items() for peer in note.frameworks])
def test_settings_of_a_frameworks_variant_can_be_set(name: str, framework: str) -> None:
    found = re.findall(r"(\w+)=(\S+?)[;,]?(?:\s|$)", NOTES[name].frameworks[framework])
    types = parameter_types(ALGORITHMS[name])
    simple = {"true": True, "false": False, "null": None}
    params: dict[str, object] = dict(REQUIRED.get(name, {}))
    for key, text in found:
        if key in types:
            number = re.fullmatch(r"[\d.e+-]+", text)
            is_int = "Literal" in str(types[key])
            params[key] = simple[text] if text in simple else (int(text) if is_int else float(text)) if number else text
    configure(name, params)  # type: ignore[arg-type]
