"""`tokenize` with transformers itself: its tokens, masks and padding, whoever makes them; what cannot be told is refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import (
    FORGETS,
    MARKED,
    PLAIN,
    draw_chat,
    draw_text,
    padded,
    tokens_of_chat,
    write_lines,
    write_tokenizer,
)
from transformers import AutoTokenizer, ByT5Tokenizer

import loaderkit
from loaderkit.cli import main
from loaderkit.errors import ConfigError, StageError, StateError
from loaderkit.testing import StageContract

Chat = list[dict[str, Any]]
Sample = tuple[list[int], list[int]]  # tokens, labels
pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=["marked", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template that has marks, and one without."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), MARKED if request.param == "marked" else PLAIN)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("marked"))


def described(
    data: Path, tokenizer: Path, *, batch: Mapping[str, Any] | None = None, **tokenize: Any
) -> dict[str, Any]:
    given = {"tokenizer": str(tokenizer), "chat": "messages", "mask": "prompt", **tokenize}
    return {
        "source": {"kind": "lines", "url": str(data)},
        "order": {"seed": 7, "epochs": 1},
        "stages": ["read", {"tokenize": given}, {"batch": dict(batch or PADDED)}],
    }


PADDED: dict[str, Any] = {"size": 4, "pad_value": {"input_ids": 3, "labels": -100}, "attention_mask": "attention_mask"}


def rows_of(
    described: Mapping[str, Any], *, rank: int = 0, world_size: int = 1, cut_at: int | None = None
) -> list[dict[str, Any]]:
    """The batches of a rank; with `cut_at` it is stopped behind that many, and another loader goes on by its state."""
    with loaderkit.build(described, rank=rank, world_size=world_size) as loader:
        if cut_at is None:
            return list(loader)
        batches = list(islice(loader, cut_at))
        state = json.loads(json.dumps(loader.state_dict()))
    with loaderkit.build(described, rank=rank, world_size=world_size) as loader:
        loader.load_state_dict(state)
        return batches + list(loader)


def number_of(key: str) -> int:
    return int(key.rpartition(":")[2]) - 1


def check_like_a_plain_loop(rng: random.Random, tmp_path: Path, folder: Path, num: int) -> None:
    chats = [draw_chat(rng) for _ in range(num)]
    data = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for world_size in (1, 2, 4):
        side, multiple = rng.choice(["left", "right"]), rng.choice([1, 8, 64])
        max_length = rng.choice([None, 40, 90])
        expected = [tokens_of_chat(tokenizer, chat, max_length) for chat in chats]
        batch = {**PADDED, "size": rng.randint(2, 7), "padding_side": side, "pad_to_multiple_of": multiple}
        pipeline = described(data, folder, batch=batch, max_length=max_length)
        seen: list[int] = []
        for rank in range(world_size):
            batches = rows_of(pipeline, rank=rank, world_size=world_size, cut_at=rng.randint(1, num // 30))
            for one in batches:
                numbers = [number_of(key) for key in one["__key__"]]
                ids, labels = zip(*(expected[number] for number in numbers), strict=True)
                assert one["input_ids"].tolist() == padded(ids, 3, side, multiple)
                assert one["labels"].tolist() == padded(labels, -100, side, multiple)
                assert one["attention_mask"].tolist() == padded([[1] * len(row) for row in ids], 0, side, multiple)
                assert {one[name].dtype for name in ("input_ids", "labels", "attention_mask")} == {torch.int64}
                wrapped = one.get("__wrapped__", torch.zeros(len(numbers), dtype=torch.bool)).tolist()
                seen += [number for number, again in zip(numbers, wrapped, strict=True) if not again]
        assert sorted(seen) == list(range(num))


def test_masks_and_padding_of_a_plain_loop(rng: random.Random, tmp_path: Path, folder: Path) -> None:
    check_like_a_plain_loop(rng, tmp_path, folder, 90)


@pytest.mark.prove
def test_masks_and_padding_of_three_thousand_chats(rng: random.Random, tmp_path: Path, folder: Path) -> None:
    check_like_a_plain_loop(rng, tmp_path, folder, 3000)


class TestTokenizeStage(StageContract):
    stage: Mapping[str, Any]
    batch = {"size": 3, "pad_value": {"input_ids": 3, "labels": -100}}  # noqa: RUF012 - the class is a description

    @pytest.fixture(autouse=True)
    def chosen(self, marked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stage = {"tokenize": {"tokenizer": str(marked), "chat": "messages", "mask": "prompt"}}
        monkeypatch.setattr(type(self), "stage", stage, raising=False)

    @pytest.fixture
    def samples(self, rng: random.Random) -> Sequence[Mapping[str, Any]]:
        return [{"messages": draw_chat(rng), "label": number} for number in range(8)]

    def test_a_sample_does_not_depend_on_its_neighbours(self, pipeline: dict[str, Any]) -> None:
        pytest.skip("batches are padded, to other lengths in batches of other sizes")


@pytest.mark.parametrize("template", [FORGETS, PLAIN.replace("<|im_start|>assistant", "<|im_start|>model")])
def test_a_template_that_does_not_tell_is_refused(rng: random.Random, tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", template)
    roles = ("user", "assistant", "user", "assistant")
    chats = [
        [{"role": role, "content": f"<think>{draw_text(rng)}</think>{draw_text(rng)}."} for role in roles]
        for _ in range(4)
    ]
    data = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    with pytest.raises(StageError, match=r"message 1 cannot be told.*\{% generation %\}"):
        rows_of(described(data, folder))
    (tmp_path / "marked.jinja").write_text(MARKED)
    assert len(rows_of(described(data, folder, template=str(tmp_path / "marked.jinja")))) == 1
    assert len(rows_of(described(data, folder, mask="none"))) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}",
        "{% if not messages or messages[0].role != 'system' %}You are a helpful bot\n{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}",
    ],
)
def test_headers_that_are_not_prompted_for_are_not_learned(rng: random.Random, tmp_path: Path, template: str) -> None:
    """Nor is a system prompt that the template puts before an assistant that begins."""
    folder = write_tokenizer(tmp_path / "tokenizer", template)
    for first in (["user"], []):
        chat = [{"role": role, "content": draw_text(rng)} for role in [*first, "assistant"]]
        data = write_lines(tmp_path / f"chats{len(first)}.jsonl", [{"messages": chat}])
        with pytest.raises(StageError, match="does not prompt for"):
            rows_of(described(data, folder))


class TestTexts:
    @pytest.mark.parametrize("adds_specials", [False, True])
    def test_tokens_are_those_of_a_call(self, rng: random.Random, tmp_path: Path, adds_specials: bool) -> None:
        texts = [draw_text(rng) for _ in range(40)]
        data = write_lines(tmp_path / "texts.jsonl", [{"text": text, "number": n} for n, text in enumerate(texts)])
        for number, side in enumerate(["right", "left"]):
            folder = write_tokenizer(tmp_path / f"{number}", adds_specials=adds_specials, truncation_side=side)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            for max_length in (None, 3, 4, 9):
                given: dict[str, Any] = {"chat": None, "text": "text", "mask": "none", "max_length": max_length}
                limits = {} if max_length is None else {"truncation": True, "max_length": max_length}
                for batch in rows_of(described(data, folder, **given)):
                    sizes = batch["input_ids_sizes"].tolist()
                    for row, text, size in zip(batch["input_ids"], batch["number"].tolist(), sizes, strict=True):
                        assert row[:size].tolist() == tokenizer(texts[text], **limits)["input_ids"]
                    assert torch.equal(batch["input_ids"] == 3, batch["labels"] == -100)

    def test_what_follows_a_prompt_is_learned(self, rng: random.Random, tmp_path: Path) -> None:
        """Also what ends the text."""
        folder = write_tokenizer(tmp_path / "tokenizer", adds_specials=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        samples: list[dict[str, str]] = [
            {"prompt": draw_text(rng) + "\n", "answer": "<|im_start|>" + draw_text(rng)} for _ in range(30)
        ]
        data = write_lines(tmp_path / "texts.jsonl", samples)
        for batch in rows_of(described(data, folder, chat=None, text="answer", prompt="prompt")):
            for row, key in enumerate(batch["__key__"]):
                sample = samples[number_of(key)]
                begin = len(tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"]) + 1
                ids = tokenizer(sample["prompt"] + sample["answer"])["input_ids"]
                size = len(ids)
                assert batch["input_ids"][row, :size].tolist() == ids
                assert batch["labels"][row, :size].tolist() == [-100] * begin + ids[begin:]

    def test_the_end_of_a_text_is_written_once(self, tmp_path: Path, marked: Path) -> None:
        data = write_lines(tmp_path / "texts.jsonl", [{"text": "a b"}, {"text": "a b</s>"}])
        batch = {"size": 2, "pad_value": {"input_ids": 3}}
        (one,) = rows_of(described(data, marked, chat=None, text="text", eos=True, mask=None, batch=batch))
        assert one["input_ids"][0].tolist() == one["input_ids"][1].tolist()
        assert "labels" not in one

    def test_a_tokenizer_in_python(self, rng: random.Random, tmp_path: Path) -> None:
        ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "byt5")
        samples = [{"prompt": draw_text(rng), "answer": "x" + draw_text(rng)} for _ in range(30)]
        data = write_lines(tmp_path / "texts.jsonl", samples)
        for max_length in (None, 12):
            given = described(data, tmp_path / "byt5", chat=None, text="answer", prompt="prompt", max_length=max_length)
            for batch in rows_of(given):
                for row, key in enumerate(batch["__key__"]):
                    sample = samples[number_of(key)]
                    ids = tokenizer(sample["prompt"] + sample["answer"])["input_ids"]
                    begin = len(sample["prompt"].encode())
                    cut = ids if max_length is None or len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]
                    size = len(cut)
                    assert batch["input_ids"][row, :size].tolist() == cut
                    is_learned = batch["labels"][row, :size] != -100
                    assert is_learned[: min(begin, size - 1)].sum() == 0
                    assert is_learned[begin : size - (cut != ids)].all()


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {"type": "int"}}}},
    }
    for name in ("search", "add")
]
CALLS = "{%- if tools %}{{- 'tools: ' + (tools | tojson) + '\n' }}{%- endif %}" + MARKED.replace(
    "message['content'] + '<|im_end|>' }}",
    "(message['content'] or '') + (message['tool_calls'] | default('') | string) + '<|im_end|>' }}",
)


def test_tools_are_those_of_the_sample(rng: random.Random, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", CALLS)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    samples: list[dict[str, Any]] = []
    for number in range(12):
        chat = draw_chat(rng)
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"x": number}}]}
        tools = rng.choice([None, [], TOOLS[:1], TOOLS])
        samples.append({"messages": [*chat, {"role": "user", "content": "add"}, call], "tools": tools})
    config = described(
        write_lines(tmp_path / "chats.jsonl", samples), folder, tools="tools", batch={**PADDED, "size": 1}
    )
    config["order"]["shuffle"] = "none"
    with loaderkit.build(config) as loader:
        for sample, batch in zip(samples, loader, strict=True):
            made = tokenizer.apply_chat_template(
                sample["messages"], tools=sample["tools"], return_dict=True, return_assistant_tokens_mask=True
            )
            assert batch["input_ids"][0].tolist() == made["input_ids"]
            assert (batch["labels"][0] != -100).int().tolist() == made["assistant_masks"]
            assert "tools" not in batch


class TestPairs:
    def test_two_sequences_a_sample(self, rng: random.Random, tmp_path: Path, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        samples = []
        for _ in range(20):
            prompt = [{"role": "user", "content": draw_text(rng)}]
            samples.append({"prompt": prompt} | {
                name: [{"role": "assistant", "content": draw_text(rng)}] for name in ("chosen", "rejected")
            })  # fmt: skip
        data = write_lines(tmp_path / "pairs.jsonl", samples)
        names = [f"{name}_{what}" for name in ("chosen", "rejected") for what in ("input_ids", "labels")]
        masks = {f"{name}_mask": f"{name}_input_ids" for name in ("chosen", "rejected")}
        batch = {
            "size": 4,
            "pad_value": {name: -100 if "labels" in name else 3 for name in names},
            "attention_mask": masks,
        }
        for one in rows_of(described(data, folder, chat=["chosen", "rejected"], prompt="prompt", batch=batch)):
            for name in ("chosen", "rejected"):
                rows = [samples[number_of(key)] for key in one["__key__"]]
                ids, labels = zip(*(tokens_of_chat(tokenizer, row["prompt"] + row[name]) for row in rows), strict=True)
                assert one[f"{name}_input_ids"].tolist() == padded(ids, 3, "right", 1)
                assert one[f"{name}_labels"].tolist() == padded(labels, -100, "right", 1)
                assert one[f"{name}_mask"].sum(1).tolist() == list(map(len, ids))

    def test_what_the_prompt_says_is_not_learned(self, tmp_path: Path, folder: Path) -> None:
        """Also where it has turns of the assistant's."""
        said = [("user", "a"), ("assistant", "the cat"), ("user", "b"), ("assistant", "no dog")]
        chat = [{"role": role, "content": text} for role, text in said]
        data = write_lines(tmp_path / "one.jsonl", [{"prompt": chat[:3], "answer": chat[3:]}])
        (batch,) = rows_of(described(data, folder, chat="answer", prompt="prompt"))
        text = AutoTokenizer.from_pretrained(folder).decode(batch["labels"][0][batch["labels"][0] != -100])
        assert str(text).strip() == "no dog<|im_end|>"

    def test_one_mask_of_unequal_fields_is_refused(self, tmp_path: Path, marked: Path) -> None:
        data = write_lines(tmp_path / "pairs.jsonl", [{"a": "x", "b": "x y z"}])
        batch = {"size": 1, "pad_value": {"a_input_ids": 0, "b_input_ids": 0}, "attention_mask": "m"}
        with pytest.raises(StageError, match=r"differ in length.*attention_mask: \{m: a_input_ids\}"):
            rows_of(described(data, marked, chat=None, text=["a", "b"], mask=None, batch=batch))


class TestLengths:
    @pytest.mark.parametrize("stages", [
        [{"pack": {"length": 128, "field": "input_ids", "pad_value": {"labels": -100}}}, {"batch": {"size": 2}}],
        [{"batch": {**PADDED, "size": None, "tokens": 1500, "field": "input_ids", "pad_to_multiple_of": 8}}],
    ], ids=["pack", "batch"])  # fmt: skip
    def test_indexed_once_and_planned_by(
        self, rng: random.Random, tmp_path: Path, folder: Path, stages: list[Any]
    ) -> None:
        """Each token and label comes once, whatever the ranks, and after a resume."""
        chats = [draw_chat(rng) for _ in range(60)]
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        expected = [tokens_of_chat(tokenizer, chat) for chat in chats]
        pipeline = {**described(data, folder), "stages": [*described(data, folder)["stages"][:2], *stages]}
        (tmp_path / "sft.yaml").write_text(json.dumps(pipeline))
        with pytest.raises(ConfigError, match="loaderkit index --lengths"):
            rows_of(pipeline)
        assert main(["index", "--lengths", str(tmp_path / "sft.yaml")]) == 0
        for world_size in (1, 2, 4):
            found: dict[int, dict[int, Sample]] = {}
            for rank in range(world_size):
                for one in rows_of(pipeline, rank=rank, world_size=world_size, cut_at=2):
                    for number, first, sample in pieces_of(one):
                        found.setdefault(number, {})[first] = sample
            for number, pieces in found.items():
                parts = [pieces[first] for first in sorted(pieces)]
                assert tuple([*chain(*(part[which] for part in parts))] for which in (0, 1)) == expected[number]
            assert sorted(found) == list(range(len(chats)))


def pieces_of(batch: dict[str, Any]) -> list[tuple[int, int, Sample]]:
    """(number of the chat, its first token, tokens and labels) of all that a batch holds, which is checked to be no more."""
    found, ids, labels = [], batch["input_ids"], batch["labels"]
    if "document_ids" not in batch:
        assert ids.numel() <= 1500
        assert ids.shape[1] % 8 == 0
        for row, size in enumerate(batch["input_ids_sizes"].tolist()):
            found.append((number_of(batch["__key__"][row]), 0, (ids[row, :size].tolist(), labels[row, :size].tolist())))
        return found
    for row, keys in enumerate(batch["__key__"]):
        documents = batch["document_ids"][row]
        assert (labels[row][documents < 0] == -100).all()
        for number, key in enumerate(keys.split(" ")):
            name, _, part = key.partition("[")
            own = documents == number
            sample = ids[row][own].tolist(), labels[row][own].tolist()
            found.append((number_of(name), int(part.partition(":")[0] or 0), sample))
    return found


class TestSafety:
    def test_two_lengths_at_once(self, rng: random.Random, tmp_path: Path, marked: Path) -> None:
        """One tokenizer in several threads, with other lengths in each, beside a program's own use of transformers."""
        chats = [draw_chat(rng) for _ in range(120)]
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
        tokenizer = AutoTokenizer.from_pretrained(marked)
        lengths = [None, 7, 31, 64]
        expected = {length: [tokens_of_chat(tokenizer, chat, length) for chat in chats] for length in lengths}
        wrong: list[Any] = []

        def work(max_length: int | None) -> None:
            try:
                pipeline = {
                    **described(data, marked, max_length=max_length),
                    "prefetch": {"executor": "thread", "concurrency": 3},
                }
                for batch in rows_of(pipeline):
                    for row, key in enumerate(batch["__key__"]):
                        size = int(batch["input_ids_sizes"][row])
                        sample = batch["input_ids"][row, :size].tolist(), batch["labels"][row, :size].tolist()
                        if sample != expected[max_length][number_of(key)]:
                            wrong.append((max_length, key))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(length,)) for length in lengths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_program_that_forks(self, tmp_path: Path, marked: Path) -> None:
        """The first use of transformers is by threads; children of the program tokenize, too, and end."""
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": draw_chat(random.Random(1))} for _ in range(40)])
        program = f"""
import multiprocessing, loaderkit
pipeline = {described(data, marked)!r}
def count():
    with loaderkit.build(pipeline) as loader:
        return sum(batch["input_ids"].sum().item() for batch in loader)
def in_child(expected):
    raise SystemExit(0 if count() == expected else 3)
if __name__ == "__main__":
    total = count()
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(total,))
    child.start()
    child.join(120)
    print(child.exitcode)
"""
        environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert ran.stdout == "0\n", ran.stderr
        assert "parallelism" not in ran.stderr

    def test_no_code_of_a_tokenizer_is_run(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path / "tokenizer")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": draw_chat(random.Random(1))}])
        with suppress(ConfigError):  # or transformers takes a class of its own
            rows_of(described(data, folder))
        assert not (tmp_path / "ran").exists()

    def test_a_template_that_reaches_out_makes_bad_samples(self, tmp_path: Path) -> None:
        folder = write_tokenizer(tmp_path / "tokenizer", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": draw_chat(random.Random(1))}])
        with pytest.raises(StageError, match="unsafe"):
            rows_of(described(data, folder, mask="none"))


class TestWhatIsSaid:
    def test_a_state_is_of_one_tokenizer_wherever_it_lies(self, tmp_path: Path, marked: Path) -> None:
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": draw_chat(random.Random(1))} for _ in range(20)])
        with loaderkit.build(described(data, marked)) as loader:
            next(iter(loader))
            state = loader.state_dict()
        elsewhere = write_tokenizer(tmp_path / "elsewhere")
        with loaderkit.build(described(data, elsewhere)) as loader:
            loader.load_state_dict(state)
        other = write_tokenizer(tmp_path / "elsewhere", PLAIN)  # in the place of the first
        with loaderkit.build(described(data, other)) as loader, pytest.raises(StateError, match=r"stages\.tokenize"):
            loader.load_state_dict(state)

    def test_a_cut_is_said_once(self, tmp_path: Path, marked: Path, caplog: pytest.LogCaptureFixture) -> None:
        chats = [[{"role": "user", "content": "the cat sat " * 9}, {"role": "assistant", "content": "no"}]] * 9
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
        rows_of(described(data, marked, max_length=12))
        said = [record.message for record in caplog.records if "max_length" in record.message]
        assert len(said) == 1
        assert "tokens, and is cut to 12" in said[0]
        assert sum("all its labels are -100" in record.message for record in caplog.records) == 1
        with pytest.raises(StageError, match=r"`max_length` is 12"):
            rows_of(described(data, marked, max_length=12, too_long="bad"))

    @pytest.mark.parametrize(
        ("sample", "said"),
        [
            ({"messages": [{"from": "human", "value": "a"}]}, "`from` and `value`"),
            ({"messages": "hello"}, "a chat is a list of messages"),
            ({"messages": []}, "no message"),
            ({"other": 1}, "no field 'messages'"),
            ({"messages": [{"role": "user", "content": "\ud800"}]}, "."),
        ],
    )
    def test_a_bad_sample_is_one(self, tmp_path: Path, marked: Path, sample: dict[str, Any], said: str) -> None:
        good = [{"messages": draw_chat(random.Random(number))} for number in range(6)]
        data = write_lines(tmp_path / "chats.jsonl", [*good[:3], sample, *good[3:]])
        with pytest.raises(StageError, match=said):
            rows_of(described(data, marked))
        pipeline = {**described(data, marked), "errors": {"on_bad_sample": "skip"}}
        assert sum(len(batch["__key__"]) for batch in rows_of(pipeline)) == 6

    def test_paths_are_relative_to_the_file(
        self, tmp_path: Path, marked: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_lines(tmp_path / "chats.jsonl", [{"messages": draw_chat(random.Random(1))}])
        (tmp_path / "own").symlink_to(marked)
        (tmp_path / "sft.yaml").write_text(json.dumps(described(Path("chats.jsonl"), Path("own"))))
        monkeypatch.chdir("/")
        with loaderkit.build(tmp_path / "sft.yaml") as loader:
            assert len(list(loader)) == 1

    def test_what_is_no_tokenizer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        data = write_lines(tmp_path / "chats.jsonl", [{"messages": []}])
        with pytest.raises(ConfigError, match="no folder with a tokenizer"):
            rows_of(described(data, tmp_path))
        folder = write_tokenizer(tmp_path / "tokenizer", None, adds_specials=True)
        with pytest.raises(ConfigError, match="no chat template"):
            rows_of(described(data, folder))
        with pytest.raises(ConfigError, match=r"max_length.* 2 tokens around"):
            rows_of(described(data, folder, chat=None, text="text", mask=None, max_length=2))
