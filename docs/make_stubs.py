"""Writes loaderkit/pipeline/config/kind_methods.pyi: what editors and type checkers know of `Pipeline`'s made methods.

python docs/make_stubs.py            writes the file
python docs/make_stubs.py --check    says whether it is up to date
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator

from loaderkit.pipeline.config import kind_methods
from loaderkit.pipeline.config.model import ErrorsArgs, MetricsArgs, PrefetchArgs, RanksArgs
from loaderkit.pipeline.config.registry import SOURCES, STAGES

TARGET = Path(kind_methods.__file__).with_suffix(".pyi")

HEAD = '''"""Made from the settings of sources and stages by docs/make_stubs.py; a test keeps it true."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from loaderkit._internal.config.settings import Model

def source_method(kind: str, args: type[Model]) -> Any: ...
def stage_method(kind: str, args: type[Model]) -> Callable[..., Any]: ...
def plain(values: Mapping[str, Any]) -> dict[str, Any]: ...

class KindMethods:
'''

INSTEAD = {"parse_bytes": "int | str", "parse_seconds": "float | str"}
"""Name of a validator -> the type that it takes, for those that make something else of it."""
BESIDE = {
    **dict.fromkeys(("as_tuple", "_share_range", "_with_formats"), ""),
    **dict.fromkeys(("_factor_range", "_hue_range", "_angle_range", "_sigma_range"), "float"),
    "_as_list": "str",
    "_shuffle_mode": "bool",
    "_address": "",
}
"""Name of a validator -> what it takes beside the type it stands before. A list is taken wherever a tuple is."""
PATHS = ("url", "quarantine", "tokenizer", "template")


def accepted(annotation: Any, metadata: tuple[Any, ...] = ()) -> list[str]:
    """The types that a setting takes, as they are written in a stub."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return accepted(parts[0], (*metadata, *parts[1:]))
    names = [getattr(item.func, "__name__", "") for item in metadata if isinstance(item, BeforeValidator)]
    for name in names:
        if name in INSTEAD:
            return [INSTEAD[name]]
    beside = [BESIDE[name] for name in names if BESIDE[name]]
    if origin in (typing.Union, types.UnionType):
        return list(dict.fromkeys([*beside, *(name for part in parts for name in accepted(part))]))
    return [*beside, *_plain_type(annotation, origin, parts)]


def _plain_type(annotation: Any, origin: Any, parts: tuple[Any, ...]) -> list[str]:
    if origin is typing.Literal:
        return [f"Literal[{', '.join(map(repr, parts))}]"]
    if origin is tuple:
        items = [" | ".join(accepted(part)) for part in parts if part is not Ellipsis]
        if Ellipsis not in parts:
            return [f"tuple[{', '.join(items)}]", f"list[{items[0]}]"]
        # A text is a sequence of texts, too.
        return ["tuple[str, ...]", "list[str]"] if items == ["str"] else [f"Sequence[{items[0]}]"]
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):
        return [f"Mapping[{', '.join(' | '.join(accepted(part)) for part in parts)}]"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["Mapping[str, Any]"]
    if str(origin).endswith("Callable'>"):
        return ["Callable[..., Any]"]
    return ["None" if annotation is type(None) else annotation.__name__ if isinstance(annotation, type) else "Any"]


def stub(name: str, args: type[BaseModel], *, is_source: bool = False) -> str:
    """One method, as the stub has it."""
    method = inspect.getattr_static(kind_methods.KindMethods, name)
    made = method.__func__ if is_source else method
    hints = typing.get_type_hints(args, include_extras=True)
    lines, is_by_name = [], False
    for parameter in list(inspect.signature(made).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_by_name:
            lines, is_by_name = [*lines, "*"], True
        types_of_it = accepted(hints[parameter.name])
        if parameter.name in PATHS:
            listed = ["Sequence[os.PathLike[str]]"] * ("list[str]" in types_of_it)
            types_of_it = [*types_of_it[:1], "os.PathLike[str]", *types_of_it[1:], *listed]
        is_given = parameter.default is not parameter.empty
        lines.append(
            f"{parameter.name}: {' | '.join(types_of_it)}" + (f" = {_default(parameter.default)}" if is_given else "")
        )
    head = ("@classmethod\n" if is_source else "") + f"def {name}("
    signature = ",\n".join(["cls" if is_source else "self", *lines])
    return textwrap.indent(f'{head}{signature}) -> Self:\n    """{_doc(made)}\n    """\n', "    ")


def _default(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else "..."


def _doc(method: Any) -> str:
    return textwrap.indent(method.__doc__.replace("\\", "\\\\"), "    ").strip()


def render() -> str:
    """The whole file, as ruff formats it."""
    parts = [stub(kind, source.args, is_source=True) for kind, source in SOURCES.ours.items()]
    parts += [stub(kind, stage.args) for kind, stage in STAGES.ours.items()]
    parts += [stub("prefetch", PrefetchArgs), stub("errors", ErrorsArgs), stub("ranks", RanksArgs)]
    parts += [stub("metrics", MetricsArgs)]
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    text = HEAD + "\n".join(parts)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
