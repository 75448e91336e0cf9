"""What every Renderer promises, for each style of template and for the fake."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.errors import DataError
from tandem.ports import Renderer
from tandem.text.fake import FakeRenderer
from tandem.text.renderer import TemplateRenderer
from tandem.types import Message
from tests.text.chats import STYLES

Make = Callable[[Path], Renderer]
RENDERERS: dict[str, Make] = {
    "fake": lambda _: FakeRenderer(),
    **{style: lambda path, make=make: TemplateRenderer(make(path)) for style, make in STYLES.items()},
}

ASK = (Message("system", "Add."), Message("user", "2+2"))
TURN = Message("assistant", "<2+2>")
TOLD = (Message("tool", "4;"),)
ANSWER = Message("assistant", "answ 4")


@pytest.fixture(params=RENDERERS)
def renderer(request: pytest.FixtureRequest, tmp_path: Path) -> Renderer:
    return RENDERERS[request.param](tmp_path)


def runs(mask: tuple[bool, ...]) -> list[tuple[int, int]]:
    """Start and end of each run of true."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_an_opening_holds_the_conversation_and_is_repeatable(renderer: Renderer) -> None:
    opening = renderer.opening(ASK)
    assert opening == renderer.opening(ASK)
    assert "Add." in renderer.text(opening)
    assert "2+2" in renderer.text(opening)


def test_stop_ids_exist_and_are_not_text(renderer: Renderer) -> None:
    assert renderer.stop_ids
    assert renderer.text(renderer.stop_ids) == ""


def test_what_follows_a_closed_turn_leaves_out_only_its_stop_id(renderer: Renderer) -> None:
    closed = renderer.following((*ASK, TURN), TOLD, closed=True)
    still_open = renderer.following((*ASK, TURN), TOLD, closed=False)
    assert closed is not None
    assert still_open is not None
    assert still_open[0] in renderer.stop_ids
    assert still_open[1:] == closed


def test_turn_by_turn_equals_the_demonstration_of_the_whole(renderer: Renderer) -> None:
    """What a rollout feeds and what supervised training sees are the same tokens, in the same places."""
    tokens, mask = renderer.demonstration((*ASK, TURN, *TOLD, ANSWER))
    assert len(tokens) == len(mask)
    (first, first_end), (second, second_end) = runs(mask)
    assert tokens[first_end - 1] in renderer.stop_ids
    assert tokens[second_end - 1] in renderer.stop_ids
    assert renderer.text(tokens[first:first_end]) == TURN.content
    assert renderer.text(tokens[second:second_end]) == ANSWER.content
    assert tokens[:first] == renderer.opening(ASK)
    assert tokens[first_end:second] == renderer.following((*ASK, TURN), TOLD, closed=True)


def test_no_system_or_user_or_tool_token_is_imitated(renderer: Renderer) -> None:
    tokens, mask = renderer.demonstration((*ASK, TURN, *TOLD, ANSWER))
    rest = renderer.text([token for token, imitated in zip(tokens, mask, strict=True) if not imitated])
    assert "2+2" in rest
    assert "4;" in rest
    assert "answ" not in rest
    assert "<2+2>" not in rest


def test_what_is_given_is_not_imitated(renderer: Renderer) -> None:
    conversation = (*ASK, TURN, *TOLD, ANSWER)
    tokens, mask = renderer.demonstration(conversation)
    same, later = renderer.demonstration(conversation, given=len(conversation) - 1)
    assert renderer.text(same) == renderer.text(tokens)
    assert [same[i] for i in range(len(same)) if later[i]] == [tokens[i] for i in range(*runs(mask)[1])]
    assert len(runs(later)) == 1
    with pytest.raises(DataError, match="needs an assistant turn"):
        renderer.demonstration(conversation, given=len(conversation))


def test_a_demonstration_without_an_assistant_turn_is_refused(renderer: Renderer) -> None:
    with pytest.raises(DataError, match="needs an assistant turn"):
        renderer.demonstration(ASK)
