"""`tokenize`: chats and texts as tokens, with labels of what is to be learned.

sample ──ChatWriter──> text, the assistant's parts ──TextTokenizer, for a chunk at once──> input_ids, labels
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from loaderkit._internal.config.settings import as_tuple
from loaderkit.engine.work import Stage
from loaderkit.errors import USER_ERRORS, ConfigError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded
from loaderkit.stages.base import StageArgs, StageConfig
from loaderkit.stages.batch import BatchArgs
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.runner import FailureNamer
from loaderkit.stages.sequence.chats import ChatWriter, Written
from loaderkit.stages.sequence.tokenizer import TextTokenizer, Tokens, load_tokenizer

IGNORED = -100  # as a label: what torch's cross_entropy, and all models of transformers, leave out
logger = logging.getLogger("loaderkit")
_Names = Annotated[
    str | Annotated[tuple[str, ...], Field(min_length=1)],
    BeforeValidator(as_tuple),
    Field(min_length=1),
]


class TokenizeArgs(StageArgs):
    """Make tokens of chats or texts, by a tokenizer of transformers'.

    Fields: `input_ids` and, with `mask`, `labels`, int64 [tokens] both; of several fields, such as preference pairs have, with
    the field's name before each, `chosen_input_ids`. The fields they are made of are left out. No code of a tokenizer's is run.
    """

    tokenizer: str = Field(
        min_length=1,
        description="a folder, as `save_pretrained` writes it, relative to the file; or its name on the hub",
    )
    chat: _Names | None = Field(
        None,
        description="the field with a list of messages, {role: ..., content: ...}, written by the chat template; or several, "
        "each a sequence of its own, as in [chosen, rejected]",
    )
    text: _Names | None = Field(None, description="or the field with plain text, or several")
    prompt: str | None = Field(
        None, min_length=1, description="a field of the same kind that comes before each, and is not to be learned"
    )
    tools: str | None = Field(
        None,
        min_length=1,
        description="of `chat`: the field with the functions that it may call, a list of JSON schemas, or null",
    )
    mask: Literal["prompt", "none"] | None = Field(
        None,
        description="labels for the loss; prompt: -100 for all but what the assistant says, or, of text, what follows "
        "`prompt`; none: the tokens themselves; default: no labels",
    )
    template: str | None = Field(
        None, min_length=1, description="a file with a chat template (Jinja), in the place of the tokenizer's own"
    )
    max_length: PositiveInt | None = Field(None, description="tokens of a sequence, at most")
    too_long: Literal["cut", "bad"] = Field(
        "cut",
        description="longer ones are cut, at the tokenizer's `truncation_side`, and a warning says so once; or are bad samples",
    )
    special_tokens: bool = Field(
        True,
        description="of `text`: with the tokens that the tokenizer puts around one; chats have those of the template",
    )
    eos: bool = Field(
        False, description="of `text`: with the token that ends a text behind it, unless it ends so already"
    )

    @model_validator(mode="after")
    def _fits(self) -> TokenizeArgs:
        if (self.chat is None) == (self.text is None):
            raise ValueError("name the field with messages in `chat`, or that with plain text in `text`")
        names = self.sources
        all_names = [*names, *(name for name in (self.prompt, self.tools) if name is not None)]
        if len({*all_names}) < len(all_names):
            raise ValueError("`chat`, `text`, `prompt` and `tools` name each field once")
        if self.text is not None and (self.template is not None or self.tools is not None):
            raise ValueError("`template` and `tools` are for chats, and `text` is tokenized as it is")
        if self.chat is not None and (self.eos or not self.special_tokens):
            raise ValueError("`eos` and `special_tokens` are for `text`: of a chat, the template writes them")
        if self.text is not None and self.mask == "prompt" and self.prompt is None:
            raise ValueError("`mask: prompt` of a text needs `prompt`, the field with what comes before it")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The fields that tokens are made of, without `prompt`."""
        given = self.chat if self.chat is not None else self.text
        return (given,) if isinstance(given, str) else given or ()

    @property
    def prefixes(self) -> Mapping[str, str]:
        """What the names of a source's fields begin with."""
        return {name: f"{name}_" if len(self.sources) > 1 else "" for name in self.sources}


class _TextJob(NamedTuple):
    """A text to tokenize, for the sample at a row; its fields begin with `prefix`."""

    row: int
    prefix: str
    written: Written


class _TokenizeRunner:
    """The stage of one process. Any number of threads."""

    def __init__(self, args: TokenizeArgs, tokenizer: TextTokenizer, failed: FailureNamer) -> None:
        self._args, self._tokenizer, self._failed = args, tokenizer, failed
        self._chats: ChatWriter | None = None
        if args.chat is not None:
            self._chats, self._tool_chats = (
                ChatWriter(tokenizer.chat_template(args.template, has_tools=has_tools), tokenizer.special_tokens)
                for has_tools in (False, args.tools is not None)
            )
        elif args.max_length is not None and args.special_tokens and tokenizer.num_specials >= args.max_length:
            raise ConfigError(
                f"stages.{failed.stage}.max_length: {args.max_length} leaves no room for a text, as the tokenizer puts "
                f"{tokenizer.num_specials} tokens around one: allow more, or leave these out (`special_tokens: false`)"
            )
        self._eos = _eos_of(args, tokenizer)
        self._prefixes = args.prefixes
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def run(self, chunk: SampleChunk) -> None:
        """Put tokens in the place of texts."""
        jobs: list[_TextJob] = []
        for row, sample in enumerate(chunk.samples):
            if sample is not None:
                chunk.current = row
                try:
                    jobs += [
                        _TextJob(row, self._prefixes[name], self._write(sample, name)) for name in self._args.sources
                    ]
                except USER_ERRORS as error:
                    self._failed(chunk, row, error)
        chunk.current = None
        made: dict[int, Sample] = {}
        for job, tokens in self._encode(chunk, jobs):
            try:
                made.setdefault(job.row, {}).update(self._fields_of(chunk, job, tokens))
            except ValueError as error:
                self._failed(chunk, job.row, error)
        left_out = {*self._args.sources, self._args.prompt, self._args.tools}
        for row, fields in made.items():
            sample = chunk.samples[row]
            if sample is not None:
                chunk.samples[row] = {key: value for key, value in sample.items() if key not in left_out} | fields

    def _write(self, sample: Sample, name: str) -> Written:
        """The text of a field. Raises ValueError, and what a template raises."""
        args = self._args
        prompt = None if args.prompt is None else _value(sample, args.prompt)
        value, marks = _value(sample, name), args.mask == "prompt"
        if self._chats is not None:
            tools = None if args.tools is None else _value(sample, args.tools)
            return (self._chats if tools is None else self._tool_chats).write(value, prompt, tools, marks=marks)
        before = "" if prompt is None else _text(prompt, str(args.prompt))
        text = before + _text(value, name)
        if self._eos is not None and not text.endswith(self._eos):
            text += self._eos
        return Written(text, [(len(before), len(text))] if marks else None)

    def _encode(self, chunk: SampleChunk, jobs: Sequence[_TextJob]) -> list[tuple[_TextJob, Tokens]]:
        try:
            return list(zip(jobs, self._tokens_of(jobs), strict=True))
        except USER_ERRORS:  # one by one they show which of them are bad
            pass
        good: list[tuple[_TextJob, Tokens]] = []
        for job in jobs:
            chunk.current = job.row
            try:
                good.append((job, self._tokens_of([job])[0]))
            except USER_ERRORS as error:
                if chunk.samples[job.row] is not None:
                    self._failed(chunk, job.row, error)
        chunk.current = None
        return good

    def _tokens_of(self, jobs: Sequence[_TextJob]) -> list[Tokens]:
        if not jobs:
            return []
        return self._tokenizer.encode(
            [job.written.text for job in jobs],
            specials=self._chats is None and self._args.special_tokens,
            max_length=self._args.max_length,
            spans=[job.written.spans or () for job in jobs],
        )

    def _fields_of(self, chunk: SampleChunk, job: _TextJob, tokens: Tokens) -> Sample:
        """The fields that a text becomes. Raises ValueError."""
        args, ids = self._args, tokens.ids
        if tokens.num_cut:
            num = len(ids) + tokens.num_cut
            if args.too_long == "bad":
                raise ValueError(f"it has {num} tokens, and `max_length` is {args.max_length}")
            self._say("cut", chunk, job, f"{num} tokens, and is cut to {args.max_length} (`max_length`)")
        fields: Sample = {f"{job.prefix}input_ids": ids}
        if args.mask is None:
            return fields
        labels = ids.copy()
        if job.written.spans is not None:
            has_end = not tokens.num_cut or self._tokenizer.cuts_left
            labels = labels_of(tokens, to_end=self._chats is None and has_end)
            if not any(begin < end for begin, end in tokens.parts):
                self._say("mask", chunk, job, "nothing to learn: all its labels are -100")
        fields[f"{job.prefix}labels"] = labels
        return fields

    def _say(self, what: str, chunk: SampleChunk, job: _TextJob, text: str) -> None:
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        key = self._failed.source.key(chunk.index_of(job.row))
        logger.warning(
            "%s: sample %r has %s; so it may be with others, which is said once", self._failed.stage, key, text
        )


def labels_of(tokens: Tokens, *, to_end: bool) -> NDArray[np.int64]:
    """The tokens that have a character of a part that is to be learned, as transformers tells it, and -100 for all others:
    int64 [tokens]. `to_end`: also what the tokenizer puts behind the last part."""
    labels = np.full(len(tokens.ids), IGNORED, np.int64)
    for begin, end in tokens.parts:
        if begin < end:
            until = len(labels) if to_end else end
            labels[begin:until] = tokens.ids[begin:until]
    return labels


def _value(sample: Sample, name: str) -> Any:
    if name not in sample:
        raise ValueError(f"it has no field {name!r}, but {', '.join(sample)}: name that with the text or the messages")
    return sample[name]


def _text(value: Any, name: str) -> str:
    data = value.data if isinstance(value, Encoded) else value
    if isinstance(data, (bytes, memoryview)):
        return str(data, "utf-8")
    if not isinstance(data, str):
        raise ValueError(f"its field {name!r} is {type(data).__name__}, not text (for a list of messages: `chat`)")
    return data


def _eos_of(args: TokenizeArgs, tokenizer: TextTokenizer) -> str | None:
    if not args.eos:
        return None
    if tokenizer.eos is None:
        raise ConfigError(f"tokenize: {args.tokenizer!r} has no token that ends a text: leave `eos` out")
    if args.special_tokens:
        (tokens,) = tokenizer.encode(["a"], specials=True, max_length=None, spans=[()])
        if tokens.ids[-1:].tolist() == [tokenizer.eos_id]:  # it puts one there by itself
            return None
    return tokenizer.eos


def _look_at_padding(stage: StageConfig, batch: StageArgs) -> None:
    """Log a warning for tokens that `batch` pads with another value than their tokenizer's pad token, and for labels that it
    pads with one that a loss would learn. The end token is as good where an attention mask tells the padding."""
    assert isinstance(stage.args, TokenizeArgs)
    assert isinstance(batch, BatchArgs)
    tokenizer = load_tokenizer(stage.args.tokenizer)
    padded = {name: value for name in batch.forms if (value := batch.padding_of(name)) is not None}
    wrong: dict[str, tuple[int, str]] = {}
    for prefix in stage.args.prefixes.values():
        name, labels = f"{prefix}input_ids", f"{prefix}labels"
        is_end = padded.get(name) == tokenizer.eos_id and not {None, name}.isdisjoint(batch.masks.values())
        if name in padded and tokenizer.pad_id not in (None, padded[name]) and not is_end:
            assert tokenizer.pad_id is not None
            why = (
                f"the pad token of its tokenizer (stages.{stage.name}) is {tokenizer.pad_id}: code that looks for the pad "
                "token takes this padding for text"
            )
            wrong[name] = tokenizer.pad_id, why
        if stage.args.mask is not None and padded.get(labels, IGNORED) != IGNORED:
            wrong[labels] = IGNORED, f"a loss leaves out {IGNORED}: it would learn this padding"
    right = ", ".join(
        f"{name}: {value:.15g}" for name, value in {**padded, **{n: v for n, (v, _) in wrong.items()}}.items()
    )
    for name, (_, why) in wrong.items():
        message = "stages.batch.pad_value: %r is padded with %.15g, and %s. Write pad_value: {%s}"
        logger.warning(message, name, padded[name], why, right)


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    assert isinstance(stage.args, TokenizeArgs)
    runner = _TokenizeRunner(stage.args, load_tokenizer(stage.args.tokenizer), context.failed(stage))
    return stage.ready("sample", runner.run)


def _contents(args: TokenizeArgs) -> Mapping[str, str]:
    """What tells the tokens from those of another tokenizer or template, wherever these lie."""
    tokenizer = load_tokenizer(args.tokenizer)
    told = {"tokenizer": tokenizer.digest}
    if args.template is not None:
        template = tokenizer.chat_template(args.template)
        told["template"] = blake2b(template.encode(), digest_size=8).hexdigest()
    return told


TOKENIZE = StageKind(
    TokenizeArgs,
    "sample",
    compile=_compile,
    only_computes=True,
    is_contained=True,
    paths=frozenset({"tokenizer", "template"}),
    contents=_contents,
    look_at_batch=_look_at_padding,
)
