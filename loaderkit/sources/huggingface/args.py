"""The arguments of `kind: huggingface`, and where datasets have their cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from loaderkit._internal.config.settings import ByteSize, as_tuple
from loaderkit.connectors.config import StoreArgs
from loaderkit.sources.arrow.choice import check_names

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def _checked_name(value: str | None) -> str | None:
    if value is not None and not _NAME.fullmatch(value):
        raise ValueError(f"a name on the hub, as stanfordnlp/imdb, not {value!r}; for a folder give `url`")
    return value


def _checked_part(value: str | None) -> str | None:
    if value is not None and ("/" in value or value.startswith(".")):
        raise ValueError(f"a name, not {value!r}")
    return value


class HuggingfaceArgs(StoreArgs):
    """A data set of Hugging Face's datasets on disk: saved by `save_to_disk`, or in the cache that `load_dataset` leaves."""

    kind: Literal["huggingface"] = "huggingface"
    url: str | None = Field(
        None,
        min_length=1,
        description="the folder that `save_to_disk` wrote, or one with the .arrow files of the cache",
    )
    name: Annotated[str | None, AfterValidator(_checked_name)] = Field(
        None,
        description="or the name by which `load_dataset` has prepared it on this machine: it is looked up in the cache of "
        "datasets ($HF_DATASETS_CACHE), and nothing is downloaded",
    )
    config: Annotated[str | None, AfterValidator(_checked_part)] = Field(
        None, min_length=1, description="with `name`: which configuration, if the cache has several"
    )
    split: Annotated[str | None, AfterValidator(_checked_part)] = Field(
        None, min_length=1, description="which split, as train; default: the only one"
    )
    columns: Annotated[Annotated[tuple[str, ...], Field(min_length=1)] | None, BeforeValidator(as_tuple)] = Field(
        None, description="only these columns; default: those of `fields`, or all"
    )
    fields: Annotated[dict[str, str], Field(min_length=1)] | None = Field(
        None,
        description="field -> its column, as in {image: img, label: fine_label}; a column that is not named keeps its name",
    )
    memory: ByteSize = Field(
        2 * 2**30,
        description="bound on the record batches that each loading process holds of a remote store; files on disk are mapped",
    )

    @model_validator(mode="after")
    def _fits(self) -> HuggingfaceArgs:
        if (self.url is None) == (self.name is None):
            raise ValueError(
                "give `url`, the folder of a saved data set, or `name`, that of one in the cache of datasets"
            )
        if self.config is not None and self.name is None:
            raise ValueError("`config` chooses among the cached data sets of one `name`; a folder is given by `url`")
        check_names(self.columns, self.fields)
        return self

    @property
    def root(self) -> str:
        """The connector's root: `url`, or the folder of `name` in the cache."""
        if self.url is not None:
            return self.url
        assert self.name is not None
        namespace, slash, name = self.name.rpartition("/")
        return str(cache_of_datasets() / (namespace + "___" * bool(slash) + _in_snake_case(name)))


def cache_of_datasets() -> Path:
    """Where `load_dataset` prepares data sets: $HF_DATASETS_CACHE, or `datasets` in $HF_HOME, or in ~/.cache/huggingface."""
    given = os.environ.get("HF_DATASETS_CACHE")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "datasets"


def _in_snake_case(name: str) -> str:
    """As datasets name a folder: "CamelCase" is camel_case."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()
