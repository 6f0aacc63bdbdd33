"""Tokens that are padded with another number than the pad token of their tokenizer: `build` warns, where that may matter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import SPECIAL, write_lines, write_tokenizer

import loaderkit

pytestmark = pytest.mark.integration
END, PAD = SPECIAL.index("</s>"), SPECIAL.index("<pad>")


def warnings_of(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    with loaderkit.build(config):
        pass
    return [record.message for record in caplog.records if "pad_value" in record.message]


@pytest.mark.parametrize(
    ("batch", "settings", "said"),
    [
        ({"pad_value": {"input_ids": PAD}}, {}, None),
        ({"pad_value": {"input_ids": 0}}, {}, f"'input_ids' is padded with 0, .* is {PAD}: .*{{input_ids: {PAD}}}"),
        ({"ragged": {"input_ids": "pad"}, "pad_value": 7}, {}, "padded with 7"),
        ({"ragged": {"input_ids": "list"}}, {}, None),
        ({"pad_value": {"input_ids": 0}, "attention_mask": "mask"}, {}, "padded with 0"),
        # The end token as padding: it is the pad token, or a mask tells where text ends.
        ({"pad_value": {"input_ids": END}}, {"pad_token": "</s>"}, None),
        ({"pad_value": {"input_ids": END}, "attention_mask": "mask"}, {}, None),
        ({"pad_value": {"input_ids": END}, "attention_mask": {"mask": "input_ids"}}, {}, None),
        ({"pad_value": {"input_ids": END}}, {}, f"padded with {END}"),
        ({"pad_value": {"input_ids": 0}}, {"pad_token": None}, None),
    ],
)
def test_another_number_is_a_warning(
    tmp_path: Path,
    batch: dict[str, Any],
    settings: dict[str, Any],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenize = {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer", **settings)), "text": "text"}
    data = write_lines(tmp_path / "texts.jsonl", [{"text": "a b"}, {"text": "a"}])
    config = {
        "source": {"kind": "lines", "url": str(data)},
        "stages": ["read", {"tokenize": tokenize}, {"batch": {"size": 2, **batch}}],
    }
    warnings = warnings_of(config, caplog)
    assert len(warnings) == (said is not None)
    assert said is None or re.search(said, warnings[0])


def test_each_of_a_pair_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if they are tokenized by a source's own stages."""
    tokenize = {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer")), "text": ["a", "b"]}
    data = write_lines(tmp_path / "pairs.jsonl", [{"a": "x", "b": "x y z"}] * 4)
    source = {"name": "pairs", "kind": "lines", "url": str(data), "stages": [{"tokenize": tokenize}]}
    batch = {"size": 2, "pad_value": {"a_input_ids": PAD, "b_input_ids": 2}}
    (warning,) = warnings_of({"sources": [source], "stages": ["read", {"batch": batch}]}, caplog)
    assert "'b_input_ids' is padded with 2" in warning


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"pad_value": {"input_ids": PAD, "labels": -100}}, []),
        (
            {"ragged": {"input_ids": "pad", "labels": "pad"}, "pad_value": -100},
            [f"'input_ids' is padded with -100, .* pad_value: {{input_ids: {PAD}, labels: -100}}"],
        ),
        (
            {"pad_value": {"input_ids": PAD, "labels": 0}},
            [f"'labels' is padded with 0, .* pad_value: {{input_ids: {PAD}, labels: -100}}"],
        ),
        (
            {"ragged": {"input_ids": "pad", "labels": "pad"}},
            [
                f"'input_ids' is padded with 0, .*{{input_ids: {PAD}, labels: -100}}",
                f"'labels' is padded with 0, .*{{input_ids: {PAD}, labels: -100}}",
            ],
        ),
    ],
)
def test_what_is_to_be_written_is_right_for_all_fields(
    tmp_path: Path, batch: dict[str, Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenize = {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer")), "text": "text", "mask": "none"}
    data = write_lines(tmp_path / "texts.jsonl", [{"text": "a b"}, {"text": "a"}])
    config = {
        "source": {"kind": "lines", "url": str(data)},
        "stages": ["read", {"tokenize": tokenize}, {"batch": {"size": 2, **batch}}],
    }
    warnings = warnings_of(config, caplog)
    assert len(warnings) == len(said)
    assert all(map(re.search, said, warnings))
