"""`kind: tokens` over what datasets has saved and cached: the rows of one data set, each once."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hf_folders import cached, saved, stream

import loaderkit
from loaderkit.errors import ConfigError, SourceError

Documents = list[list[int]]
TRAIN, TEST, COPY = [[1], [2, 2], [3]], [[4], [5, 5]], [[9, 1], [9, 2, 2], [9, 3]]


@pytest.fixture(autouse=True)
def _cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def table_of(documents: Documents) -> pa.Table:
    return pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})


def copy_of(documents: Documents) -> bytes:
    return stream(table_of(documents), [len(documents)])


def documents_in(folder: Path, url: str = "", **source: Any) -> Documents:
    described = {
        "source": {"kind": "tokens", "url": f"{folder}/{url}", **source},
        "order": {"shuffle": "none", "epochs": 1},
        "stages": ["read", {"batch": {"size": 2, "ragged": {"tokens": "list"}}}],
    }
    with loaderkit.build(described, overrides={"prefetch.executor": "inline"}) as loader:
        return [tokens.tolist() for batch in loader for tokens in batch["tokens"]]


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def splits(tmp_path: Path, rng: random.Random) -> Path:
    """Two splits that were saved together, each mapped since."""
    files = {"dd/dataset_dict.json": json.dumps({"splits": ["train", "test"]}).encode()}
    for split, documents in (("train", TRAIN), ("test", TEST)):
        of_split = saved(table_of(documents), rng) | {"cache-12ab.arrow": copy_of(COPY)}
        files |= {f"dd/{split}/{name}": data for name, data in of_split.items()}
    return put(tmp_path / "data", files)


@pytest.fixture
def prepared(tmp_path: Path, rng: random.Random) -> Path:
    """A configuration in the cache, with two splits, of which one has several files."""
    files = cached(table_of(TEST), rng, split="test") | {"cache-0123456789abcdef.arrow": copy_of(COPY)}
    files |= {f"imdb-train-0000{n}-of-00003.arrow": copy_of([one]) for n, one in enumerate(TRAIN)}
    return put(tmp_path / "data/a/0.0.0/12ab", files)


def test_copies_and_other_splits_are_no_documents(splits: Path) -> None:
    assert documents_in(splits, "dd/train") == TRAIN
    assert documents_in(splits, "dd/train/*.arrow") == TRAIN
    assert documents_in(splits, "dd/train/data*1-of*.arrow") == TRAIN[1:]
    assert documents_in(splits, "dd", include="{test,train}/*.arrow") == TEST + TRAIN  # each is named
    assert documents_in(splits, "dd", include=["train/*.arrow", "test/*.arrow"]) == TEST + TRAIN
    for source in ({}, {"include": "**/*.arrow"}, {"include": "*/*.arrow"}, {"include": "t*/data*"}):
        with pytest.raises(ConfigError, match=r"splits test, train .*url: .*/dd/train"):
            documents_in(splits, "dd", **source)
    for name in ("cache-12ab.arrow", "cache-*.arrow"):
        assert documents_in(splits, f"dd/train/{name}") == COPY
    with pytest.raises(SourceError, match="no data of the data set's"):
        documents_in(splits, "dd/train/c*.arrow")


def test_the_advice_for_a_folder_above_leads_to_the_rows(splits: Path) -> None:
    shutil.rmtree(splits / "dd/test")
    with pytest.raises(SourceError, match=r"as 'dd/train/data-.*include: '\*\*/\*\.arrow'"):
        documents_in(splits)
    assert documents_in(splits, include="**/*.arrow") == TRAIN
    with pytest.raises(ConfigError, match=r"the splits train of .*url: .*/dd/train"):
        documents_in(splits, "dd")


def test_the_cache(prepared: Path) -> None:
    for source in ({}, {"include": "*.arrow"}, {"include": "imdb-*"}):
        with pytest.raises(ConfigError, match=r"splits test, train .*url: .*/imdb-train-\*\.arrow"):
            documents_in(prepared, **source)
    assert documents_in(prepared, include="imdb-train-*.arrow") == TRAIN
    assert documents_in(prepared, include=["imdb-test.arrow", "imdb-train-*.arrow"]) == TEST + TRAIN
    assert documents_in(prepared, include="imdb-test.arrow") == TEST
    (prepared / "cache-34cd.arrow").write_bytes(copy_of(TEST))
    assert documents_in(prepared, include="cache-*") == COPY + TEST
    (prepared / "cache-34cd.arrow").unlink()
    (prepared / "imdb-test.arrow").unlink()
    assert documents_in(prepared) == TRAIN
    assert documents_in(prepared.parents[2], include="**/*.arrow") == TRAIN
    # Without what datasets describes a data set by, a name says nothing.
    (prepared / "dataset_info.json").unlink()
    assert documents_in(prepared) == COPY + TRAIN


def test_a_file_that_is_missing_below_a_glob(splits: Path) -> None:
    (splits / "dd/train/data-00001-of-00002.arrow").unlink()
    for url in ("dd/train", "dd/train/*.arrow", "dd/tr*/d*"):
        with pytest.raises(SourceError, match=r"names 'data-00001-of-00002\.arrow', which is not there"):
            documents_in(splits, url)
    assert documents_in(splits, "dd/train/data-00000*.arrow") == TRAIN[:1]


@pytest.mark.parametrize("include", [None, "*.arrow", "data-*", "data-00000-of-00002.arrow"])
def test_rows_that_were_chosen_without_writing_them_are_refused(
    tmp_path: Path, rng: random.Random, include: str | None
) -> None:
    folder = put(tmp_path / "data", saved(table_of(TRAIN), rng, indices=[2, 0]))
    with pytest.raises(SourceError, match=r"state\.json names indices.*kind: huggingface.*flatten_indices\(\)"):
        documents_in(folder, **({} if include is None else {"include": include}))


@pytest.mark.parametrize(
    "state", [b"", b"[1]", b'{"_data_files": [{"filename": 3}]}', b'{"_data_files": 3}', b"[" * 9999]
)
def test_a_state_of_another_program_says_nothing(tmp_path: Path, state: bytes) -> None:
    assert documents_in(put(tmp_path / "data", {"x.arrow": copy_of(TRAIN), "state.json": state})) == TRAIN


def test_underscored_files_are_hidden(tmp_path: Path) -> None:
    """As for `kind: parquet`; names of other forms say nothing."""
    files = {"a.arrow": copy_of(TRAIN), "_b.arrow": copy_of(TEST), "_temporary/0/c.arrow": copy_of(COPY)}
    folder = put(tmp_path / "data", files)
    assert documents_in(folder) == TRAIN
    assert documents_in(folder, include="**/*.arrow") == TRAIN
    assert documents_in(folder, include="_temporary/**/*.arrow") == COPY
    for number, name in enumerate(files, start=1):
        put(folder, {name.replace("arrow", "bin"): bytes([number, 0])})
    assert documents_in(folder, include="**/*.bin", dtype="uint8", end=0) == [[2, 0], [3, 0], [1, 0]]


@pytest.mark.integration
def test_as_datasets_itself_writes_them(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"input_ids": TRAIN})
    datasets.DatasetDict(train=whole, test=whole.select([0])).save_to_disk(tmp_path / "dd")
    datasets.load_from_disk(tmp_path / "dd").map(lambda row: {"input_ids": [9, *row["input_ids"]]})
    assert [*tmp_path.glob("dd/train/cache-*.arrow")]
    for url in ("dd/train", "dd/train/*.arrow", "dd/tr*/*.arrow"):
        assert documents_in(tmp_path, url) == TRAIN
    for include in (None, "**/*.arrow"):
        with pytest.raises(ConfigError, match="splits test, train"):
            documents_in(tmp_path, "dd", **({} if include is None else {"include": include}))
