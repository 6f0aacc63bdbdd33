"""Chats as text, by a chat template, and where in it the assistant speaks.

`{% generation %}` in the template says that. Without it an assistant's turn is what the template adds for the message, behind
what it writes to prompt for one (`add_generation_prompt`): that is told only where the text up to each message is how the text
of the whole chat begins.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

_MARKS = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_ASSISTANT = "assistant"
_REMEDY = "put {% generation %} and {% endgeneration %} around it, in a file that `template` names"
Spans = Sequence[tuple[int, int]]
"""Parts [begin, end) of a text, or of its tokens, in order."""
Messages = list[dict[str, Any]]
Render = Callable[..., tuple[str, Spans]]


class Written(NamedTuple):
    """A text, and the parts of it that are to be learned; None: not asked for."""

    text: str
    spans: Spans | None


class ChatWriter:
    """Writes chats by one template. Any number of threads."""

    def __init__(self, template: str, special_tokens: Mapping[str, Any]) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render_all: Any = render_jinja_template
        self._template, self._special_tokens = template, special_tokens
        self._has_marks = _MARKS.search(template) is not None
        self._lock = threading.Lock()  # earlier versions of transformers keep the marks of a call in the template

    def write(self, chat: Any, prompt: Any = None, tools: Any = None, *, marks: bool) -> Written:
        """The text of a chat, which may have its first messages apart, as `prompt`, and `tools` that the assistant may call;
        with `marks` what the assistant says behind them. Raises ValueError where that cannot be told, and what the template
        raises."""
        before = [] if prompt is None else _checked(prompt)
        messages = [*before, *_checked(chat)]
        if not messages:
            raise ValueError("it has no message")
        render = partial(self._render, tools=_checked_tools(tools))
        if not marks:
            return Written(render(messages)[0], None)
        if not self._has_marks:
            text = render(messages)[0]
            return Written(text, _turns(render, messages, len(before), text))
        text, spans = render(messages, return_assistant_tokens_mask=True)
        begin = _length_before(render, messages, len(before), text) if before else 0
        return Written(text, [span for span in spans if span[0] >= begin])

    def _render(self, messages: Messages, *, tools: list[Any] | None, **how: bool) -> tuple[str, Spans]:
        given = {"tools": tools, "chat_template": self._template, **how, **self._special_tokens}
        with self._lock:
            texts, spans = self._render_all([messages], **given)
        text: str = texts[0]
        found: Spans = spans[0] if spans else []
        return text, found


def _turns(render: Render, messages: Messages, num_before: int, text: str) -> Spans:
    """What the template writes for each of the assistant's messages."""
    spans = []
    for number, message in enumerate(messages):
        if number < num_before or message.get("role") != _ASSISTANT:
            continue
        begin = _length_before(render, messages, number, text)
        is_last = number + 1 == len(messages)
        until = text if is_last else render(messages[: number + 1])[0]
        if len(until) < begin or not text.startswith(until):
            raise ValueError(_untold(number, "writes it in another way when more messages follow"))
        content = message.get("content")
        is_prompted = begin > len(render(messages[:number])[0])
        if not is_prompted and not until[begin:].lstrip().startswith(str(content or "").strip()):
            raise ValueError(_untold(number, "writes something before it that it does not prompt for"))
        spans.append((begin, len(until)))
    return spans


def _length_before(render: Render, messages: Messages, number: int, text: str) -> int:
    """The characters before what a message adds."""
    try:
        before = render(messages[:number], add_generation_prompt=True)[0]
    except Exception as error:
        raise ValueError(_untold(number, f"cannot write the messages before it alone ({error})")) from error
    if not text.startswith(before):
        raise ValueError(_untold(number, "prompts for it in another way than it then writes it"))
    return len(before)


def _untold(number: int, reason: str) -> str:
    return (
        f"what the assistant says in message {number} cannot be told from the chat template, which {reason}: {_REMEDY}"
    )


def _checked(chat: Any) -> Messages:
    """The messages, without what is null in them, as transformers leaves it out. Raises ValueError."""
    if isinstance(chat, Mapping) and "messages" in chat:
        chat = chat["messages"]
    messages = [*chat] if isinstance(chat, (list, tuple)) else None
    if messages is None or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"a chat is a list of messages, {{role: ..., content: ...}}, not {_shortened(chat)}")
    for message in messages:
        if "role" not in message:
            hint = " (of `from` and `value` a `call` makes these)" if "from" in message else ""
            raise ValueError(
                f"a message has `role` and `content`{hint}, not {', '.join(map(str, message)) or 'nothing'}"
            )
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _checked_tools(tools: Any) -> list[Any] | None:
    """The descriptions of functions; None for none. Raises ValueError."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools are a list of JSON schemas of functions, not {_shortened(tools)}")
    return [*tools]


def _shortened(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {type(value[0]).__name__}" if value else "an empty list"
    return type(value).__name__
