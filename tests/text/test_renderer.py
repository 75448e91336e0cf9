from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.errors import DataError, ModelError
from tandem.text.renderer import PLAIN_TEMPLATE, TemplateRenderer
from tandem.text.tokenizer import character_tokenizer
from tandem.types import Message, ToolCall
from tests.text.chats import STYLES, THINKING, chatml, llama3, smollm2

CHATS: dict[str, tuple[Message, ...]] = {
    "one turn": (Message("user", "Hi é中\n\n  there"),),
    "with system": (Message("system", "S"), Message("user", "U")),
    "many turns": (
        Message("system", "S"),
        Message("user", "U"),
        Message("assistant", "answ"),
        Message("tool", "t;"),
        Message("assistant", "ans"),
        Message("user", "V"),
    ),
}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


def as_theirs(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.mark.parametrize("style", STYLES)
def test_openings_equal_those_of_transformers(style: str, tmp_path: Path) -> None:
    renderer = TemplateRenderer(STYLES[style](tmp_path))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    for messages in CHATS.values():
        if style == "plain":
            messages = tuple(Message(m.role, m.content.encode("ascii", "ignore").decode()) for m in messages)
        expected = theirs.apply_chat_template(as_theirs(messages), add_generation_prompt=True, return_dict=False)
        assert list(renderer.opening(messages)) == expected
        tokens, _ = renderer.demonstration((*messages, Message("assistant", "ok")))
        whole = [*as_theirs(messages), {"role": "assistant", "content": "ok"}]
        # As text only: what is sampled after a header is never merged with it, here either.
        assert theirs.decode(tokens) == theirs.apply_chat_template(whole, tokenize=False)


def test_tools_and_calls_are_rendered_as_by_transformers(tmp_path: Path) -> None:
    renderer = TemplateRenderer(chatml(tmp_path))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    calls = (ToolCall("add", '{"a": 1}'), ToolCall("say", "not json"))
    messages = (Message("user", "U"), Message("assistant", "", calls), Message("tool", "3", name="add"))
    rendered = [
        {"role": "user", "content": "U"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"type": "function", "function": {"name": "say", "arguments": "not json"}},
            ],
        },
        {"role": "tool", "content": "3", "name": "add"},
    ]
    expected = theirs.apply_chat_template(rendered, tools=list(TOOLS), add_generation_prompt=True, return_dict=False)
    assert list(renderer.opening(messages, TOOLS)) == expected
    following = renderer.following(messages[:2], messages[2:], closed=True, tools=TOOLS)
    assert following is not None
    assert renderer.text(following) == "\ntool\n3\nassistant\n"  # the call is not written again


def test_smollm2_introduces_itself_where_nobody_else_does(tmp_path: Path) -> None:
    """The real template, and what it writes."""
    renderer = TemplateRenderer(smollm2(tmp_path))
    said = renderer.text(renderer.opening((Message("user", "Hi"),)))
    introduction = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
    assert said == f"{introduction}user\nHi\nassistant\n"
    assert renderer.text(renderer.opening((Message("system", "S"), Message("user", "Hi")))) == "system\nS\nuser\nHi\nassistant\n"


@pytest.mark.parametrize("style", STYLES)
def test_streams_never_change_what_exists(style: str, tmp_path: Path) -> None:
    """Three turns: the text of opening + sampled + following + ... is the template's own, whitespace apart."""
    renderer = TemplateRenderer(STYLES[style](tmp_path))
    history: tuple[Message, ...] = (Message("user", "U"),)
    stream = renderer.opening(history)
    for turn in ("answ\n", " ans", ""):
        history = (*history, Message("assistant", turn))
        sampled = renderer._tokenizer.encode(turn)
        following = renderer.following(history, (Message("tool", "t;"),), closed=False)
        assert following is not None
        stream = (*stream, *sampled, *following)
        history = (*history, Message("tool", "t;"))
        text = renderer._tokenizer.decode(stream, skip_special=False)
        whole = renderer._tokenizer.decode(renderer.opening(history), skip_special=False)
        assert "".join(text.split()) == "".join(whole.split())


def test_a_turn_is_closed_once_whatever_its_stop_id(tmp_path: Path) -> None:
    renderer = TemplateRenderer(llama3(tmp_path))
    tokenizer = renderer._tokenizer
    history = (Message("user", "U"), Message("assistant", "ans"))
    closed = renderer.following(history, (Message("user", "V"),), closed=True)
    still_open = renderer.following(history, (Message("user", "V"),), closed=False)
    assert closed is not None
    assert still_open is not None
    assert tokenizer.decode(closed, skip_special=False).startswith("<|start_header_id|>user")
    assert tokenizer.decode(still_open, skip_special=False).startswith("<|eot_id|><|start_header_id|>user")


def test_a_space_before_the_closing_token_belongs_to_the_closing() -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} {{ eos_token }}{% endif %}{% endfor %}"
    tokenizer = character_tokenizer("ab ;", template=template)
    renderer = TemplateRenderer(tokenizer)
    history = (Message("user", "a"), Message("assistant", "b"))
    assert renderer.following(history, (Message("tool", ";"),), closed=True) == tokenizer.encode(";")
    tokens, mask = renderer.demonstration((*history, Message("tool", ";"), Message("assistant", "b")))
    assert tokens == tokenizer.encode("ab <eos>;b <eos>")
    assert mask == (False, True, True, True, False, True, True, True)


def test_a_template_that_closes_with_nothing_writes_nothing_twice() -> None:
    tokenizer = character_tokenizer("ab;", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    renderer = TemplateRenderer(tokenizer)
    history = (Message("user", "a"), Message("assistant", "b"))
    assert renderer.stop_ids == (tokenizer.eos_id,)
    for closed in (True, False):
        assert renderer.following(history, (Message("tool", ";"),), closed=closed) == tokenizer.encode(";")


def test_stop_ids_hold_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    tokenizer = chatml(tmp_path)
    names = [tokenizer.decode([i], skip_special=False) for i in TemplateRenderer(tokenizer).stop_ids]
    assert names == ["<|endoftext|>", "<|im_end|>"]


def test_a_template_that_strips_earlier_thinking_branches(tmp_path: Path) -> None:
    renderer = TemplateRenderer(chatml(tmp_path), THINKING)
    ask, reply = (Message("user", "U"),), (Message("user", "V"),)
    assert renderer.following((*ask, Message("assistant", "answ")), reply, closed=True) is not None
    assert renderer.following((*ask, Message("assistant", "<think>a</think>answ")), reply, closed=True) is None
    thought_before = (*ask, Message("assistant", "<think>a</think>answ"), *reply, Message("assistant", "ans"))
    assert renderer.following(thought_before, reply, closed=True) is not None  # the stream branched there already


def test_a_template_that_rewrites_what_came_before_branches() -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    renderer = TemplateRenderer(character_tokenizer("abc0123456789"), template)
    assert renderer.following((Message("user", "a"), Message("assistant", "b")), (Message("user", "c"),), closed=True) is None


def test_a_template_that_leaves_the_assistant_out_branches() -> None:
    renderer = TemplateRenderer(character_tokenizer("abc"), "{{ messages[-1].content if messages[-1].role == 'user' }}")
    assert renderer.following((Message("user", "a"), Message("assistant", "b")), (Message("user", "c"),), closed=True) is None


def test_a_demonstration_that_the_template_writes_otherwise_is_refused(tmp_path: Path) -> None:
    thinks = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    renderer = TemplateRenderer(chatml(tmp_path), thinks)
    with pytest.raises(DataError, match="assistant turn 1 cannot be imitated"):
        renderer.demonstration((Message("user", "a"), Message("assistant", "b")))


def test_demonstrations_imitate_rendered_calls(tmp_path: Path) -> None:
    renderer = TemplateRenderer(chatml(tmp_path))
    call = Message("assistant", "ans", (ToolCall("add", '{"a": 1}'),))
    tokens, mask = renderer.demonstration((Message("user", "U"), call))
    imitated = [token for token, chosen in zip(tokens, mask, strict=True) if chosen]
    assert renderer.text(imitated) == 'ans<call>{"name": "add", "arguments": {"a": 1}}</call>'


def test_the_clock_of_a_template_can_be_fixed(tmp_path: Path) -> None:
    renderer = TemplateRenderer(llama3(tmp_path), now=lambda: datetime(2024, 7, 26))
    assert "Today Date: 26 Jul 2024" in renderer.text(renderer.opening((Message("user", "U"),)))


def test_marks_and_loop_controls_of_hugging_face_templates_are_understood() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = character_tokenizer("ab;s")
    tokens, _ = TemplateRenderer(tokenizer, template).demonstration(
        (Message("system", "s"), Message("user", "a"), Message("assistant", "b"))
    )
    assert tokens == tokenizer.encode("ab<eos>")


def test_bad_templates_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no chat template: add chat_template\.jinja"):
        TemplateRenderer(character_tokenizer("12"))
    with pytest.raises(ModelError, match="not valid Jinja, line 2"):
        TemplateRenderer(character_tokenizer("12"), "\n{% if %}")
    renderer = TemplateRenderer(llama3(tmp_path))
    with pytest.raises(DataError, match=r"refuses a conversation of \['tool'\]: a conversation cannot begin with a tool"):
        renderer.opening((Message("tool", "x"),))
    with pytest.raises(DataError, match="unsafe"):
        TemplateRenderer(character_tokenizer("12"), "{{ messages.__class__.__mro__ }}")


def test_plain_template_is_contents_and_eos() -> None:
    tokenizer = character_tokenizer("77*9<>;0", template=PLAIN_TEMPLATE)
    messages = (Message("user", "7*9"), Message("assistant", "<7*9>"), Message("tool", "70;"), Message("assistant", "70"))
    tokens, mask = TemplateRenderer(tokenizer).demonstration(messages)
    assert tokens == tokenizer.encode("7*9<7*9><eos>70;70<eos>")
    assert mask == (*([False] * 3), *([True] * 6), *([False] * 3), *([True] * 3))
