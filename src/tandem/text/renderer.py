"""Chats to tokens through a tokenizer's chat template, only ever the new part.

The template writes text; what of that text is new is found by comparing renderings, and only the new text is encoded,
as a part of its own: tokens that exist are never made again. Tool calls are not parsed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tandem.errors import DataError, ModelError
from tandem.text.tokenizer import Tokenizer
from tandem.types import Json, Message, ToolCall

PLAIN_TEMPLATE = """\
{% for message in messages %}
{{- message['content'] }}{{ eos_token if message['role'] == 'assistant' }}
{%- endfor %}"""
"""For tiny models: contents one after the other, assistant turns ended by EOS, no headers."""

_TURN = "\ue000turn\ue000"  # stands for an assistant turn where what surrounds it is looked for


class TemplateRenderer:
    """Implements the Renderer port for any chat template that writes an assistant turn's content somewhere in its output.

    template: instead of the tokenizer's own. now: the clock of templates that write the date; give a fixed one where a
    run must render the same tokens tomorrow. Raises ModelError where there is no template or it is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, now: Callable[[], datetime] = datetime.now) -> None:
        source = template or tokenizer.template
        if source is None:
            raise ModelError(f"{tokenizer.origin} has no chat template: add chat_template.jinja to it or name a template")
        self._tokenizer = tokenizer
        self._template = _compile(source, now)
        self._stop_ids = tokenizer.stop_ids
        _, _, closing = self._render((Message("user", "x"), Message("assistant", _TURN)), header=False).rpartition(_TURN)
        written = next((token for token in self._encode(closing) if self._visible(token)), None)
        if written in tokenizer.special_ids:
            self._stop_ids = tuple(dict.fromkeys((*self._stop_ids, written)))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokenizer's stop ids and the special token with which the template ends an assistant turn."""
        return self._stop_ids

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> tuple[int, ...]:
        """See the port. Raises DataError where the template refuses the messages."""
        return self._tokenizer.encode(self._render(messages, tools))

    def following(
        self, history: Sequence[Message], new: Sequence[Message], *, closed: bool, tools: Sequence[Mapping[str, Json]] = ()
    ) -> tuple[int, ...] | None:
        """See the port.

        The template extends its rendering where, given everything, it writes (1) what it wrote before the turn, (2) the
        turn up to white space, (3) the text that it writes after any turn. Part (3) is what follows.
        """
        turn = history[-1]
        before = self._render(history[:-1], tools)
        whole = self._render((*history, *new), tools)
        _, found, after = self._render((*history[:-1], Message("assistant", _TURN), *new), tools).rpartition(_TURN)
        written = whole[len(before) : len(whole) - len(after)]
        if not (found and whole.startswith(before) and whole.endswith(after) and len(before) + len(after) <= len(whole)):
            return None
        content, written = _squeezed(turn.content), _squeezed(written)
        if content != written and not (turn.tool_calls and written.startswith(content)):
            return None
        tokens = self._encode(after)
        return tokens[self._closing(tokens) :] if closed else tokens

    def demonstration(self, messages: Sequence[Message], *, given: int = 0) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """See the port.

        Raises DataError where no turn is the assistant's, or the template writes one elsewhere than it would be sampled.
        """
        whole = self._render(messages, header=False)
        tokens: list[int] = []
        mask: list[bool] = []

        def append(text: str) -> None:
            """Adds what stands between assistant turns: only the stop id of the turn before it is imitated."""
            part = self._encode(text) if tokens else self._tokenizer.encode(text)
            closing = self._closing(part) if tokens else 0
            tokens.extend(part)
            mask.extend(position < closing for position in range(len(part)))

        cursor = 0
        for i, message in enumerate(messages):
            if message.role != "assistant" or i < given:
                continue
            before = self._render(messages[:i])
            marked = self._render((*messages[:i], Message("assistant", _TURN), *messages[i + 1 :]), header=False)
            _, found, after = marked.rpartition(_TURN)
            start, end = len(before), len(whole) - len(after)
            if not (found and whole.startswith(before) and whole.endswith(after) and cursor <= start <= end):
                raise DataError(
                    f"assistant turn {i} cannot be imitated: given the whole conversation, the chat template writes it otherwise "
                    "than after its own header; use a template that keeps earlier turns as they are, or one turn a conversation"
                )
            append(whole[cursor:start])
            imitated = self._encode(whole[start:end])
            tokens.extend(imitated)
            mask.extend([True] * len(imitated))
            cursor = end
        if not any(mask):
            raise DataError(f"a demonstration needs an assistant turn; the roles are {[message.role for message in messages]}")
        append(whole[cursor:])
        return tuple(tokens), tuple(mask)

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text, beginning=False)

    def _visible(self, token: int) -> bool:
        return bool(self._tokenizer.decode([token], skip_special=False).strip())

    def _closing(self, tokens: Sequence[int]) -> int:
        """How many leading tokens close an assistant turn: white space and a stop id, or none."""
        first = next((i for i, token in enumerate(tokens) if self._visible(token)), None)
        return first + 1 if first is not None and tokens[first] in self._stop_ids else 0

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = (), *, header: bool = True) -> str:
        try:
            return self._template.render(
                messages=[_for_template(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=header,
                **self._tokenizer.specials,
            )
        except jinja2.TemplateError as error:
            roles = [message.role for message in messages]
            raise DataError(f"the chat template of {self._tokenizer.origin} refuses a conversation of {roles}: {error}") from None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates know it; fields that are not there are left out."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [{"type": "function", "function": _call_for_template(call)} for call in message.tool_calls]
    return fields


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object where they are valid JSON: templates dump them themselves."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {"name": call.name, "arguments": arguments}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant turns in some templates; the mark writes nothing."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    """The environment in which Hugging Face templates are written to run."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    names = cast("dict[str, Any]", environment.globals)
    names["raise_exception"] = refuse
    names["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from None
