import json
from pathlib import Path

import pytest

from tandem.assemble.tasks import build_dataset, notes, overlaps
from tandem.data.builtin import Demonstrations
from tandem.data.curriculum import CurriculumConfig
from tandem.recipe import DatasetSection, SourceSection
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import character_tokenizer
from tandem.types import Message

RENDERER = TemplateRenderer(character_tokenizer("0123456789+-=x", template=PLAIN_TEMPLATE))


def written(path: Path, *prompts: str) -> Path:
    rows = [{"prompt": prompt, "completion": "7" * len(prompt), "chosen": None, "rejected": None} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sources_are_mixed_by_weight_or_put_one_after_the_other(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a.jsonl", "1", "2", "3"), written(tmp_path / "b.jsonl", "4")
    for weights, length in (((None, None), 4), ((1.0, 1.0), 6)):
        sources = (SourceSection(path=a, weight=weights[0]), SourceSection(path=b, weight=weights[1]))
        dataset = build_dataset(DatasetSection(sources=sources), "train", 0, RENDERER)
        assert len(dataset) == length
    mixed = DatasetSection(sources=(SourceSection(path=b), SourceSection(task="arithmetic", size=5)))
    assert len(build_dataset(mixed, "train", 0, RENDERER)) == 6


def test_a_curriculum_comes_before_the_limit_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rates = {"1": 0.5, "2": 0.75, "3+3": 0.6, "4": 0.0}
    path.write_text("".join(json.dumps({"prompt": prompt, "pass_rate": rate}) + "\n" for prompt, rate in rates.items()))
    short = len(RENDERER.opening((Message("user", "1"),)))
    section = DatasetSection(path=path, curriculum=CurriculumConfig(least=0.1, easy_first=True), max_tokens=short)
    dataset = build_dataset(section, "train", 0, RENDERER)
    assert [dataset[i].messages[0].content for i in range(len(dataset))] == ["2", "1"]
    assert notes(dataset) == (
        "1 of 4 tasks of a have no pass rate from 0.1 to 1 and are left out",
        f"1 of 3 tasks of a have more than max_tokens={short} tokens and are left out",
    )
    assert not section.shuffled
    assert DatasetSection(path=path, curriculum=CurriculumConfig()).shuffled


def test_what_is_too_long_depends_on_what_is_trained_on(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", "1", "1+1", "1+1+1")
    opening = [
        len(RENDERER.opening(build_dataset(DatasetSection(path=path), "train", 0, RENDERER)[i].asked().messages)) for i in range(3)
    ]
    section = DatasetSection(path=path, max_tokens=opening[1])
    asked = build_dataset(section, "train", 0, RENDERER)
    assert len(asked) == 2
    assert notes(asked, None) == (f"1 of 3 tasks of a have more than max_tokens={opening[1]} tokens and are left out",)
    imitated = build_dataset(section, "train", 0, RENDERER, "demonstrations")
    assert len(imitated) == 1  # the completion counts too
    assert notes(build_dataset(DatasetSection(path=path), "train", 0, RENDERER)) == ()


def test_held_out_tasks_that_are_trained_on_are_told_with_where(tmp_path: Path) -> None:
    files = {name: written(tmp_path / f"{name}.jsonl", *prompts) for name, prompts in (("a", "123"), ("b", "34"), ("c", "5"))}
    a, b, c = (build_dataset(DatasetSection(path=path), "train", 0, RENDERER) for path in files.values())
    known = "what is measured on them may be remembered; take them out of one of the two"
    found = overlaps({"data.train": a, "warmup.data": c}, [b])
    assert found == [f"1 of 2 held-out prompts are in data.train too, e.g. 3: {known}"]
    found = overlaps({"data.train": c, "warmup.data": b}, [a, c])
    assert [said.partition(":")[0] for said in found] == [
        "1 of 1 held-out prompts are in data.train too, e.g. 5",
        "1 of 3 held-out prompts are in warmup.data too, e.g. 3",
    ]
    assert overlaps({"data.train": a}, []) == []


def test_built_in_splits_are_not_drawn_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    train = build_dataset(DatasetSection(task="sorting", size=4), "train", 0, RENDERER, "demonstrations")
    heldout = build_dataset(DatasetSection(task="sorting", size=4), "heldout", 0, RENDERER)
    monkeypatch.setattr(Demonstrations, "__getitem__", lambda *_: pytest.fail("a demonstration was drawn"))
    assert overlaps({"warmup.data": train}, [heldout]) == []
