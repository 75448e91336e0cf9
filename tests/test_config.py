"""config: a recipe file and overrides become a typed value, or one error that names every problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import Resolved, dump, explain, leaves, load
from tandem.errors import ConfigError
from tandem.types import Json


@dataclass(frozen=True)
class Optimiser:
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if self.schedule == "linear" and self.warmup_steps > 100:
            raise ValueError(f"schedule={self.schedule} and warmup_steps={self.warmup_steps}: no more than 100 steps")
        if self.betas == (0, 0):
            raise ValueError("this does not train")


@dataclass(frozen=True)
class Algorithm:
    SHORTHAND: ClassVar[str] = "name"
    EXTRA: ClassVar[str] = "params"
    name: str = "grpo"
    params: dict[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True)
class Data:
    SHORTHAND: ClassVar[str] = "path"
    path: Path
    limit: int | None = None


@dataclass(frozen=True)
class Model:
    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Recipe:
    model: Model
    algorithm: Algorithm = Algorithm()
    train: Optimiser = Optimiser(lr=1e-3)
    data: tuple[Data, ...] = ()
    stop: tuple[str, ...] = ()
    warmup: Optimiser | None = None
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    info: dict[str, Json] = field(default_factory=dict[str, Json])
    name: str = "run"
    note: str | None = None
    seed: int = 0
    debug: bool = False


MINIMAL = "model: {path: m}\n"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resolved[Recipe]]:
    monkeypatch.chdir(tmp_path)

    def read(text: str, *overrides: str) -> Resolved[Recipe]:
        Path("r.yaml").write_text(text, encoding="utf-8")
        return load(Path("r.yaml"), overrides, Recipe)

    return read


@dataclass(frozen=True)
class Source:
    path: str | None = None
    limit: int = 0

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit must not be negative, got {self.limit}")
        if self.path is None:
            raise ValueError("give a path")


@dataclass(frozen=True)
class Sources:
    train: Source
    source: Source


def problems(read: Callable[..., Resolved[Recipe]], text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    header, *lines = str(caught.value).splitlines()
    assert header.startswith(f"{len(lines)} problem")
    return [line.strip() for line in lines]


# -------------------------------------------------------------------------------------------------------- values


def test_values_and_origins(read: Callable[..., Resolved[Recipe]]) -> None:
    resolved = read("model:\n  path: models/tiny\ntrain: {schedule: cosine}\nseed: 3\n", "train.lr=1e-3", "seed=4")
    assert resolved.value == Recipe(Model(Path("models/tiny")), train=Optimiser(1e-3, schedule="cosine"), seed=4)
    origins = {key: resolved.origins[key] for key in ("model.path", "model.dtype", "train.lr", "train.schedule", "seed", "name")}
    assert origins == {
        "model.path": "r.yaml:2",
        "model.dtype": "default",
        "train.lr": "command line: train.lr=1e-3",
        "train.schedule": "r.yaml:3",
        "seed": "command line: seed=4",
        "name": "default",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E+2", 100.0),
        ("2.5e2", 250.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("3", 3.0),
        (".inf", float("inf")),
        ("-1e-5", -1e-5),
    ],
)
def test_numbers_without_a_dot_are_numbers(read: Callable[..., Resolved[Recipe]], text: str, value: float) -> None:
    assert read(MINIMAL + f"weights: {{a: {text}}}\n").value.weights == {"a": value}
    assert read(MINIMAL, f"weights.a={text}").value.weights == {"a": value}


def test_yaml_1_1_traps_are_text(read: Callable[..., Resolved[Recipe]]) -> None:
    for text in ("no", "on", "2026-01-01", "1_000", "12:30:00", "=", "<<"):
        assert read(MINIMAL + f"name: {text}\n").value.name == text
    assert read(MINIMAL + "seed: 0o17\n").value.seed == 15
    assert read(MINIMAL + "seed: 017\n").value.seed == 17


def test_an_override_is_text_where_text_is_expected(read: Callable[..., Resolved[Recipe]]) -> None:
    overrides = ("name=007", "stop=[a, 'b: c']", "note=null", "model.path=3", "info.text=x: y", "debug=true")
    value = read(MINIMAL, *overrides).value
    assert (value.name, value.stop, value.note, value.model.path, value.debug) == ("007", ("a", "b: c"), None, Path("3"), True)
    assert value.info == {"text": {"x": "y"}}
    assert read(MINIMAL, "name=a: b").value.name == "a: b"
    assert read(MINIMAL, "name=[broken").value.name == "[broken"
    assert read(MINIMAL, "name=").value.name == ""
    assert read(MINIMAL, "name=a=b").value.name == "a=b"


def test_shorthand_and_extra(read: Callable[..., Resolved[Recipe]]) -> None:
    assert read(MINIMAL + "algorithm: gspo\n").value.algorithm == Algorithm("gspo")
    resolved = read(MINIMAL + "algorithm: gspo\n", "algorithm.clip_low=0.1", "algorithm.correction.name=icepop", "algorithm=dapo")
    assert resolved.value.algorithm == Algorithm("dapo", {"clip_low": 0.1, "correction": {"name": "icepop"}})
    assert resolved.origins["algorithm.clip_low"] == "command line: algorithm.clip_low=0.1"
    assert resolved.origins["algorithm.name"] == "command line: algorithm=dapo"
    for text in ("algorithm: {clip: 1}", "algorithm: {params: {clip: 1}}"):
        assert read(MINIMAL + text).value.algorithm.params == {"clip": 1}
        assert read(MINIMAL + text, "algorithm.params.clip=2").value.algorithm.params == {"clip": 2}
    assert read(MINIMAL + "data: [a.jsonl, {path: b.jsonl, limit: 5}]").value.data == (
        Data(Path("a.jsonl")),
        Data(Path("b.jsonl"), 5),
    )


def test_sections_that_may_be_none(read: Callable[..., Resolved[Recipe]]) -> None:
    assert read(MINIMAL + "warmup: null").value.warmup is None
    assert read(MINIMAL + "warmup: null", "warmup.lr=1").value.warmup == Optimiser(lr=1)
    assert read(MINIMAL + "warmup: {lr: 1, warmup_steps: 7}", "warmup=null", "warmup.lr=2").value.warmup == Optimiser(lr=2)
    assert read(MINIMAL + "warmup: {lr: 1}", "warmup=null").value.warmup is None


def test_unwritten_keys_of_a_section_keep_the_section_that_is_the_default(read: Callable[..., Resolved[Recipe]]) -> None:
    assert read(MINIMAL, "train.warmup_steps=5").value.train == Optimiser(lr=1e-3, warmup_steps=5)


def test_mappings_merge_and_lists_replace(read: Callable[..., Resolved[Recipe]]) -> None:
    text = MINIMAL + "info: {a: {x: 1, y: [1, 2]}, b: 1}\nstop: [a, b]\n"
    value = read(text, "info.a.x=2", "info.a.y=[3]", "info.c={z: null}", "stop=[c]").value
    assert value.info == {"a": {"x": 2, "y": [3]}, "b": 1, "c": {"z": None}}
    assert value.stop == ("c",)
    assert read(text, "info.b.q=1").value.info["b"] == {"q": 1}


def test_anchors_are_understood(read: Callable[..., Resolved[Recipe]]) -> None:
    value = read(MINIMAL + "train: &one {lr: 1}\nwarmup: *one\n").value
    assert value.train == value.warmup == Optimiser(lr=1)


# ------------------------------------------------------------------------------------------------------ problems


def test_every_problem_at_once(read: Callable[..., Resolved[Recipe]]) -> None:
    text = "\n".join(
        [
            "modle: {path: m}",
            "train:",
            "  lr: -1",
            "  schedule: cosin",
            "warmup:",
            "  lr: 0",
            "seed: '3'",
            "seed: 4",
            "stop: [a, 1]",
            "data: [{limit: 3}]",
            "name: 7",
            "lr: 1e-3",
        ]
    )
    found = problems(read, text, "train.betas=[0.9]", "algoritm=x", "noequals", "debug=yes")
    assert found == [
        "r.yaml:8: key 'seed' is given twice; first at r.yaml:7",
        "command line: noequals: an override is written KEY=VALUE with dots in the key, for example train.lr=1e-3",
        "r.yaml: model.path is required and has no default: a path",
        "command line: train.betas=[0.9]: train.betas: expected a list of 2 values, got [0.9] (a list)",
        "r.yaml:4: train.schedule: expected one of 'constant', 'linear', 'cosine', got cosin (text); did you mean 'cosine'?",
        "r.yaml:3: train: lr must be above 0, got -1.0",
        "r.yaml:10: data.0.path is required and has no default: a path",
        "r.yaml:9: stop.1: expected text, got 1 (an integer); put it in quotes",
        "r.yaml:6: warmup: lr must be above 0, got 0.0",
        "r.yaml:11: name: expected text, got 7 (an integer); put it in quotes",
        "r.yaml:7: seed: expected an integer, got '3' (text)",
        "command line: debug=yes: debug: expected true or false, got yes (text)",
        "r.yaml:1: unknown key 'modle'; did you mean 'model'?",
        "r.yaml:12: unknown key 'lr'; did you mean 'train.lr'?",
        "command line: algoritm=x: unknown key 'algoritm'; did you mean 'algorithm'?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: [1\nname: x\n", "r.yaml:2: not YAML: "),
        ("a: b: c\n", "r.yaml:1: not YAML: mapping values are not allowed here"),
        ("seed: 1\n---\nseed: 2\n", "r.yaml:2: not YAML: "),
        ("a: \x00\n", "r.yaml: not YAML: "),
        ("- 1\n", "r.yaml:1: a recipe is a section with the keys model, algorithm, "),
        ("just text\n", "r.yaml:1: a recipe is a section with the keys model, algorithm, "),
        (
            MINIMAL + "train: 3\n",
            "r.yaml:2: train is a section with the keys lr, betas, schedule, warmup_steps; got 3 (an integer)",
        ),
        (MINIMAL + "train:\n", "r.yaml:2: train is a section with the keys lr, betas, schedule, warmup_steps; got nothing"),
        (MINIMAL + "stop: a\n", "r.yaml:2: stop: expected a list, each entry text, got a (text)"),
        (MINIMAL + "info: 3\n", "r.yaml:2: info: expected a mapping, got 3 (an integer)"),
        (MINIMAL + "seed: 3.0\n", "r.yaml:2: seed: expected an integer, got 3.0 (a number)"),
        (MINIMAL + "seed: true\n", "r.yaml:2: seed: expected an integer, got true (true or false)"),
        (MINIMAL + "seed:\n  x: 1\n", "r.yaml:2: seed: expected an integer, got {x: 1} (a mapping)"),
        (MINIMAL + "weights: {a: .nan}\n", "r.yaml:2: weights.a: expected a number, got .nan (text)"),
        (MINIMAL + "weights: {a: x}\n", "r.yaml:2: weights.a: expected a number, got x (text)"),
        (MINIMAL + "info: &a {b: *a}\n", "r.yaml:2: this alias contains itself"),
        (MINIMAL + "info: {[1]: 2}\n", "r.yaml:2: a key must be a plain word"),
        (
            MINIMAL + "name: !!python/object:os.system 3\n",
            "r.yaml:2: tag:yaml.org,2002:python/object:os.system '3' is not understood",
        ),
        ("a: " + "[" * 2000 + "]" * 2000, "r.yaml: not YAML: its lists and sections are nested too deeply"),
        (MINIMAL + "seed: " + "9" * 5000, "r.yaml:2: the integer 999999999999... has more than 4300 digits"),
        (MINIMAL + "name: !!int x\n", "r.yaml:2: tag:yaml.org,2002:int 'x' is not understood"),
        (MINIMAL + "algorithm: {params: {name: x}}\n", "r.yaml:2: algorithm.name is a key of its own; take it out of"),
        (MINIMAL + "algorithm: {params: 3}\n", "r.yaml:2: algorithm: expected a mapping, got 3 (an integer)"),
        (MINIMAL + "qqqqqq: 1\n", "r.yaml:2: unknown key 'qqqqqq'; a recipe has model, algorithm, train, data, stop"),
        (MINIMAL + "train: {qqqqqq: 1}\n", "r.yaml:2: unknown key 'train.qqqqqq'; train has lr, betas, schedule, warmup_steps"),
    ],
)
def test_one_problem(read: Callable[..., Resolved[Recipe]], text: str, problem: str) -> None:
    (found,) = problems(read, text)
    assert found.startswith(problem)


def test_a_section_reports_each_of_its_own_checks_once(read: Callable[..., Resolved[Recipe]]) -> None:
    def train(*overrides: str) -> list[str]:
        return [line.partition("train: ")[2] for line in problems(read, MINIMAL, *overrides)]

    assert train("train.lr=0", "train.warmup_steps=-1") == [
        "lr must be above 0, got 0.0",
        "warmup_steps must not be negative, got -1",
    ]
    assert train("train.schedule=linear", "train.warmup_steps=101") == [
        "schedule=linear and warmup_steps=101: no more than 100 steps"
    ]
    assert train("train.betas=[0,0]") == ["this does not train"]
    assert train("train.betas=[0,0]", "train.lr=0") == ["lr must be above 0, got 0.0"]
    assert train("train.betas=[0,0]", "train.rl=0") == [""]  # the unknown key alone: the check may follow from it


@pytest.mark.parametrize("text", ["novalue", "=3", "a..b=3", ".a=3", " a=3", "a b=3"])
def test_malformed_overrides(read: Callable[..., Resolved[Recipe]], text: str) -> None:
    (found,) = problems(read, MINIMAL, text)
    assert found.startswith(f"command line: {text}: an override is written KEY=VALUE".strip())


def test_files_that_cannot_be_read_do_not_hide_the_overrides(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    for name, reason in (("none.yaml", "No such file"), (".", "Is a directory"), ("latin.yaml", "is not UTF-8 text (byte 6)")):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / name, ["trian.lr=3", "seed=x"], Recipe)
        _, *lines = str(caught.value).splitlines()
        assert len(lines) == 3
        assert reason in lines[0]
        assert "did you mean 'train'?" in lines[2]


def test_a_file_that_cannot_be_read_is_the_only_problem(tmp_path: Path) -> None:
    """A check of a section that the file may have satisfied is not failed by nothing at all."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "none.yaml", ["source.path=x"], Sources)
    assert str(caught.value).splitlines()[1:] == [f"  {tmp_path / 'none.yaml'}: cannot be read: No such file or directory"]
    with pytest.raises(ConfigError, match="limit must not be negative"):
        load(tmp_path / "none.yaml", ["source.limit=-1"], Sources)


def test_an_empty_file_is_an_empty_recipe(read: Callable[..., Resolved[Recipe]]) -> None:
    for text in ("", "# nothing\n", "---\n"):
        assert read(text, "model.path=m").value == Recipe(Model(Path("m")))
        assert problems(read, text) == ["r.yaml: model.path is required and has no default: a path"]


# --------------------------------------------------------------------------------------------------------- output


def test_explain_shows_each_leaf_with_its_origin(read: Callable[..., Resolved[Recipe]]) -> None:
    lines = explain(read(MINIMAL + "algorithm: {clip: 0.2}\ndata: [a.jsonl]\n", "train.lr=1e-05"))
    rows = [tuple(part.strip() for part in line.split("  ") if part.strip()) for line in lines]
    assert rows == [
        ("model.path", "m", "r.yaml:1"),
        ("model.dtype", "float32", "default"),
        ("algorithm.name", "grpo", "default"),
        ("algorithm.clip", "0.2", "r.yaml:2"),
        ("train.lr", "1e-05", "command line: train.lr=1e-05"),
        ("train.betas", "[0.9, 0.95]", "default"),
        ("train.schedule", "constant", "default"),
        ("train.warmup_steps", "0", "default"),
        ("data.0.path", "a.jsonl", "r.yaml:3"),
        ("data.0.limit", "null", "default"),
        ("stop", "[]", "default"),
        ("warmup", "null", "default"),
        ("weights", "{}", "default"),
        ("info", "{}", "default"),
        ("name", "run", "default"),
        ("note", "null", "default"),
        ("seed", "0", "default"),
        ("debug", "false", "default"),
    ]


def test_leaves_of_a_schema() -> None:
    assert leaves(Recipe) == (
        *("model.path", "model.dtype", "algorithm.name", "algorithm.*"),
        *("train.lr", "train.betas", "train.schedule", "train.warmup_steps", "data.*.path", "data.*.limit", "stop"),
        *("warmup.lr", "warmup.betas", "warmup.schedule", "warmup.warmup_steps"),
        *("weights.*", "info.*", "name", "note", "seed", "debug"),
    )


_words = st.text(max_size=12).filter(lambda text: "\ud800" not in text)
_keys = st.text(min_size=1, max_size=6)
_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=6,
)


@given(
    name=_words | st.sampled_from(["1e-3", "null", "true", "~", "", ".inf", "0x1", "no", "- a", "a: b", "#"]),
    lr=st.floats(min_value=1e-30, max_value=1e30),
    stop=st.lists(_words, max_size=3).map(tuple),
    info=st.dictionaries(_keys, _json, max_size=3),
    params=st.dictionaries(_keys.filter(lambda key: key not in ("name", "params")), _json, max_size=3),
)
def test_dump_round_trips(
    name: str,
    lr: float,
    stop: tuple[str, ...],
    info: dict[str, Any],
    params: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    recipe = Recipe(
        Model(Path("m")), Algorithm("gspo", params), Optimiser(lr), (Data(Path("a"), 2),), stop, Optimiser(), name=name, info=info
    )
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(Resolved(recipe, {})), encoding="utf-8")
    assert load(path, [], Recipe).value == recipe
