"""The promises of every stage: the same bytes in every executor, exact resuming, arguments that are checked."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loaderkit import Pipeline
from loaderkit._internal.packing import pack, unpack
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import parse
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.testing.runs import EXECUTORS, IN_PROCESSES, assert_resumes, assert_same, epochs_of


class StageContract:
    """A subclass gives `stage`, a name or a mapping {name: arguments} as it stands in a pipeline, and the fixture
    `samples`: the samples that it acts on, as a data set would give them (images as uint8 arrays [H, W, 3]). `batch`
    has the arguments of the stage `batch`, such as `ragged` for images of several sizes."""

    stage: str | Mapping[str, Any]
    batch: Mapping[str, Any] = {"size": 3}

    @pytest.fixture
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """To be given."""
        raise NotImplementedError(f"{type(self).__name__} gives the fixture samples: see StageContract")

    @pytest.fixture
    def pipeline(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A pipeline with the stage, over the samples."""
        around: list[Any] = [{"batch": {**self.batch}}]
        around.insert(1 if STAGES[self.name].scope == "batch" else 0, self.stage)
        source = {"kind": "dataset", "object": [dict(sample) for sample in samples]}
        return {"source": source, "stages": ["read", *around], "order": {"seed": 5}}

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage if isinstance(self.stage, str) else next(iter(self.stage))

    @property
    def arguments(self) -> dict[str, Any]:
        """Its arguments."""
        return {} if isinstance(self.stage, str) else dict(self.stage[self.name])

    # ------------------------------------------------------------------------------------------------- what it makes

    def test_the_same_bytes_whoever_runs_it(self, pipeline: dict[str, Any]) -> None:
        """Also in a second epoch, with other random numbers; and the data set's own values stay as they are."""
        before = deepcopy(pipeline["source"]["object"])
        expected = epochs_of(pipeline, EXECUTORS[0], 2)
        for prefetch in EXECUTORS[1:]:
            assert_same(epochs_of(pipeline, prefetch, 2), expected, f"{prefetch}")
        assert_same(pipeline["source"]["object"], before, "the data set's own samples")

    def test_worker_processes_give_the_same(self, pipeline: dict[str, Any]) -> None:
        assert_same(epochs_of(pipeline, IN_PROCESSES), epochs_of(pipeline, EXECUTORS[0]), "in processes")

    def test_it_resumes_exactly(self, pipeline: dict[str, Any]) -> None:
        assert_resumes(pipeline, EXECUTORS[-1])

    def test_a_sample_does_not_depend_on_its_neighbours(self, pipeline: dict[str, Any]) -> None:
        """In batches of other sizes each sample is the same."""
        if STAGES[self.name].scope != "sample":
            pytest.skip("it acts on batches")
        pipeline["stages"][-1] = {"batch": {**self.batch, "size": 1}}
        alone = {batch["__key__"][0]: batch for batch in epochs_of(pipeline, EXECUTORS[0])}
        pipeline["stages"][-1] = {"batch": {**self.batch, "size": 2}}
        for batch in epochs_of(pipeline, EXECUTORS[0]):
            for row, key in enumerate(batch["__key__"]):
                one = {name: values[row : row + 1] for name, values in batch.items()}
                assert_same([one], [alone[key]], f"sample {key}")

    def test_the_same_behind_decode(self, pipeline: dict[str, Any]) -> None:
        """For pictures that `decode` made, whose memory is used again for later ones, if the stage `is_contained`."""
        source = pipeline["source"]
        if STAGES[self.name].scope != "sample" or not any(_is_picture(value) for value in source["object"][0].values()):
            pytest.skip("it acts on batches, or on no pictures")
        encoded = [{name: _encoded(value) for name, value in sample.items()} for sample in source["object"]]
        behind = {
            **pipeline,
            "source": {**source, "object": 4 * encoded},
            "stages": ["read", "decode", *pipeline["stages"][1:]],
        }
        expected = epochs_of({**pipeline, "source": {**source, "object": 4 * source["object"]}}, EXECUTORS[0])
        for prefetch in EXECUTORS:
            assert_same(epochs_of(behind, prefetch), expected, f"behind decode, {prefetch}")

    # ------------------------------------------------------------------------------------------------- its description

    def test_its_kind_goes_to_other_processes(self) -> None:
        kind = STAGES[self.name]
        assert unpack(*pack(kind)).args is kind.args

    def test_yaml_and_python_describe_the_same(self, samples: Sequence[Mapping[str, Any]]) -> None:
        made = Pipeline.dataset("package:data").read()
        made = getattr(made if STAGES[self.name].scope != "batch" else made.batch(1), self.name)(**self.arguments)
        made = made if STAGES[self.name].scope == "batch" else made.batch(1)
        assert parse(made.config.to_dict()) == made.config
        assert self.name in [stage.kind for stage in made.config.stages]

    def test_an_unknown_argument_is_refused(self, pipeline: dict[str, Any]) -> None:
        wrong = {self.name: {**self.arguments, "wokers": 2}}
        pipeline["stages"] = [wrong if stage == self.stage else stage for stage in pipeline["stages"]]
        with pytest.raises(ConfigError, match=r"unknown key 'wokers'; did you mean 'workers'"):
            parse(pipeline)

    def test_it_has_a_description(self) -> None:
        """Its arguments are described, as the reference and `Pipeline`'s help show them."""
        args = STAGES[self.name].args
        assert args.__doc__
        assert all(field.description for field in args.model_fields.values())


def _is_picture(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def _encoded(value: Any) -> Any:
    """A picture as the bytes of a PNG."""
    if not _is_picture(value):
        return value
    file = io.BytesIO()
    Image.fromarray(value).save(file, "PNG")
    return file.getvalue()
