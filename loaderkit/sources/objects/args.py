"""The arguments of `kind: dataset`, and the object that they name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_serializer, field_validator

from loaderkit._internal.config.settings import as_tuple
from loaderkit._internal.imports import import_named, is_name
from loaderkit._internal.system.forks import ending_forks
from loaderkit.connectors.config import SourceArgs
from loaderkit.errors import USER_ERRORS, ConfigError
from loaderkit.sources.typed_fields import checked_names


class DatasetArgs(SourceArgs):
    """A Python object with `__len__` and `__getitem__`."""

    kind: Literal["dataset"] = "dataset"
    object: Any = Field(
        description='"package.module:name" of the object or of a function that returns it, or the object'
    )
    args: dict[str, Any] = Field({}, description="keyword arguments, if `object` names a function or class")
    fields: Annotated[tuple[str, ...] | dict[str, str] | None, BeforeValidator(as_tuple)] = Field(
        None,
        description="names for the items of a tuple or list; or field -> key, path of keys, or type, as in {label: "
        "target.label, x: float32, y: target.y int64}: then these are the sample",
    )
    thread_safe: bool | Literal["auto"] = Field(
        "auto",
        description="true: several threads of a process may take items at once; else one does at a time; auto: true for lists, "
        "arrays, tensors and a TensorDataset",
    )

    @field_validator("object")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if not isinstance(value, str):
            cls.check_given(value)
        elif not is_name(value):
            raise ValueError(f'"package.module:name", not {value!r}')
        return value

    @classmethod
    def check_given(cls, value: Any) -> None:
        """Raise ValueError unless `value`, given as an object, is a data set."""
        if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
            raise ValueError(f"an object with __len__ and __getitem__, not {type(value).__name__}")

    @field_validator("args")
    @classmethod
    def _are_used(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and not isinstance(info.data.get("object", ""), str):
            raise ValueError("no arguments, as `object` is not the name of a function that would get them")
        return value

    @field_validator("fields")
    @classmethod
    def _differ(cls, value: tuple[str, ...] | dict[str, str] | None) -> tuple[str, ...] | dict[str, str] | None:
        if isinstance(value, dict):
            return checked_names(value)
        if value is not None and len(set(value)) < len(value):
            raise ValueError("distinct names, as each is one field")
        return value

    @field_serializer("object")
    def _to_path(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(
                f"a {type(value).__name__} given as an object cannot be written to YAML: "
                'give a function that makes it, as "package.module:function"'
            )
        return value


def open_object(args: DatasetArgs, needed: tuple[str, ...] = ("__len__", "__getitem__")) -> Any:
    """The data set object, with the methods `needed`: imported, and called if it is a function or class. Raises
    `ConfigError`."""
    try:
        dataset: Any = import_named(args.object) if isinstance(args.object, str) else args.object
    except USER_ERRORS as error:
        raise ConfigError(
            f"source.object: {args.object!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    is_ready = all(hasattr(dataset, name) for name in needed) and not isinstance(dataset, type)
    if is_ready and args.args:
        raise ConfigError(
            f"source.args: {args.object!r} is a {type(dataset).__name__}, not a function, so nothing takes the arguments "
            f"{', '.join(args.args)}: leave them out, or name a function that takes them"
        )
    if not is_ready and callable(dataset):
        try:
            dataset = ending_forks(dataset)(**args.args)
        except USER_ERRORS as error:
            given = ", ".join(f"{name}={value!r}" for name, value in args.args.items())
            raise ConfigError(
                f"source.object: {args.object!r}, called with ({given}), failed: {type(error).__name__}: {error}"
            ) from error
    if not all(hasattr(dataset, name) for name in needed):
        raise ConfigError(
            f"source.object: {args.object!r} gives {type(dataset).__name__}, which has no {' and '.join(needed)}"
        )
    return dataset
