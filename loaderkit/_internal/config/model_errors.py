"""Turns the errors of pydantic into problems with key, line and the nearest right name."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from loaderkit._internal.config.diagnostics import KeyPath, Problems, nearest, say_expected, say_unmet
from loaderkit._internal.config.settings import Model

M = TypeVar("M", bound=Model)


def validate(model: type[M], raw: dict[str, Any], path: KeyPath, problems: Problems) -> M | None:
    """The section that `raw` describes, or None; `problems` gets what is wrong, below the key `path`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        if _restore_texts(raw, error, path, problems):
            return validate(model, raw, path, problems)
        _add_validation_errors(error, model, raw, path, problems)
        return None


def _add_validation_errors(
    error: ValidationError, model: type[Model], raw: dict[str, Any], path: KeyPath, problems: Problems
) -> None:
    expected: dict[KeyPath, list[str]] = {}
    for item in error.errors(include_url=False):
        loc = item["loc"]
        inner, _ = _follow(raw, loc)
        is_model = bool(loc) and _model_at(model, inner) is not _model_at(model, inner[:-1])
        if not loc or (is_model and item["type"] == "value_error"):
            # An error of a model as a whole has a message of its own.
            problems.error((*path, *inner), item["msg"].removeprefix("Value error, "))
        elif item["type"] == "extra_forbidden":
            fields = _model_at(model, inner[:-1]).model_fields
            known = [field.alias or name for name, field in fields.items()]
            problems.error((*path, *inner), f"unknown key {inner[-1]!r}; {nearest(str(inner[-1]), known)}")
        elif item["type"] == "missing" and isinstance(loc[-1], str):
            field = _model_at(model, inner).model_fields.get(loc[-1])
            meaning = f": {field.description}" if field is not None and field.description else ""
            problems.error((*path, *inner), f"{loc[-1]!r} is missing{meaning}")
        elif item["type"] == "missing":  # an item of a list of fixed length: the last such error gives the length
            expected[inner] = [text for text in expected.get(inner, []) if not text.startswith("a list of")]
            expected[inner].append(f"a list of {int(loc[-1]) + 1} items")
        else:
            text = say_expected(item["type"], item["msg"], item.get("ctx", {}))
            texts = expected.setdefault(inner, [])
            if text not in texts:
                texts.append(text)
    for inner, texts in expected.items():
        problems.error((*path, *inner), say_unmet(texts, _follow(raw, inner)[1]))


def _restore_texts(raw: dict[str, Any], error: ValidationError, path: KeyPath, problems: Problems) -> bool:
    """Put back the texts of variables that look like numbers where text is expected. Returns True if there were any."""
    is_changed = False
    for item in error.errors(include_url=False):
        inner, value = _follow(raw, item["loc"])
        text = problems.texts.get((*path, *inner))
        if item["type"] == "string_type" and text is not None and value != text:
            *parents, last = inner
            _, owner = _follow(raw, tuple(parents))
            owner[last] = text
            is_changed = True
    return is_changed


def _follow(raw: Any, loc: tuple[int | str, ...]) -> tuple[KeyPath, Any]:
    """(the part of a pydantic location that is in the data, the value there); the rest names branches of unions."""
    path: KeyPath = ()
    value = raw
    for part in loc:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
        path = (*path, part)
    return path, value


def _model_at(model: type[Model], path: KeyPath) -> type[Model]:
    for part in path:
        field = next((f for name, f in model.model_fields.items() if str(part) in (name, f.alias)), None)
        annotation = None if field is None else field.annotation
        choices = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
        inner = next((item for item in choices if issubclass(item, Model)), None)
        if inner is None:
            return model
        model = inner
    return model
