"""`tokenize` with `mask: prompt` against the same by transformers alone, in torch's DataLoader with two workers.

    python -m profiles.sft [--rounds 5] [--template plain] [--split] [--out profiles/results]

3,000 chats of examples/make_chats.py in random order, in padded batches of 16 with labels and an attention mask. The DataLoader
keeps its workers, reads a line of JSON a sample, and calls `apply_chat_template` with `return_assistant_tokens_mask`; for the
template without marks (`plain`) it finds a turn as that does, by the text before it and up to its end. The loaders take turns,
an epoch each, each first in every other round, after one that is not counted. `cpu_us` is the CPU time a chat of all processes
of each, which other programs disturb less; with `--split` also what each part of the work takes, in one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer

import loaderkit
from loaderkit import Pipeline
from loaderkit.stages.sequence.chats import ChatWriter
from loaderkit.stages.sequence.tokenizer import TextTokenizer, parts_of
from profiles.huggingface import rate_of
from profiles.peers.environments import ROOT
from profiles.record import record

BATCH = 16
Encoded = dict[str, list[int]]


def without_marks(template: str) -> str:
    return re.sub(r"\s*\{%-? *(?:end)?generation *%\}", "", template)


class Chats(Dataset[Encoded]):
    """As a user writes it."""

    def __init__(self, folder: Path, *, is_marked: bool) -> None:
        self._lines = (folder / "chats.jsonl").read_text().splitlines()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self._is_marked = is_marked

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Encoded:
        messages = json.loads(self._lines[index])["messages"]
        return self._by_marks(messages) if self._is_marked else self._by_turns(messages)

    def _by_marks(self, messages: list[Any]) -> Encoded:
        made = self._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(made["input_ids"], made["assistant_masks"], strict=True)
        return {"input_ids": made["input_ids"], "labels": [token if is_said else -100 for token, is_said in pairs]}

    def _by_turns(self, messages: list[Any]) -> Encoded:
        write = partial(self._tokenizer.apply_chat_template, tokenize=False)
        made = self._tokenizer(write(messages), add_special_tokens=False)
        ids = made["input_ids"]
        labels = [-100] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                first = made.char_to_token(len(write(messages[:number], add_generation_prompt=True)))
                last = made.char_to_token(len(write(messages[: number + 1])) - 1)
                labels[first : last + 1] = ids[first : last + 1]
        return {"input_ids": ids, "labels": labels}


def padded(samples: list[Encoded]) -> dict[str, torch.Tensor]:
    """A batch as a user's collate function makes it."""
    rows = {
        name: [torch.tensor(sample[name], dtype=torch.int64) for sample in samples] for name in ("input_ids", "labels")
    }
    ids = torch.nn.utils.rnn.pad_sequence(rows["input_ids"], batch_first=True, padding_value=0)
    labels = torch.nn.utils.rnn.pad_sequence(rows["labels"], batch_first=True, padding_value=-100)
    sizes = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(ids.shape[1]) < sizes[:, None]).long()}


def write_chats(folder: Path, num: int, *, is_marked: bool) -> None:
    rng = random.Random(0)
    example = runpy.run_path(str(ROOT / "examples" / "make_chats.py"))
    example["write_tokenizer"](folder / "tokenizer", rng)
    if not is_marked:
        template = folder / "tokenizer" / "chat_template.jinja"
        template.write_text(without_marks(template.read_text()))
    (folder / "chats.jsonl").write_text("".join(json.dumps(example["chat"](rng)) + "\n" for _ in range(num)))


def measure(folder: Path, num_chats: int, num_rounds: int, *, is_marked: bool) -> dict[str, Any]:
    described = (
        Pipeline.lines(str(folder / "chats.jsonl"))
        .shuffle(seed=1)
        .read()
        .tokenize(str(folder / "tokenizer"), chat="messages", mask="prompt")
        .batch(BATCH, pad_value={"input_ids": 0, "labels": -100}, attention_mask="attention_mask")
    )
    others: DataLoader[Encoded] = DataLoader(
        Chats(folder, is_marked=is_marked),
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        collate_fn=padded,
    )
    turns: dict[str, list[float]] = {"loaderkit": [], "torch": []}
    cpu_us = dict.fromkeys(turns, 0.0)
    of_children_s = children_s()
    with loaderkit.build(described) as ours:
        for number in range(num_rounds + 1):
            for who in sorted(turns, reverse=number % 2 == 1):
                begin_s = time.process_time()
                rate = rate_of(ours if who == "loaderkit" else others, num_chats)
                turns[who] += [rate] if number else []
                cpu_us[who] += (time.process_time() - begin_s) * 1e6 / num_chats / (num_rounds + 1)
    del others  # its workers end
    cpu_us["torch"] += (children_s() - of_children_s) * 1e6 / num_chats / (num_rounds + 1)
    ratios = [ours / theirs for ours, theirs in zip(turns["loaderkit"], turns["torch"], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "cpu_us": cpu_us, "turns": turns}


def children_s() -> float:
    """CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def split(folder: Path, *, is_marked: bool) -> dict[str, float]:
    """Part of the work -> microseconds of CPU time a chat."""
    loaded: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer = TextTokenizer(loaded)
    writer = ChatWriter(tokenizer.chat_template(None), tokenizer.special_tokens)
    lines = (folder / "chats.jsonl").read_text().splitlines()[:500]
    chats = [json.loads(line)["messages"] for line in lines]
    written = [writer.write(one, marks=True) for one in chats]
    texts, spans = [one.text for one in written], [one.spans or () for one in written]
    rust: Any = loaded.backend_tokenizer
    encodings = rust.encode_batch(texts, add_special_tokens=False)
    data = Chats(folder, is_marked=is_marked)
    parts: dict[str, Callable[[], Any]] = {
        "JSON": lambda: [json.loads(line) for line in lines],
        "writing the text": lambda: [writer.write(one, marks=True) for one in chats],
        "encode_batch": lambda: rust.encode_batch(texts, add_special_tokens=False),
        "encode_batch_fast": lambda: rust.encode_batch_fast(texts, add_special_tokens=False),
        "ids to NumPy": lambda: [np.array(one.ids, np.int64) for one in encodings],
        "all offsets to NumPy": lambda: [np.array(one.offsets, np.int64) for one in encodings],
        "tokens of the turns": lambda: [parts_of(*pair) for pair in zip(encodings, spans, strict=True)],
        "encode": lambda: tokenizer.encode(texts, specials=False, max_length=None, spans=spans),
        "a sample of the plain loop": lambda: [data[number] for number in range(len(lines))],
    }
    return {name: round(min(cpu_s(part) for _ in range(3)) / len(lines) * 1e6, 1) for name, part in parts.items()}


def cpu_s(part: Callable[[], Any]) -> float:
    begin_s = time.process_time()
    part()
    return time.process_time() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", choices=("marked", "plain"), action="append")
    parser.add_argument("--chats", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for template in options.template or ("marked", "plain"):
        with tempfile.TemporaryDirectory() as folder:
            is_marked = template == "marked"
            write_chats(Path(folder), options.chats, is_marked=is_marked)
            one: dict[str, Any] = {"template": template}
            one |= {"split_us": split(Path(folder), is_marked=is_marked)} if options.split else {}
            one |= measure(Path(folder), options.chats, options.rounds, is_marked=is_marked)
            found.append(one)
            print(json.dumps(one))
    record(options.out, "sft", chats=options.chats, rounds=options.rounds, found=found)


if __name__ == "__main__":
    main()
