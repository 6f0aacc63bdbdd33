"""Small tokenizers with chat templates, and chats of all sorts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "my",
    "mat",
    "hello",
    "world",
    "what",
    "is",
    "your",
    "name",
    "yes",
    "no",
    "maybe",
    "please",
    "help",
    "with",
    "code",
    "x1",
    "don't",
    "I'm",
    "ok",
]
ODD = [
    "",
    " ",
    "\n\n",
    "héllo wörld",
    "日本語の文",
    "🎉🎉",
    "a  b\tc",
    "<|im_end|>",
    "<think>",
    "{{ x }}",
    "'quoted' \"text\"",
    "é",
]
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>", "<s>", "</s>"]
_HEAD = "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
_TAIL = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
_SAID = "{{- message['content'] + '<|im_end|>\n' }}"

MARKED = (
    f"{_HEAD}{{%- if message['role'] == 'assistant' %}}{{% generation %}}{{{{- message['content'] + '<|im_end|>' }}}}"
    f"{{% endgeneration %}}{{{{- '\n' }}}}{{%- else %}}{_SAID}{{%- endif %}}{_TAIL}"
)
PLAIN = f"{_HEAD}{_SAID}{_TAIL}"
"""As that of ChatML, without marks."""
FORGETS = (
    f"{_HEAD}{{%- if loop.last %}}{_SAID}{{%- else %}}{{{{- message['content'].split('</think>')[-1] + '<|im_end|>\n' }}}}"
    f"{{%- endif %}}{_TAIL}"
)
"""One that leaves out of earlier turns what was thought, as those of models that reason do."""


def write_tokenizer(
    folder: Path, template: str | None = MARKED, *, adds_specials: bool = False, **settings: Any
) -> Path:
    """A byte-level BPE, as `save_pretrained` writes it; with `adds_specials` texts begin with <s> and end with </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = random.Random(5)
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator([" ".join(made.choices(WORDS, k=40)) for _ in range(50)], trainer)
    if adds_specials:
        ids = [(name, rust.token_to_id(name)) for name in ("<s>", "</s>")]
        rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=rust, **{**names, **settings})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def draw_text(rng: random.Random, most: int = 30) -> str:
    return rng.choice(ODD) if rng.random() < 0.15 else " ".join(rng.choices([*WORDS, *ODD], k=rng.randint(1, most)))


def draw_chat(rng: random.Random, num_turns: int = 4) -> list[dict[str, Any]]:
    """A chat, which may have a system's message, end with the user's, have a null, or begin with the assistant's."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": draw_text(rng)}] if rng.random() < 0.3 else []
    for turn in range(rng.randint(1, num_turns)):
        if turn or rng.random() > 0.05:
            chat.append({"role": "user", "content": draw_text(rng)})
        chat.append(
            {"role": "assistant", "content": draw_text(rng), **({"tool_calls": None} if rng.random() < 0.1 else {})}
        )
    return chat[:-1] if len(chat) > 1 and rng.random() < 0.1 else chat


def write_lines(path: Path, samples: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def tokens_of_chat(
    tokenizer: Any, chat: list[dict[str, Any]], max_length: int | None = None
) -> tuple[list[int], list[int]]:
    """Tokens and labels by transformers alone: by its mask where the template has marks, else by the numbers of tokens before
    each turn and up to its end."""
    limits = {} if max_length is None else {"truncation": True, "max_length": max_length}
    if "generation %}" in tokenizer.chat_template:
        made = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **limits)
        pairs = zip(made["input_ids"], made["assistant_masks"], strict=True)
        return made["input_ids"], [token if is_said else -100 for token, is_said in pairs]
    ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    labels = [-100] * len(ids)
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            first = [
                tokenizer.apply_chat_template(chat[:1], add_generation_prompt=does, tokenize=False) for does in (0, 1)
            ]
            before = first[1][len(first[0]) :]  # what prompts for a message; transformers writes no chat without one
            if number:
                before = tokenizer.apply_chat_template(chat[:number], add_generation_prompt=True, tokenize=False)
            begin = len(tokenizer(before, add_special_tokens=False)["input_ids"])
            end = len(tokenizer.apply_chat_template(chat[: number + 1], return_dict=True)["input_ids"])
            labels[begin:end] = ids[begin:end]
    return ids[:max_length], labels[:max_length]


def padded(rows: Sequence[Sequence[int]], value: int, side: str, multiple: int) -> list[list[int]]:
    length = -(-max(map(len, rows)) // multiple) * multiple
    fill = [[value] * (length - len(row)) for row in rows]
    return [[*some, *row] if side == "left" else [*row, *some] for row, some in zip(rows, fill, strict=True)]
