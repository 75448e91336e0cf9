import pytest

from tandem.text.fake import FakeRenderer
from tandem.types import Message

HISTORY = (Message("user", "ab"), Message("assistant", "c"))


def test_tokens_are_headers_characters_and_ends() -> None:
    renderer = FakeRenderer()
    assert renderer.opening(HISTORY[:1]) == (2, 5 + ord("a"), 5 + ord("b"), 0, 3)
    assert max(renderer.opening((Message("user", "\x7f"),))) < renderer.vocab_size


@pytest.mark.parametrize("closed", [True, False])
def test_it_can_imitate_a_template_that_rewrites_history(closed: bool) -> None:
    assert FakeRenderer(extends=False).following(HISTORY, (Message("user", "d"),), closed=closed) is None
