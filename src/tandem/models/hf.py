"""Hugging Face model directories of the families in ARCHITECTURES, read and written without transformers.

A directory is `config.json` beside `model.safetensors`, or beside shards named in `model.safetensors.index.json`. What
the decoder cannot compute exactly (other stretched rotary positions than Llama 3's, quantised weights, ...) is refused by name,
never approximated; of a model with a sliding window rows may be as long as the window, within which it attends to all.
Tokenizers and generation settings are not read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from tandem.durable import attempt
from tandem.errors import ModelError
from tandem.models.decoder import Decoder
from tandem.models.decoder_config import DecoderConfig, StretchedRope
from tandem.models.language_model import LanguageModel
from tandem.models.numerics import Activation
from tandem.models.values import VALUE_HEAD, ValueModel

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # SmolLM and SmolLM2 too
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_POSITIONS = {"llama": 2048, "gemma": 8192, "mistral": 131_072}  # defaults of transformers; of the others 32,768

# Fields with the only values that the decoder computes; a field that is absent is fine.
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_NUMBERS = ("head_dim", "rms_norm_eps", "rope_theta", "sliding_window")
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model in the directory `path` with float32 parameters and `dtype` as its compute dtype.

    Raises ModelError for a directory without config or weights, for an architecture or a feature that is not supported,
    in one message for all tensors that are missing, extra or of the wrong shape, and for a tensor that is not finite.
    """
    decoder = Decoder(read_config(path), dtype)
    load_weights(decoder, path)
    return decoder


def load_value_model(path: Path, dtype: torch.dtype = torch.float32) -> ValueModel:
    """A value model; of a language model it takes the body and leaves the output layer. Raises as `load_decoder` does."""
    model = ValueModel(read_config(path), dtype)
    load_weights(model, path)
    return model


def load_weights(decoder: LanguageModel, path: Path) -> None:
    """The tensors of the directory `path` into the parameters of `decoder`; a value head that is not there stays as it is.

    Raises ModelError as `load_decoder` does; for tensors that do not fit no parameter has changed then.
    """
    parameters = decoder.own_parameters()
    with torch.no_grad():
        for name, tensor in read_weights(decoder, path):
            parameters[name].copy_(tensor[...])
            check_finite(parameters[name], name, path)


def check_finite(tensor: Tensor, name: str, path: Path) -> None:
    """Raises ModelError for a weight of the model at `path` that has NaN or infinite numbers: nothing could be learned with it."""
    if wrong := int((~tensor.isfinite()).sum()):
        raise ModelError(
            f"{path}: {wrong:,} of the {tensor.numel():,} numbers of {name} are NaN or infinite; fetch or save the model again"
        )


def check_weights(decoder: LanguageModel, path: Path) -> None:
    """Raises ModelError where the directory `path` has not the tensors of `decoder`, which may be on the meta device."""
    parameters, places = decoder.own_parameters(), _weight_files(path)
    problems = [f"missing {name} {list(parameters[name].shape)}" for name in parameters.keys() - places.keys() - {VALUE_HEAD}]
    for file in sorted(set(places.values())):
        with _open(file) as tensors:
            for name in (name for name, place in places.items() if place == file):
                problems += _misfit(name, tensors, parameters)
    if not problems and "lm_head.weight" in decoder.tied and "lm_head.weight" in places:
        output, embedding = (_read(places[name], name) for name in ("lm_head.weight", decoder.tied["lm_head.weight"]))
        if not torch.equal(output, embedding):
            problems.append(f"extra lm_head.weight: it differs from the embedding that {CONFIG} ties it to")
    if problems:
        raise ModelError(f"{path} does not hold the tensors that its {CONFIG} describes:\n  " + "\n  ".join(sorted(problems)))


def check_values(decoder: LanguageModel, path: Path) -> None:
    """Raises ModelError as `check_weights` does, and for a tensor that is not finite; reads them one after the other."""
    for name, tensor in read_weights(decoder, path):
        check_finite(tensor[...], name, path)


def has_value_head(path: Path) -> bool:
    """Whether the directory `path` holds a model that gives values, and not one of language alone."""
    return VALUE_HEAD in _weight_files(path)


def read_weights(decoder: LanguageModel, path: Path) -> Iterator[tuple[str, Any]]:
    """Each weight of `decoder` that is in the directory `path`, as something to take a block of: `block[0:2]`, `block[...]`.

    Raises ModelError, before the first, as `check_weights` does.
    """
    check_weights(decoder, path)
    names, places = decoder.own_parameters().keys(), _weight_files(path)
    for file in sorted(set(places.values())):
        with _open(file) as tensors:
            for name in (name for name, place in places.items() if place == file and name in names):
                yield name, tensors.get_slice(name)


def save_decoder(decoder: Decoder, path: Path, eos_id: int | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Writes `config.json` and `model.safetensors` (of type `dtype`) into the directory `path`, for transformers and for
    `load_decoder`.

    A value model is one for `load_value_model`, and transformers' ForSequenceClassification with one label: it gives the
    value at the last token that is not `eos_id`, with which rows are padded.

    eos_id: the token with which transformers ends a generation. Raises ModelError for a shape that no supported
    architecture has, SnapshotError where the files cannot be written.
    """
    config = _written_config(decoder.config, eos_id) | {"dtype": str(dtype).removeprefix("torch.")}
    if isinstance(decoder, ValueModel):
        classifier = ARCHITECTURES[config["model_type"]].replace("ForCausalLM", "ForSequenceClassification")
        config |= {"architectures": [classifier], "id2label": {"0": "value"}, "label2id": {"value": 0}, "pad_token_id": eos_id}
    tensors = {name: weight.to(dtype).contiguous() for name, weight in decoder.weights().items()}
    with attempt(f"write the model to {path}", path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            safetensors.torch.save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (path / WEIGHTS).chmod(0o644)  # its writer leaves it to the owner alone
        (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------------- config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(
            f"cannot read {file}: {error.strerror}; a Hugging Face model directory is needed, which `tandem import` makes"
        ) from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return cast("dict[str, Any]", value)


def read_config(path: Path) -> DecoderConfig:
    """The shape of the model in the directory `path`. Raises ModelError where it is not one that the decoder computes."""
    file = path / CONFIG
    fields = _read_json(file)
    try:
        return _described(fields)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error


def _described(fields: Mapping[str, Any]) -> DecoderConfig:
    """Raises ValueError for what the decoder does not compute, and errors of other kinds for what is not what it should be."""
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} is not supported; {', '.join(ARCHITECTURES)} are. With "
            "model.library=transformers other models can be trained on a dataset"
        )
    problems = [f"{name} must be a number, got {fields[name]!r}" for name in _NUMBERS if not _is_number(fields.get(name, 1))]
    problems += [
        f"{name}={fields[name]!r} is not supported"
        for name, supported in _SUPPORTED.items()
        if fields.get(name, supported[0]) not in supported
    ]
    hidden_act = fields.get("hidden_activation") or fields.get("hidden_act") or ("gelu_pytorch_tanh" if kind == "gemma" else "silu")
    if not isinstance(hidden_act, str) or hidden_act not in _ACTIVATIONS:
        problems.append(f"hidden_act={hidden_act!r} is not supported, only {', '.join(_ACTIVATIONS)} are")
    # transformers 5 keeps everything about rotary positions in rope_parameters; before, it was spread over two fields.
    ropes: list[Any] = [fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    rope: Mapping[str, Any] = ropes[0] if ropes else {}
    if wrong := [other for other in ropes if not isinstance(other, Mapping)]:
        raise ValueError(f"rope_parameters and rope_scaling must be objects, got {wrong[0]!r}")
    if any(rope != other for other in ropes):
        problems.append(f"rope_parameters={ropes[0]} and rope_scaling={ropes[1]} say different things: keep the one that holds")
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "llama3"):
        problems.append(
            f"rope type {scaling!r} (in rope_parameters or rope_scaling) is not supported, only 'default' and 'llama3' are"
        )
    layers = cast("Sequence[str]", fields.get("layer_types") or ())
    if other := set(layers) - {"full_attention", "sliding_attention"}:
        problems.append(f"layer_types {sorted(other)} are not supported, only 'full_attention' and 'sliding_attention' are")
    defaults = {"num_key_value_heads": fields.get("num_attention_heads"), "max_position_embeddings": _POSITIONS.get(kind, 32_768)}
    sizes: dict[str, int] = {}
    for name in _SIZES:
        value = fields.get(name, defaults.get(name))
        if type(value) is int and value > 0:
            sizes[name] = value
        else:
            problems.append(f"{name} must be a positive integer, got {value!r}")
    if problems:
        raise ValueError("; ".join(problems))
    bias, width, heads = bool(fields.get("attention_bias")), sizes["hidden_size"], sizes["num_attention_heads"]
    positions, window = sizes["max_position_embeddings"], fields.get("sliding_window", 4096)
    slides = kind == "mistral" or bool(fields.get("use_sliding_window")) or "sliding_attention" in layers
    return DecoderConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=width,
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=fields.get("head_dim") or {"qwen3": 128, "gemma": 256}.get(kind, width // heads),
        rope_theta=rope.get("rope_theta") or fields.get("rope_theta") or (2e6 if kind == "smollm3" else 1e4),
        stretched=_stretched(rope, positions) if scaling == "llama3" else None,
        unrotated=_unrotated(fields, sizes["num_hidden_layers"]) if kind == "smollm3" else (),
        rms_eps=fields.get("rms_norm_eps", 1e-6),
        norm_offset=float(kind == "gemma"),
        activation=_ACTIVATIONS[hidden_act],
        embedding_scale=width**0.5 if kind == "gemma" else 1.0,
        tie_embeddings=bool(fields.get("tie_word_embeddings", kind in ("gemma", "smollm3"))),
        attention_bias=kind == "qwen2" or bias,
        output_bias=kind != "qwen2" and bias,
        mlp_bias=kind in ("llama", "smollm3") and bool(fields.get("mlp_bias")),
        qk_norm=kind == "qwen3",
        max_positions=min(positions, window) if slides and window is not None else positions,
    )


def _is_number(value: object) -> bool:
    return value is None or type(value) in (int, float)


def _unrotated(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    every, rotated = int(fields.get("no_rope_layer_interval", 4)), cast("Sequence[int] | None", fields.get("no_rope_layers"))
    return tuple(layer for layer in range(num_layers) if not (rotated[layer] if rotated is not None else (layer + 1) % every))


def _stretched(rope: Mapping[str, Any], positions: int) -> StretchedRope:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [name for name in names if type(rope.get(name)) not in (int, float)]:
        raise ValueError(f"rope type 'llama3' needs the numbers {', '.join(missing)} in rope_parameters")
    factor, low, high = (float(rope[name]) for name in names)
    return StretchedRope(factor, low, high, rope.get("original_max_position_embeddings", positions))


def family_of(c: DecoderConfig) -> str:
    """The model_type that has this shape. Raises ModelError where none has."""
    offset = c.norm_offset != 0 or c.activation != "silu" or c.embedding_scale != 1
    kind = "gemma" if offset else "smollm3" if c.unrotated else "qwen3" if c.qk_norm else ""
    kind = kind or ("qwen2" if c.attention_bias and not c.output_bias else "llama")
    gemma = (c.norm_offset, c.activation, c.embedding_scale) == (1.0, "gelu_tanh", c.hidden_size**0.5)
    problems = {
        "mlp_bias with qk_norm, as Gemma, or with biases on q, k and v alone": c.mlp_bias and kind not in ("llama", "smollm3"),
        "a bias on o and none on q, k and v, or the reverse": kind != "qwen2" and c.attention_bias != c.output_bias,
        "a hidden_size that is no multiple of num_heads": kind == "llama" and c.hidden_size % c.num_heads != 0,
        "one of norm_offset, activation and embedding_scale without the others": kind == "gemma" and not gemma,
        "qk_norm beside what Gemma and SmolLM3 have": kind in ("gemma", "smollm3") and c.qk_norm,
        "unrotated layers beside what Gemma has": kind == "gemma" and bool(c.unrotated),
        "unrotated layers in heads of another width": kind == "smollm3" and c.head_dim * c.num_heads != c.hidden_size,
    }
    if found := [name for name, there in problems.items() if there]:
        raise ModelError(f"none of {', '.join(ARCHITECTURES)} has {' and '.join(found)}, so that the model cannot be written: {c}")
    return kind


def _written_config(c: DecoderConfig, eos_id: int | None) -> dict[str, Any]:
    kind, rope = family_of(c), dict[str, Any]({"rope_type": "default", "rope_theta": c.rope_theta})
    if (stretched := c.stretched) is not None:
        rope |= {"rope_type": "llama3", "factor": stretched.factor, "low_freq_factor": stretched.low_factor}
        rope |= {"high_freq_factor": stretched.high_factor, "original_max_position_embeddings": stretched.original_positions}
    act = next(name for name, activation in _ACTIVATIONS.items() if activation == c.activation)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": act,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.rms_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": None,
    } | {
        "llama": {"attention_bias": c.attention_bias, "mlp_bias": c.mlp_bias},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": c.attention_bias},
        "gemma": {"hidden_activation": act, "attention_bias": c.attention_bias},
        "smollm3": {
            "use_sliding_window": False,
            "attention_bias": c.attention_bias,
            "mlp_bias": c.mlp_bias,
            "no_rope_layers": [int(layer not in c.unrotated) for layer in range(c.num_layers)],
        },
    }[kind]


# ------------------------------------------------------------------------------------------------------ tensors


def _weight_files(path: Path) -> dict[str, Path]:
    """Where each tensor of the directory is."""
    if (path / INDEX).exists():
        named: Any = _read_json(path / INDEX).get("weight_map")
        try:
            return {name: path / file for name, file in named.items()}
        except (AttributeError, TypeError):
            raise ModelError(
                f"{path / INDEX} has no weight_map, which says in what file each tensor is: fetch the model again"
            ) from None
    if not (path / WEIGHTS).exists():
        raise ModelError(f"{path} has neither {WEIGHTS} nor {INDEX}; other formats of weights are not read")
    with _open(path / WEIGHTS) as tensors:
        return dict.fromkeys(tensors.keys(), path / WEIGHTS)


def _open(file: Path) -> Any:
    """A safetensors file; the library is untyped."""
    try:
        return safetensors.safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {file}: {error}; fetch or save the model again") from error


def _read(file: Path, name: str) -> Tensor:
    with _open(file) as tensors:
        return tensors.get_tensor(name).float()


def _misfit(name: str, tensors: Any, parameters: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with a tensor of a file."""
    if name not in parameters:
        # Old checkpoints keep the frequencies, which follow from rope_theta; a tied output layer is compared by the caller.
        ignored = name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
        whose = ", the head of a value model, such as a reward model or a critic" if name == VALUE_HEAD else ""
        return [] if ignored else [f"extra {name}{whose}"]
    if name not in tensors.keys():  # noqa: SIM118 the library's file is no mapping
        return [f"missing {name}, which is not in the file that {INDEX} names"]
    view, want = tensors.get_slice(name), list(parameters[name].shape)
    if view.get_shape() != want:
        return [f"misshaped {name}: {view.get_shape()}, expected {want}"]
    if view.get_dtype() not in _FLOATS:
        return [f"{name} is of type {view.get_dtype()}, expected one of {', '.join(_FLOATS)}"]
    return []
