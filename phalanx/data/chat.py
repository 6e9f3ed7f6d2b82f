"""Chats as text of which only the answers are learned.

A chat is rendered by the template of its tokenizer, once up to each answer and once with it: what
the answer adds is learned, the rest is read. So any template will do that never takes back what it
wrote.
"""

import json
from typing import Any, NamedTuple

from phalanx.core.errors import DataError, UsageError
from phalanx.data.tokenizers import Tokenizer, library

LEARNED_ROLE = "assistant"


class ChatPiece(NamedTuple):
    """Some text of a chat.

    Attributes:
        text: as the model reads it.
        learned: whether it is what the model is to say.
    """

    text: str
    learned: bool


def learned_pieces(record: dict[str, Any], tokenizer: Tokenizer) -> list[ChatPiece]:
    """Cut a record into what is read and what is learned.

    Args:
        record: with `messages`, each a role and a content; or with `prompt` and `completion`.
        tokenizer: whose template renders messages.

    Raises:
        UsageError: there are messages, and no template.
        DataError: a message lacks its role or content, or the template takes back what it wrote.

    Example:
        >>> from phalanx.data.tokenizers import open_tokenizer
        >>> learned_pieces({"prompt": "2+2=", "completion": "4"}, open_tokenizer("bytes"))
        [ChatPiece(text='2+2=', learned=False), ChatPiece(text='4', learned=True)]
    """
    if "messages" not in record:
        prompt, completion = record["prompt"], record["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError("a record with a prompt and a completion has text in both")
        return [ChatPiece(prompt, False), ChatPiece(completion, True)]
    if not tokenizer.chat_template:
        raise UsageError(
            f"{tokenizer.name} has no chat template, which says how messages become text; give "
            "--template FILE.jinja, or records with prompt and completion"
        )
    return _rendered(record["messages"], tokenizer)


def _rendered(messages: Any, tokenizer: Tokenizer) -> list[ChatPiece]:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    ):
        raise DataError("messages are a list, each with a role and a content")
    pieces: list[ChatPiece] = []
    written = ""
    for number, message in enumerate(messages):
        if message["role"] != LEARNED_ROLE:
            continue
        for learned in (False, True):
            upto = number + learned
            text = _render(messages[:upto], tokenizer, prompts=not learned)
            pieces.append(ChatPiece(_added(text, written), learned))
            written = text
    rest = _added(_render(messages, tokenizer, prompts=False), written)
    return [piece for piece in [*pieces, ChatPiece(rest, False)] if piece.text]


def _added(text: str, written: str) -> str:
    if not text.startswith(written):
        raise DataError(
            "the chat template writes an earlier message in another way once a later one follows; "
            "give one that only adds, with --template FILE.jinja"
        )
    return text[len(written) :]


def _render(messages: list[Any], tokenizer: Tokenizer, *, prompts: bool) -> str:
    """The text of some messages, up to where the next answer would begin."""
    sandbox = library("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    ends = "" if tokenizer.end is None else tokenizer.engine.decode([tokenizer.end])
    begins = "" if tokenizer.begin is None else tokenizer.engine.decode([tokenizer.begin])
    template = environment.from_string(tokenizer.chat_template)
    return str(
        template.render(
            messages=messages, add_generation_prompt=prompts, eos_token=ends, bos_token=begins
        )
    )


def _refuse(message: str) -> None:
    raise DataError(f"the chat template refuses a chat: {message}")
