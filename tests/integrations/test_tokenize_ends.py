"""The end token of a text, and the template of a chat with tools, as transformers has them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import PLAIN, WORDS, write_tokenizer
from transformers import AutoTokenizer

import loaderkit

pytestmark = pytest.mark.integration
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "find", "description": "it finds", "parameters": {}}}


def tokenized(folder: Path, samples: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """The fields of each sample, as lists."""
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    padding = {"input_ids": 3} | ({"labels": -100} if "mask" in settings else {})
    pipeline = {
        "source": {"kind": "lines", "url": str(folder / "samples.jsonl")},
        "order": {"shuffle": "none"},
        "stages": ["read", {"tokenize": settings}, {"batch": {"size": 1, "pad_value": padding}}],
    }
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        return [{name: value[0].tolist() for name, value in batch.items() if name != "__key__"} for batch in loader]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_end_is_learned_if_the_text_reaches_it(side: str, rng: random.Random, tmp_path: Path) -> None:
    """A tokenizer that cuts on the left keeps the end of an answer."""
    folder = write_tokenizer(tmp_path / "t", adds_specials=True, truncation_side=side)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    texts = [("".join(f"{rng.choice(WORDS)} " for _ in range(9)), "".join(f" {rng.choice(WORDS)}" for _ in range(9)))]
    most = rng.randrange(5, 9)
    (made,) = tokenized(
        tmp_path, [{"p": p, "t": t} for p, t in texts], tokenizer=str(folder), text="t", prompt="p", mask="prompt",
        max_length=most,
    )  # fmt: skip
    assert made["input_ids"] == theirs("".join(texts[0]), truncation=True, max_length=most)["input_ids"]
    assert made["input_ids"][-1] == theirs.eos_token_id
    assert (made["labels"][-1] == theirs.eos_token_id) == (side == "left")


@pytest.mark.parametrize("adds_specials", [False, True])
def test_one_end_whoever_writes_it(adds_specials: bool, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", adds_specials=adds_specials)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    (made,) = tokenized(tmp_path, [{"t": "hello world"}], tokenizer=str(folder), text="t", eos=True)
    assert made["input_ids"] == theirs("hello world" + ("" if adds_specials else "</s>"))["input_ids"]
    assert made["input_ids"].count(theirs.eos_token_id) == 1


def test_a_tokenizer_with_a_template_for_tools(tmp_path: Path) -> None:
    """transformers takes that one where tools are given, also an empty list of them."""
    folder = write_tokenizer(tmp_path / "t")
    templates = {"default": PLAIN, "tool_use": "{{- tools | tojson }}" + PLAIN}
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = templates
    theirs.save_pretrained(folder)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    tools: list[Any] = [[TOOL], None, []]
    made = tokenized(
        tmp_path, [{"m": messages, "tools": one} for one in tools], tokenizer=str(folder), chat="m", tools="tools"
    )
    assert [one["input_ids"] for one in made] == [
        theirs.apply_chat_template(messages, tools=one, return_dict=True)["input_ids"] for one in tools
    ]


def test_a_template_file_that_begins_with_a_mark_of_utf_8(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t")
    (tmp_path / "chat.jinja").write_text(PLAIN, "utf-8-sig")
    chat = [{"role": "user", "content": "hello"}]
    (made,) = tokenized(tmp_path, [{"m": chat}], tokenizer=str(folder), chat="m", template=str(tmp_path / "chat.jinja"))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(chat, chat_template=PLAIN, return_dict=True)
    assert made["input_ids"] == expected["input_ids"]
