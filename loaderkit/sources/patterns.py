"""Braces and glob patterns in file names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable
from unicodedata import normalize

_MAX_PATTERNS = 1_000_000


_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([A-Za-z])\.\.([A-Za-z])")


def expand_braces(pattern: str) -> list[str]:
    """The shell's expansion of "{a,b}", "{000..099}" (zeros kept), "{0..8..2}" and "{a..f}", also nested, in its order.

    Braces with neither a comma nor a range stay as they are. Raises ValueError beyond a million results.
    """
    open_at, close_at = _first_braces(pattern)
    if close_at < 0:
        return [pattern]
    before, body = pattern[:open_at], pattern[open_at + 1 : close_at]
    options = _range(body)
    if options is None:
        parts = _split_commas(body)
        options = [text for part in parts for text in expand_braces(part)]
        if len(parts) == 1:
            options = [f"{{{text}}}" for text in options]
    tails = expand_braces(pattern[close_at + 1 :])
    if len(options) * len(tails) > _MAX_PATTERNS:
        raise ValueError(f"{pattern!r} stands for more than {_MAX_PATTERNS} names")
    return [before + text + tail for text in options for tail in tails]


def _first_braces(pattern: str) -> tuple[int, int]:
    """The indices of the first closed pair of braces; -1 if there is none."""
    for start in range(len(pattern)):
        depth = 0
        for index in range(start, len(pattern) if pattern[start] == "{" else start):
            depth += {"{": 1, "}": -1}.get(pattern[index], 0)
            if depth == 0:
                return start, index
    return -1, -1


def _split_commas(body: str) -> list[str]:
    parts, depth = [""], 0
    for char in body:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _range(body: str) -> list[str] | None:
    match = _RANGE.fullmatch(body)
    if match is None:
        return None
    low, high = (ord(match[4]), ord(match[5])) if match[4] else (int(match[1]), int(match[2]))
    step = abs(int(match[3] or 1)) or 1
    if abs(high - low) // step >= _MAX_PATTERNS:
        raise ValueError(f"{{{body}}} stands for more than {_MAX_PATTERNS} names")
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    if match[4]:
        return [chr(code) for code in numbers]
    has_zeros = any(re.match(r"-?0\d", text) for text in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if has_zeros else 0
    return [f"{number:0{width}d}" for number in numbers]


_OF_SYSTEMS = ("@eaDir", "#recycle", "#snapshot", "__MACOSX")
"""Folders that a NAS or an operating system leaves behind: thumbnails, deleted files."""
_HIDDEN = re.compile(rf"(?:^|/)(?:\.|(?:{'|'.join(_OF_SYSTEMS)})/)")


def is_hidden(key: str) -> bool:
    """True if a part of a key begins with a dot, or is a folder that systems leave behind."""
    return _HIDDEN.search(key) is not None


def said_of_form(name: str, others: Iterable[str]) -> str:
    """A sentence for messages if one of `others` is the same name in another Unicode form, as macOS and Linux write it;
    else ""."""
    composed = normalize("NFC", name)
    for other in others:
        if other != name and normalize("NFC", other) == composed:
            form = "NFC" if other == composed else "NFD"
            return (
                f" (there is the same name in another Unicode form, {form}: {other.encode()!r}, not {name.encode()!r})"
            )
    return ""


class Patterns:
    """Globs over whole keys, case-sensitive: `**` any number of directories, `*` `?` `[..]` inside one, and braces.

    A part of a key that starts with a dot is matched only by a part of a pattern that does, and a folder that a NAS
    leaves behind (`@eaDir`) only by its name. A pattern that is written exactly like a key matches this key.
    """

    def __init__(
        self, patterns: str | Iterable[str], exact: Container[str] = (), *, underscored: str | None = None
    ) -> None:
        """`exact`: the patterns that are names and no globs. `underscored`: how keys end (a regular expression) of which parts
        that begin with `_` and hold no `=` are hidden, too: Spark writes there what it has not committed yet."""
        self._underscored = underscored
        self.written = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        expanded = dict.fromkeys(
            itertools.chain.from_iterable([text] if text in exact else expand_braces(text) for text in self.written)
        )
        self._literals = {text for text in expanded if text in exact or not re.search(r"[*?\[]", text)}
        self._globs = {
            text: re.compile(_regex(text, underscored), re.DOTALL) for text in expanded if text not in self._literals
        }
        self._order = list(expanded)
        heads = [re.split(r"[*?\[]", text, maxsplit=1)[0] for text in expanded]
        # The common prefix of the least and the greatest head is the common prefix of all.
        low, high = min(heads), max(heads)
        same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
        self.prefix = low[:same]

    def __str__(self) -> str:
        return ", ".join(map(repr, self.written))

    def matches(self, key: str) -> bool:
        """True if any pattern matches the whole key."""
        return key in self._literals or key in self.written or any(glob.fullmatch(key) for glob in self._globs.values())

    def narrowed(self, keys: Iterable[str]) -> Patterns:
        """The same patterns, except that a pattern which is the name of one of `keys` matches only this one."""
        exact = {key for key in keys if key in self.written} - self._literals
        return Patterns(self.written, exact, underscored=self._underscored) if exact else self

    def stem(self, key: str) -> str | None:
        """What the wildcards of the first matching pattern have matched, without an extension; None if no pattern matches.

        `images/**/*.jpg` and `images/*/*.jpg` give "a/007" for images/a/007.jpg, `masks/*_mask.png` gives "007" for
        masks/007_mask.png, and `images/*` gives "007" for images/007.jpg.
        """
        if key in self._literals:
            return ""
        for text, glob in self._globs.items():
            if match := glob.fullmatch(key):
                texts = [group.strip("/") for group in match.groups()]
                if text.endswith(".*"):
                    texts.pop()
                elif text.endswith("*"):
                    texts[-1] = texts[-1].rpartition(".")[0] or texts[-1]
                return "/".join(filter(None, texts))
        return None

    @property
    def names(self) -> list[str] | None:
        """All names that can match, with braces expanded, in the order given; None if there are wildcards."""
        return None if self._globs else self._order

    def is_name(self, text: str) -> bool:
        """True if one of the patterns, with braces expanded, is the name of one object."""
        return text in self._literals

    def without_match(self, keys: Iterable[str]) -> list[str]:
        """The patterns, with braces expanded, that match none of `keys`, in the order given."""
        existing = set(keys)
        return [
            text
            for text in self._order
            if not (text in existing if text in self._literals else any(map(self._globs[text].fullmatch, existing)))
        ]


_NOT_HIDDEN = rf"(?!\.|(?:{'|'.join(_OF_SYSTEMS)})/)"
_WILDCARD = r"[*?]|\[[!^]?\]?[^\]]*\]"


def _regex(pattern: str, underscored: str | None) -> str:
    """The regular expression of a glob, with a group for every run of wildcards."""
    not_hidden = _NOT_HIDDEN
    if underscored is not None:
        not_hidden += rf"(?!(?=.*(?:{underscored})\Z)_[^/=]*(?:/|\Z))"
    parts = pattern.split("/")
    regex = ""
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if part == "**":
            # A key of a bucket may have an empty part, as in "a//b".
            regex += rf"((?:{not_hidden}[^/]*/)*" + (rf"{not_hidden}[^/]+)" if is_last else ")")
            continue
        if not part.startswith(".") and part not in _OF_SYSTEMS:
            regex += _NOT_HIDDEN if part.startswith("_") else not_hidden
        for run in re.findall(f"(?:{_WILDCARD})+|.", part, re.DOTALL):
            is_wild = run in "*?" or len(run) > 1
            regex += f"({re.sub(_WILDCARD, _wildcard, run)})" if is_wild else re.escape(run)
        regex += "" if is_last else "/"
    return regex


def _wildcard(match: re.Match[str]) -> str:
    token = match[0]
    if token in ("*", "?"):
        return "[^/]" + token.replace("?", "")
    negated = token[1] in "!^"
    body = re.sub(r"[\[\]\\&~|]", r"\\\g<0>", token[2 if negated else 1 : -1])
    return f"(?!/)[{'^' if negated else ''}{body}]"
