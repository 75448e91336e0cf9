"""A renderer without a tokenizer or a template: a token a character, one token for each header, one that ends a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.errors import DataError
from tandem.types import Json, Message, Role

_HEADERS: dict[Role, int] = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
_FIRST = 5  # character c is token _FIRST + ord(c)


class FakeRenderer:
    """Implements the Renderer port for ASCII text.

    extends: False imitates a template that rewrites history, so that `following` is always None.
    """

    END = 0
    vocab_size = _FIRST + 128

    def __init__(self, *, extends: bool = True) -> None:
        self._extends = extends

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self.END,)

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> tuple[int, ...]:
        return (*(token for message in messages for token in self._turn(message)), _HEADERS["assistant"])

    def following(
        self, history: Sequence[Message], new: Sequence[Message], *, closed: bool, tools: Sequence[Mapping[str, Json]] = ()
    ) -> tuple[int, ...] | None:
        if not self._extends:
            return None
        return (*(() if closed else (self.END,)), *self.opening(new))

    def demonstration(self, messages: Sequence[Message], *, given: int = 0) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        tokens: list[int] = []
        mask: list[bool] = []
        for i, message in enumerate(messages):
            turn = self._turn(message)
            tokens += turn
            mask += [False, *([message.role == "assistant" and i >= given] * (len(turn) - 1))]
        if not any(mask):
            raise DataError(f"a demonstration needs an assistant turn; the roles are {[message.role for message in messages]}")
        return tuple(tokens), tuple(mask)

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token - _FIRST) for token in tokens if token >= _FIRST)

    def _turn(self, message: Message) -> tuple[int, ...]:
        return (_HEADERS[message.role], *(_FIRST + ord(character) for character in message.content), self.END)
