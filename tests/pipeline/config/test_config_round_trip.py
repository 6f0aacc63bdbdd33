"""YAML, dicts and `Pipeline` describe the same frozen config, and any of them can be written and read again."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_cases import Letters, double
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from pydantic import ValidationError

import loaderkit
from loaderkit import Pipeline
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.parsing import load_yaml, parse


def test_yaml_dict_and_pipeline_are_one_config(write: Callable[[str], Path], tmp_path: Path) -> None:
    text = """\
name: all
source: {kind: files, url: URL, include: ["**/*.jpg", "**/*.png"], label: parent, limit: 100}
order: {shuffle: block, seed: 4, epochs: 3, block: {block: 4MiB, window: 2, lanes: 2}}
stages:
  - read: {workers: 2}
  - decode: {exif_orientation: true}
  - random_resized_crop: {size: [30, 40], scale: [0.1, 1.0]}
  - random_horizontal_flip
  - color_jitter: {brightness: 0.4, hue: [-0.1, 0.2]}
  - call: {function: "config_cases:double", args: {factor: 3}}
  - batch: {size: 8, drop_last: true}
  - transfer: {device: cpu}
  - normalize: {mean: [0.5, 0.5, 0.5], std: imagenet}
prefetch: {batches: 2, memory: 64MiB, concurrency: 3, timeout: 5min}
errors: {on_bad_sample: skip, max_bad_samples: 3}
output: [image, label]
""".replace("URL", str(tmp_path / "data"))
    of_yaml = load_yaml(write(text))
    of_dict = parse(from_yaml(text))
    made = (
        Pipeline.files(tmp_path / "data", include=("**/*.jpg", "**/*.png"), label="parent", limit=100)
        .named("all")
        .shuffle("block", seed=4, block="4MiB", window=2, lanes=2)
        .epochs(3)
        .read(workers=2)
        .decode(exif_orientation=True)
        .random_resized_crop((30, 40), scale=(0.1, 1.0))
        .random_horizontal_flip()
        .color_jitter(0.4, hue=(-0.1, 0.2))
        .call("config_cases:double", {"factor": 3})
        .batch(8, drop_last=True)
        .transfer("cpu")
        .normalize(mean=(0.5, 0.5, 0.5), std="imagenet")
        .prefetch(batches=2, memory="64MiB", concurrency=3, timeout="5min")
        .errors(on_bad_sample="skip", max_bad_samples=3)
        .output("image", "label")
    )
    assert of_yaml == of_dict == made.config
    assert Pipeline.of(of_yaml) == made
    assert parse(made.config.to_dict()) == made.config
    assert parse(made.config.to_dict(defaults=True)) == made.config
    for defaults in (False, True):
        path = write(made.to_yaml(defaults=defaults))
        assert Pipeline.from_yaml(path) == made
        assert Pipeline.from_yaml(path).config == made.config


# ------------------------------------------------------------------------------------------ any pipeline, round trip

TEXTS = st.one_of(
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
    st.sampled_from(
        ["${HOME}", "$${HOME}", "${", "${1}", "$$${X:-y}", "a${X", "${X:-}", "$", "null", "yes", "1e3", "~", "2020-01-01",
         "- a", "a: b", "#x", "'", '"', "\n", "é中😀", " lead", "%", "@x", "\x85", "\u2028", "0x1f", "1_000", "=", "<<"]
    ),
)  # fmt: skip
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SIZE = st.integers(1, 500) | st.lists(st.integers(1, 500), min_size=2, max_size=2)
FIELDS = st.none() | st.lists(TEXTS, min_size=1, max_size=2)
POSITIVE = st.floats(1e-3, 1e3)
RANGE = st.tuples(POSITIVE, POSITIVE).map(sorted)
UNIT = st.floats(0, 1)
FACTOR = st.floats(0, 5) | RANGE
BOXES = {"corners: é": "xyxy", "#": "cxcywh"}
CHANNELS = st.just("imagenet") | st.lists(st.floats(0.01, 2), min_size=3, max_size=3)


def some(required: dict[str, Any] | None = None, **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required or {}, optional=optional)


COMMON: dict[str, Any] = {"workers": st.just("auto") | st.integers(1, 9)}
STAGES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "resize": some({"size": SIZE}, interpolation=st.sampled_from(["bilinear", "bicubic", "nearest"]),
                   antialias=st.booleans(), fields=FIELDS, **COMMON),
    "center_crop": some({"size": SIZE}, fields=FIELDS, **COMMON),
    "random_crop": some({"size": SIZE}, padding=st.integers(0, 9), pad_if_needed=st.booleans(),
                        fill=st.integers(0, 255), fields=FIELDS, **COMMON),
    "random_resized_crop": some({"size": SIZE}, scale=st.tuples(UNIT, UNIT).map(sorted), ratio=RANGE, fields=FIELDS,
                                antialias=st.booleans(), **COMMON),
    "random_horizontal_flip": some(p=UNIT, fields=FIELDS, **COMMON),
    "color_jitter": some(brightness=FACTOR, contrast=FACTOR, saturation=FACTOR, hue=st.floats(0, 0.5), fields=FIELDS,
                         **COMMON),
    "random_vertical_flip": some(p=UNIT, fields=FIELDS, **COMMON),
    "random_rotation": some({"degrees": st.floats(0, 360) | st.tuples(st.floats(-9, 0), UNIT).map(list)},
                            interpolation=st.sampled_from(["nearest", "bilinear"]), expand=st.booleans(), **COMMON),
    "random_grayscale": some(p=UNIT, fields=FIELDS, **COMMON),
    "gaussian_blur": some({"kernel_size": st.sampled_from([1, 3, 23])}, sigma=POSITIVE | RANGE, fields=FIELDS, **COMMON),
    "random_erasing": some(p=UNIT, scale=st.tuples(UNIT, UNIT).map(sorted), ratio=RANGE, fields=FIELDS,
                           value=st.just("random") | st.integers(0, 255) | st.just([0, 128, 255]), **COMMON),
    "sanitize_boxes": some({"labels": st.lists(TEXTS, max_size=2), "boxes": st.just("#")}, min_size=POSITIVE,
                           min_area=POSITIVE, **COMMON),
    "call": some({"function": st.just("config_cases:double")}, args=st.dictionaries(TEXTS, JSON, max_size=3), **COMMON),
}  # fmt: skip
SOURCES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    some({"kind": st.just("files"), "url": TEXTS.filter(lambda t: t and not t.startswith("~"))},
         label=st.sampled_from(["parent", "none"]), limit=st.none() | st.integers(1, 10**9)),
    some({"kind": st.just("tar"), "url": st.just("s3://b/${X}")},
         fields=st.just({"image": "jpg;png", "é": "txt"}), limit=st.integers(1, 10**9)),
    some({"kind": st.just("dataset"), "object": st.just("config_cases:Letters")}, args=st.dictionaries(TEXTS, JSON, max_size=2),
         fields=st.none() | st.lists(TEXTS, min_size=1, max_size=3, unique=True)),
)  # fmt: skip


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(sorted(STAGES)), max_size=4))
    stages: list[Any] = ["read"]
    # A call before, so that nothing is known about the fields and any of them may be named.
    stages.append({"call": {"function": "config_cases:double"}})
    if draw(st.booleans()):
        stages.append(
            {
                "decode": draw(
                    some(
                        masks=FIELDS,
                        boxes=st.just(BOXES),
                        keypoints=st.just(["- eyes", "ears"]),
                        fields=FIELDS,
                        exif_orientation=st.booleans(),
                        max_pixels=st.integers(1, 10**8),
                        formats=st.lists(st.sampled_from(["jpeg", "png", "avif"]), min_size=1),
                    )
                )
            }
        )
    has_boxes = any("boxes" in stage["decode"] for stage in stages if "decode" in stage)
    for kind in kinds:
        if kind == "sanitize_boxes" and not has_boxes:
            continue
        args = draw(STAGES[kind])
        is_bare = draw(st.booleans()) and not args
        stages.append(kind if is_bare else {kind: args})
    batch = draw(
        some({"size": st.integers(1, 999)}, drop_last=st.booleans(), pad_value=st.floats(allow_nan=False), **COMMON,
             ragged=st.dictionaries(TEXTS, st.sampled_from(["list", "pad"]), max_size=2))
    )  # fmt: skip
    stages.append({"batch": batch})
    if draw(st.booleans()):
        stages.append({"transfer": {"device": draw(st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]))}})
    if draw(st.booleans()):
        stages.append(
            {
                "normalize": draw(
                    some(mean=CHANNELS, std=CHANNELS, dtype=st.sampled_from(["float16", "float32"]), fields=FIELDS)
                )
            }
        )
    source = draw(SOURCES)
    found: dict[str, Any] = {"source": source, "stages": stages}
    if draw(st.booleans()):
        found["name"] = draw(TEXTS)
    modes = ["global", "none"] if source["kind"] == "dataset" else ["global", "none", "block"]
    found["order"] = draw(
        some(shuffle=st.sampled_from(modes), seed=st.integers(0, 2**64), epochs=st.none() | st.integers(1, 99),
             block=some(block=st.integers(1, 2**50), window=st.integers(1, 99), lanes=st.integers(1, 99)))
    )  # fmt: skip
    found["prefetch"] = draw(
        some(batches=st.integers(1, 99), memory=st.integers(1, 2**50), timeout=st.floats(1e-6, 1e9),
             concurrency=st.just("auto") | st.integers(1, 99), executor=st.sampled_from(["inline", "thread"]))
    )  # fmt: skip
    found["errors"] = draw(
        some(on_bad_sample=st.sampled_from(["raise", "skip", "replace"]), max_bad_samples=st.integers(0, 10**6),
             quarantine=st.none() | TEXTS.filter(lambda t: t and not t.startswith("~")))
    )  # fmt: skip
    if draw(st.booleans()):
        found["output"] = draw(st.lists(TEXTS, min_size=1, max_size=3))
    return found


@given(descriptions(), st.booleans())
@settings(max_examples=num_examples(100), suppress_health_check=list(HealthCheck))
def test_yaml_round_trip(tmp_path_factory: pytest.TempPathFactory, description: dict[str, Any], defaults: bool) -> None:
    check_round_trip(tmp_path_factory.getbasetemp(), description, defaults)


@pytest.mark.prove
@given(descriptions(), st.booleans())
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
def test_yaml_round_trip_of_many(
    tmp_path_factory: pytest.TempPathFactory, description: dict[str, Any], defaults: bool
) -> None:
    check_round_trip(tmp_path_factory.getbasetemp(), description, defaults)


def check_round_trip(folder: Path, description: dict[str, Any], defaults: bool) -> None:
    before = copy.deepcopy(description)
    config = parse(description, expand=False)
    assert description == before
    assert parse(config.to_dict(defaults=defaults), expand=False) == config
    path = folder / "round-trip.yaml"
    text = config.to_yaml(defaults=defaults)
    path.write_text(text, encoding="utf-8", newline="")
    again = load_yaml(path)
    assert again == config, text
    assert again.to_yaml(defaults=defaults) == text


@pytest.mark.parametrize("value", ["${", "${1}", "a${b", "$${", "$$${X}", "${X:-", "${é}", "$$${"])
def test_texts_that_are_nearly_variables(value: str, write: Callable[[str], Path]) -> None:
    description = {
        "name": value,
        "source": {"kind": "files", "url": "data"},
        "stages": ["read", {"call": {"function": "config_cases:double", "args": {"x": value}}}, {"batch": {"size": 4}}],
    }
    config = parse(description, expand=False)
    assert config.name == value
    assert load_yaml(write(config.to_yaml())) == config


@pytest.mark.parametrize(
    "value", [(1, 2), datetime.date(2020, 1, 1), {1: "one"}, b"bytes", {"a", "b"}, math.inf, [(1, (2,))]]
)
def test_arguments_of_calls_come_back_or_are_refused(value: Any, write: Callable[[str], Path]) -> None:
    config = Pipeline.files("data").read().call("config_cases:double", {"x": value}).batch(4).config
    try:
        text = config.to_yaml()
    except ConfigError as error:
        assert "YAML" in str(error)  # noqa: PT017 - refusing is fine, changing the value is not
    else:
        assert load_yaml(write(text)) == config


def test_what_no_file_can_name() -> None:
    for made in (
        Pipeline.files("data").read().call(lambda sample: sample).batch(4),
        Pipeline.dataset(Letters()).read().batch(4),
    ):
        assert isinstance(made.config, PipelineConfig)
        with pytest.raises(ConfigError, match="cannot be written"):
            made.to_yaml()


def test_arguments_of_an_object_that_is_ready() -> None:
    with pytest.raises(ConfigError, match=r"source\.args: expected no arguments, as `object` is not the name.*'num'"):
        _ = Pipeline.dataset(Letters(), args={"num": 3}).read().batch(2).config
    assert Pipeline.dataset(Letters(), args={}).read().batch(2).config


def test_a_function_is_written_by_its_name(write: Callable[[str], Path]) -> None:
    made = Pipeline.files("data").read().call(double, args={"factor": 3}).batch(4)
    text = made.to_yaml()
    assert f"{double.__module__}:double" in text
    assert load_yaml(write(text)).stage("call").args.model_dump()["function"] == f"{double.__module__}:double"


def test_pipelines_never_change() -> None:
    base = Pipeline.files("data").read()
    first, second = base.batch(4), base.decode().batch(8)
    assert [stage.name for stage in first.config.stages] == ["read", "batch"]
    assert [stage.name for stage in second.config.stages] == ["read", "decode", "batch"]
    assert first.shuffle(seed=3).config.order.seed == 3
    assert first.config.order.seed == 0
    assert first.prefetch(batches=2).prefetch(memory="1MiB").config.prefetch.batches == 2
    assert first.config.prefetch.batches == 4
    assert first.shuffle("block", lanes=2).epochs(3).config.order.block.lanes == 2
    assert first != second
    assert first == Pipeline.files("data").read().batch(4)
    assert hash(first) == hash(Pipeline.files("data").read().batch(4))
    assert first.errors(on_bad_sample="skip").config.errors.on_bad_sample == "skip"


def test_later_changes_of_what_was_given_do_not_reach_the_pipeline() -> None:
    args, include = {"factor": 1}, ["*.jpg"]
    made = Pipeline.files("data", include=include).read().call("config_cases:double", args=args).batch(4)
    args["factor"] = 2
    include.append("*.png")
    assert made.config.stage("call").args.model_dump()["args"] == {"factor": 1}
    assert made.config.source.model_dump()["include"] == ("*.jpg",)
    description: dict[str, Any] = {
        "source": {"kind": "files", "url": "data"},
        "stages": ["read", {"call": {"function": "config_cases:double", "args": {"x": [1]}}}, {"batch": {"size": 4}}],
    }
    config = parse(description)
    description["stages"][1]["call"]["args"]["x"].append(2)
    assert config.stage("call").args.model_dump()["args"] == {"x": [1]}


def test_configs_are_frozen() -> None:
    config = Pipeline.files("data").read().batch(4).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "x"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stages[0].name = "x"  # type: ignore[misc]
    for model, name in (
        (config.order, "seed"),
        (config.prefetch, "batches"),
        (config.source, "limit"),
        (config.errors, "quarantine"),
    ):
        with pytest.raises(ValidationError):
            setattr(model, name, 1)
    with pytest.raises(ValidationError):
        setattr(config.stages[1].args, "size", 3)  # noqa: B010
    assert isinstance(config.stages, tuple)


def test_positional_arguments() -> None:
    base: Any = Pipeline.files("data").read().decode()
    args = base.random_resized_crop(30, (0.5, 1.0)).resize(20, "bicubic", False).batch(4, True).config
    assert args.stage("random_resized_crop").args.model_dump()["scale"] == (0.5, 1.0)
    assert args.stage("resize").args.model_dump(include={"size", "interpolation", "antialias"}) == {
        "size": 20,
        "interpolation": "bicubic",
        "antialias": False,
    }
    assert args.stage("batch").args.model_dump()["drop_last"] is True
    with pytest.raises(ConfigError, match="center_crop takes 2 arguments"):
        base.center_crop(1, 2, 3)
    with pytest.raises(ConfigError, match="size given twice"):
        base.center_crop(1, size=3)
    with pytest.raises(AttributeError, match=r"no stage 'resise'.*did you mean 'resize'"):
        base.resise(3)
    with pytest.raises(AttributeError):
        _ = base._repr_html_
    with pytest.raises(AttributeError, match=r"did you mean 'shuffle'"):
        base.shufle()
    with pytest.raises(ConfigError, match=r"files takes 1 arguments by position \(url\), not 2"):
        files: Any = Pipeline.files
        files("data", "**/*.jpg")


def test_errors_of_a_pipeline_are_config_errors() -> None:
    for made, said in (
        (Pipeline.files("data").read().decode(), "no `batch`"),
        (Pipeline.files("data").read().batch(0), "greater than 0"),
        (Pipeline.files("data", lable="parent").read().batch(4), "did you mean 'label'"),  # type: ignore[call-arg]
        (Pipeline.dataset(3).read().batch(4), "__len__"),
        (Pipeline.files("data").read().batch(4).shuffle("blok"), "'blok'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            _ = made.config
        with pytest.raises(ConfigError):
            loaderkit.build(made)


def test_a_pipeline_shows_itself() -> None:
    made = Pipeline.files("data").named("x").read().batch(4)
    assert repr(made) == "Pipeline('x': files -> read, batch)"


def test_pipelines_copy_and_pickle() -> None:
    import pickle

    made = Pipeline.files("data").read().decode().batch(4)
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.copy(made) == copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made.config)) == made.config
