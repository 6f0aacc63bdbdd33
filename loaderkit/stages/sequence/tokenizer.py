"""A tokenizer of transformers', for any number of threads: loaded once, and never changed after that.

transformers sets the limits of a call in the tokenizer itself, so that two threads with two lengths give wrong samples or an
error ("Already borrowed"). Here the Rust tokenizer has no limits; texts are cut behind it, as it would have cut them.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import USER_ERRORS, ConfigError, MissingExtraError
from loaderkit.stages.sequence.chats import Spans

_PARALLELISM = "TOKENIZERS_PARALLELISM"
_MOST_LOADED = 16  # one for each source of a mixture
_COUNT = range(1 << 62)  # of tokens
Int64 = NDArray[np.int64]
_loaded: OrderedDict[tuple[Any, ...], TextTokenizer] = OrderedDict()
_loading = (
    threading.Lock()
)  # transformers imports its parts at first use, and a second thread would find them half made


def _begin_anew() -> None:
    """In a fork's child: the thread that may have held the lock is not there."""
    global _loading  # noqa: PLW0603 - a property of the process
    _loading = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


class Tokens(NamedTuple):
    """The tokens of a text, int64 [tokens]; for each span of its characters that was asked for, the tokens [begin, end) that
    have one of these characters; and how many tokens were cut."""

    ids: Int64
    parts: Spans
    num_cut: int


def load_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer in a folder, or of that name in the hub's cache or the hub. One that has not changed is loaded once in a
    process. Raises ConfigError, MissingExtraError."""
    key = name, _stamp(name)
    with _loading:
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = TextTokenizer(_load(name))
            while len(_loaded) > _MOST_LOADED:
                _loaded.popitem(last=False)
        _loaded.move_to_end(key)
        return found


def _stamp(name: str) -> tuple[Any, ...]:
    """What tells the files of a folder from what they were."""
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(name)]
    except OSError:
        return ()
    return tuple(sorted((file, status.st_mtime_ns, status.st_size) for file, status in found))


def _load(name: str) -> Any:
    # The loader's own threads tokenize. Else each would wait for a pool of tokenizers', which a fork's child lacks.
    os.environ.setdefault(_PARALLELISM, "false")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f"tokenize needs transformers, which cannot be imported ({error}): pip install 'loaderkit[tokenize]'"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # unset, a terminal would be asked
    except USER_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise ConfigError(
            f"tokenize: {name!r} is no folder with a tokenizer, and none that transformers finds by that name ({reason}): name "
            "one as `save_pretrained` writes it, or of the hub"
        ) from error


class TextTokenizer:
    """Makes tokens of texts."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = tokenizer
        self.template: Any = tokenizer.chat_template
        self.special_tokens: Mapping[str, Any] = tokenizer.special_tokens_map
        self.eos: str | None = tokenizer.eos_token
        self.eos_id: int | None = tokenizer.eos_token_id
        self.pad_id: int | None = tokenizer.pad_token_id
        self.num_specials: int = tokenizer.num_special_tokens_to_add()  # around a text
        self.cuts_left = tokenizer.truncation_side == "left"
        self._lock = threading.Lock()  # of what is Python's
        is_rust = isinstance(tokenizer, PreTrainedTokenizerFast)
        # One that does more than the Rust tokenizer behind it is called as a whole.
        is_plain = is_rust and type(tokenizer)._encode_plus is PreTrainedTokenizerFast._encode_plus
        self._rust: Any = tokenizer.backend_tokenizer if is_plain else None
        if self._rust is not None:
            self._rust.no_truncation()
            self._rust.no_padding()
            self._rust.encode_special_tokens = tokenizer.split_special_tokens
        self.digest = self._digest()

    def _digest(self) -> str:
        """16 hexadecimal digits of all that tokens depend on."""
        vocabulary = self._tokenizer.get_vocab() if self._rust is None else self._rust.to_str()
        parts = [type(self._tokenizer).__name__, vocabulary, self.template, self.special_tokens, self.cuts_left]
        return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()

    def chat_template(self, path: str | None, *, has_tools: bool = False) -> str:
        """The chat template in a file, or the tokenizer's own, of several that for chats with tools, as transformers takes it.
        Raises ConfigError."""
        if path is not None:
            try:
                return Path(path).read_text("utf-8-sig")
            except (OSError, ValueError) as error:
                raise ConfigError(f"tokenize: the chat template {path!r} cannot be read: {error}") from error
        template = self.template
        if isinstance(template, Mapping):
            template = template.get("tool_use" if has_tools and "tool_use" in template else "default")
        if not isinstance(template, str):
            raise ConfigError(
                "tokenize: the tokenizer has no chat template: name a file with one in `template`, or, for plain text, the "
                "field in `text`"
            )
        return template

    def encode(
        self, texts: Sequence[str], *, specials: bool, max_length: int | None, spans: Sequence[Spans]
    ) -> list[Tokens]:
        """The tokens of texts; with `specials` those that the tokenizer puts around each. `spans`: the parts of each text whose
        tokens are to be told. Raises ValueError where that cannot be."""
        if self._rust is None:
            return [self._called(text, specials, max_length, these) for text, these in zip(texts, spans, strict=True)]
        num_specials = self.num_specials if specials else 0
        room = None if max_length is None else max(0, max_length - num_specials)
        # It does not find which characters tokens are of: 240 us a chat of 500 tokens, not 330.
        encode = self._rust.encode_batch if any(spans) else self._rust.encode_batch_fast
        made = []
        for encoding, these in zip(encode(list(texts), add_special_tokens=False), spans, strict=True):
            num_cut = 0 if room is None else max(0, len(encoding) - room)
            if num_cut:
                encoding.truncate(room, direction="left" if self.cuts_left else "right")
            parts = parts_of(encoding, these)
            if num_specials:
                encoding = self._rust.post_process(encoding)  # noqa: PLW2901 - it takes up the other
                parts = _shifted(encoding, parts)
            made.append(Tokens(np.array(encoding.ids, np.int64), parts, num_cut))
        return made

    def _cut(self, tokens: Tokens, max_length: int | None) -> Tokens:
        num_cut = 0 if max_length is None else max(0, len(tokens.ids) - max_length)
        if not num_cut:
            return tokens
        kept = slice(num_cut, None) if self.cuts_left else slice(max_length)
        return Tokens(tokens.ids[kept], self._moved(tokens.parts, 0, num_cut, len(tokens.ids) - num_cut), num_cut)

    def _moved(self, parts: Spans, first: int, num_cut: int, num_kept: int) -> Spans:
        """Where parts are once `num_cut` tokens were cut: behind the `first`, or at the end."""
        if self.cuts_left:
            return [(max(first, begin - num_cut), max(first, end - num_cut)) for begin, end in parts]
        return [(min(begin, num_kept), min(end, num_kept)) for begin, end in parts]

    def _called(self, text: str, specials: bool, max_length: int | None, spans: Spans) -> Tokens:
        """The tokens by a call of the tokenizer, which is Python's."""
        with self._lock:
            ids = self._ids(text, specials)
            first = self._num_leading(text, ids) if specials and spans else 0
            nums = {len(text): len(ids)}
            for border in sorted({border for span in spans for border in span} - {len(text)}):
                nums[border] = first + len(self._prefix(text, border, ids, first))
            tokens = Tokens(ids, [(nums[begin], nums[end]) for begin, end in spans], 0)
            if not specials or max_length is None or len(ids) <= max_length:
                return self._cut(tokens, max_length)
            kept = self._ids(text, specials, max_length)
            num_cut = len(ids) - len(kept)
            return Tokens(kept, self._moved(tokens.parts, first, num_cut, len(kept)), num_cut)

    def _ids(self, text: str, specials: bool, max_length: int | None = None) -> Int64:
        limits = {} if max_length is None else {"truncation": True, "max_length": max_length}
        return np.array(
            self._tokenizer(text, add_special_tokens=specials, verbose=False, **limits)["input_ids"], np.int64
        )

    def _num_leading(self, text: str, ids: Int64) -> int:
        """The special tokens before the text's own."""
        own = self._ids(text, False)
        return next((n for n in range(len(ids) - len(own) + 1) if (ids[n : n + len(own)] == own).all()), 0)

    def _prefix(self, text: str, end: int, ids: Int64, begin: int) -> Int64:
        """The tokens of the first `end` characters, which those of the whole text have to begin with."""
        prefix = self._ids(text[:end], False)
        if not np.array_equal(ids[begin : begin + len(prefix)], prefix):
            raise ValueError(
                f"a token of its text reaches over character {end}, where a part begins that is not to be learned, or ends; "
                "this tokenizer does not say which characters its tokens are of: use a fast one (tokenizer.json)"
            )
        return prefix


def parts_of(encoding: Any, spans: Spans) -> Spans:
    """For each span of a text's characters the tokens [begin, end) that have one of them. No tokens are put around the text.

    The characters that tokens are of ascend, both where they begin and where they end, so that these are found by halving: to
    take those of 500 tokens from Rust costs 58 us.
    """
    num, characters = len(encoding), encoding.token_to_chars

    def begin_of(token: int) -> int:
        begin, end = characters(token)
        if begin == end and token + 1 < num:
            # A space, which is left out of what a token is of. One that the tokenizer puts before a word may be said to be of
            # its first letter, and begins behind that then.
            begin = min(begin, characters(token + 1)[0])
        return int(begin)

    def end_of(token: int) -> int:
        return int(characters(token)[1])

    return [
        (bisect_right(_COUNT, begin, 0, num, key=end_of), bisect_left(_COUNT, until, 0, num, key=begin_of))
        for begin, until in spans
    ]


def _shifted(encoding: Any, parts: Spans) -> Spans:
    """The parts of a text behind what the tokenizer has put before it."""
    num = 0
    while parts and num < len(encoding) and encoding.token_to_sequence(num) is None:
        num += 1
    return [(begin + num, end + num) for begin, end in parts]
