"""Which tokens belong to a part of a text, found by halving, is what the characters of every single token say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chat_tokenizers import ODD, SPECIAL, WORDS, draw_text
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from loaderkit.stages.sequence.tokenizer import TextTokenizer, parts_of

pytestmark = pytest.mark.integration
Spans = list[tuple[int, int]]
MORE = ["Ångström", "ﬁne", "e\u0301\u0327", "한국어", "\u200d👩‍💻", "\u00a0x", "\r\n", "…", "naïve", "Ⅷ½"]


def byte_level(**how: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(**how)
    made.post_processor = processors.ByteLevel(trim_offsets=how["trim_offsets"])
    return trained(made, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def roberta() -> Tokenizer:
    """Puts tokens around a text, and leaves the spaces out of what a token is of."""
    made = byte_level(add_prefix_space=True, trim_offsets=True)
    made.post_processor = processors.RobertaProcessing(("</s>", 5), ("<s>", 4), trim_offsets=True)
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made = trained(made, trainers.UnigramTrainer, unk_token="<unk>")
    made.post_processor = around(made)
    return made


def byte_fallback() -> Tokenizer:
    """As Llama's of sentencepiece: unknown characters become several tokens, of a byte each."""
    tokens = [f"<0x{number:02X}>" for number in range(256)] + ["▁", *{*"".join(WORDS)}]
    made = Tokenizer(
        models.BPE({token: number for number, token in enumerate(["<unk>", *tokens])}, [], byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(SPECIAL)
    return made


def word_piece() -> Tokenizer:
    """Drops spaces, accents and control characters, and puts spaces around ideograms."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(strip_accents=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made = trained(made, trainers.WordPieceTrainer)
    made.post_processor = around(made)
    return made


def trained(made: Tokenizer, trainer: Any, **how: Any) -> Tokenizer:
    rng = random.Random(4)
    texts = [" ".join(rng.choices([*WORDS, *ODD, *MORE], k=40)) for _ in range(40)]
    made.train_from_iterator(
        texts, trainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False, **how), len(texts)
    )
    return made


def around(made: Tokenizer) -> Any:
    ids = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    return processors.TemplateProcessing(single="<s> $A </s> </s>", special_tokens=ids)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_level(add_prefix_space=False, trim_offsets=False),
    "bytes, trimmed": lambda: byte_level(add_prefix_space=False, trim_offsets=True),
    "bytes, prefixed": lambda: byte_level(add_prefix_space=True, trim_offsets=False),
    "bytes, one piece": lambda: byte_level(add_prefix_space=False, trim_offsets=False, use_regex=False),
    "roberta": roberta,
    "unigram": unigram,
    "byte fallback": byte_fallback,
    "word piece": word_piece,
}


def by_all_offsets(encoding: Any, spans: Spans) -> list[bool]:
    """True for the tokens that have a character in one of the spans. One that stands for a space put before a word, of which
    the offsets are said to be those of the word's first letter without its spaces, goes with the word."""
    offsets = list(encoding.offsets)
    for number, (begin, end) in enumerate(offsets[:-1]):
        if begin == end > offsets[number + 1][0]:
            offsets[number] = offsets[number + 1][0], end
    return [any(begin < until and end > first for first, until in spans) for begin, end in offsets]


def draw_spans(rng: random.Random, text: str) -> Spans:
    """Parts in order, which may be empty, touch one another, or be the whole text."""
    borders = sorted(rng.choices(range(len(text) + 1), k=2 * rng.randint(0, 4)))
    return [*zip(borders[::2], borders[1::2], strict=True)]


def check(made: Tokenizer, texts: Sequence[str], rng: random.Random) -> None:
    room = rng.choice([None, 1, 7])
    for encoding, text in zip(made.encode_batch(texts, add_special_tokens=False), texts, strict=True):
        if room is not None:  # as `max_length` cuts
            encoding.truncate(room, direction=rng.choice(["left", "right"]))
        spans = draw_spans(rng, text)
        found = [False] * len(encoding)
        for begin, end in parts_of(encoding, spans):
            found[begin:end] = [True] * (end - begin)
        assert found == by_all_offsets(encoding, spans), (text, spans, encoding.tokens)


def draw_texts(rng: random.Random, num: int) -> list[str]:
    return [
        rng.choice(["", " "]).join([draw_text(rng, 8), *rng.choices([*ODD, *MORE, *SPECIAL], k=rng.randint(0, 4))])
        for _ in range(num)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_of_all_offsets(rng: random.Random, kind: str) -> None:
    made = KINDS[kind]()
    for _ in range(20):
        check(made, draw_texts(rng, 20), rng)


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_many_texts(rng: random.Random, kind: str) -> None:
    made = KINDS[kind]()
    for _ in range(1000):
        check(made, draw_texts(rng, 20), rng)


@pytest.mark.parametrize("kind", KINDS)
def test_without_offsets_tokens_are_the_same(rng: random.Random, kind: str) -> None:
    made, texts = KINDS[kind](), draw_texts(rng, 200)
    quick, full = made.encode_batch_fast(texts), made.encode_batch(texts)
    assert [one.ids for one in quick] == [one.ids for one in full]


@pytest.mark.parametrize("max_length", [None, 9, 5])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_letter_behind_a_space_is_part_of_what_is_learned(max_length: int | None, side: str) -> None:
    """Also where the tokenizer leaves spaces out of what a token is of, and puts tokens around the text."""
    make: Any = PreTrainedTokenizerFast
    tokenizer = TextTokenizer(make(tokenizer_object=roberta(), truncation_side=side))
    text = "maybe a dog"
    (found,) = tokenizer.encode([text], specials=True, max_length=max_length, spans=[[(5, 7)]])
    tokens = [roberta().id_to_token(number) for number in found.ids]
    assert [tokens[begin:end] for begin, end in found.parts] == [["Ġa"]]
    assert (tokens[0], tokens[-1]) == ("<s>", "</s>")
