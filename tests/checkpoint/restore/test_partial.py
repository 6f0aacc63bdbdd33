"""Parts of a checkpoint: names mapped, what is new here kept, what is only there left out, a rank's shards of DTensors."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import same, save_dcp
from deepspeed_folders import write_zero
from hypothesis import given
from hypothesis import strategies as st
from rank_programs import restore_all, run_ranks
from rank_restores import restore_shards

import loaderkit
from loaderkit.checkpoint.restore.renamed import Renaming
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def backbone(head: int = 3) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"body": torch.nn.Linear(4, 5), "head": torch.nn.Linear(5, head)})


class TestStrict:
    def test_new_layers_keep_their_values(self, tmp_path: Path) -> None:
        saved, model = backbone(), backbone()
        safetensors.torch.save_file(saved["body"].state_dict(prefix="body."), tmp_path / "m.safetensors")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        loaderkit.restore(tmp_path / "m.safetensors", into=model.state_dict(), strict={"missing": "head.*"})
        for name, tensor in model.state_dict().items():
            expected = before[name] if name.startswith("head.") else saved.state_dict()[name]
            assert torch.equal(tensor, expected)

    def test_a_head_of_another_shape_keeps_its_values_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        torch.save(backbone(3).state_dict(), tmp_path / "m.pt")
        model = backbone(7)
        before = model.state_dict()["head.weight"].clone()
        with pytest.raises(CheckpointError, match="shape"):
            loaderkit.restore(tmp_path / "m.pt", into=model.state_dict())
        loaderkit.restore(tmp_path / "m.pt", into=model.state_dict(), strict={"missing": ["head.*"]})
        assert torch.equal(model.state_dict()["head.weight"], before)
        assert "head.weight, head.bias have another shape" in caplog.text

    def test_a_missing_pattern_does_not_keep_what_is_there(self, tmp_path: Path) -> None:
        saved, model = backbone(), backbone()
        torch.save(saved.state_dict(), tmp_path / "m.pt")
        loaderkit.restore(tmp_path / "m.pt", into=model.state_dict(), strict={"missing": "*"})
        assert all(map(same, model.state_dict().values(), saved.state_dict().values()))

    def test_what_would_restore_nothing_is_an_error(self, tmp_path: Path) -> None:
        torch.save({f"module.{name}": tensor for name, tensor in backbone().state_dict().items()}, tmp_path / "m.pt")
        strict = {"missing": "*", "unexpected": "*"}
        with pytest.raises(CheckpointError, match="has none of the names in `into`"):
            loaderkit.restore(tmp_path / "m.pt", into=backbone().state_dict(), strict=strict)
        with pytest.raises(ConfigError, match="give `into`"):
            loaderkit.restore(tmp_path / "m.pt", strict=strict)

    def test_only_what_matches_may_be_missing_or_unexpected(self, tmp_path: Path) -> None:
        torch.save({**backbone().state_dict(), "rotary.inv_freq": torch.ones(2), "step": 3}, tmp_path / "m.pt")
        model = backbone().state_dict()
        with pytest.raises(CheckpointError, match="only in the checkpoint") as raised:
            loaderkit.restore(tmp_path / "m.pt", into=model, strict={"unexpected": "*.inv_freq"})
        assert raised.value.unexpected == ("step",)
        loaderkit.restore(tmp_path / "m.pt", into=model, strict={"unexpected": ["*.inv_freq", "step"]})
        model["new"] = torch.ones(1)
        with pytest.raises(CheckpointError, match="missing in the checkpoint") as raised:
            loaderkit.restore(tmp_path / "m.pt", into=model, strict={"unexpected": "*", "missing": "head.*"})
        assert raised.value.missing == ("new",)

    @pytest.mark.parametrize("strict", [{"mising": "a"}, {"missing": [1]}, "head.*", None])
    def test_a_wrong_one_is_named(self, strict: Any, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1)}, tmp_path / "m.pt")
        with pytest.raises(ConfigError, match="strict is"):
            loaderkit.restore(tmp_path / "m.pt", into={"a": torch.ones(1)}, strict=strict)


class TestRename:
    @pytest.mark.parametrize("kind", ["pt", "dcp", "safetensors"])
    def test_what_a_wrapper_added_is_taken_away(self, kind: str, tmp_path: Path) -> None:
        saved, model = backbone(), backbone()
        state = {f"module.{name}": tensor for name, tensor in saved.state_dict().items()}
        path = tmp_path / f"m.{kind}"
        if kind == "pt":
            torch.save(state, path)
        elif kind == "dcp":
            save_dcp(state, path)
        else:
            safetensors.torch.save_file(state, path)
        loaderkit.restore(path, into=model.state_dict(), rename={"module.": ""})
        assert all(map(same, model.state_dict().values(), saved.state_dict().values()))
        body = loaderkit.restore(path, keys="body.*", rename={"module.": ""})
        assert body.keys() == {"body.weight", "body.bias"}
        assert loaderkit.restore(path, rename={"module.": ""}, nested=True).keys() == model.state_dict().keys()

    def test_nested_states_and_versions(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(OrderedDict(norm=torch.nn.BatchNorm1d(3)))
        state = {"model": model.state_dict(), "optimizer": {"state": {0: {"step": 1}}}, "epoch": 2}
        torch.save(state, tmp_path / "m.pt")
        restored = loaderkit.restore(tmp_path / "m.pt", nested=True, rename={"model.": "net.inner."})
        assert restored["optimizer"] == state["optimizer"]
        assert restored["net"].keys() == {f"inner.{name}" for name in model.state_dict()}
        flat = loaderkit.restore(tmp_path / "m.pt", nested=True, rename={"model.": ""})
        assert flat.keys() == {*model.state_dict(), "optimizer", "epoch"}
        whole = loaderkit.restore(tmp_path / "m.pt", nested=True, rename={"model.": "other."})
        torch.nn.Sequential(OrderedDict(norm=torch.nn.BatchNorm1d(3))).load_state_dict(whole["other"])
        assert whole["other"]._metadata["norm"]["version"] == 2

    def test_parts_are_carried_over(self, tmp_path: Path) -> None:
        state = {f"blocks.{n}.mlp.w": torch.full((2,), n) for n in range(3)} | {"blocks.0.norm": torch.ones(1)}
        torch.save(state, tmp_path / "m.pt")
        restored = loaderkit.restore(tmp_path / "m.pt", rename={"blocks.*.mlp.": "layers.*.ffn.", "blocks.": "layers."})
        assert [*restored] == ["layers.0.ffn.w", "layers.1.ffn.w", "layers.2.ffn.w", "layers.0.norm"]
        assert restored["layers.2.ffn.w"].tolist() == [2, 2]

    def test_numbers_that_are_carried_over_stay_numbers(self, tmp_path: Path) -> None:
        torch.save({"optim": {"state": {0: {"m": torch.ones(2)}, 1: {"m": torch.zeros(2)}}}}, tmp_path / "m.pt")
        restored = loaderkit.restore(
            tmp_path / "m.pt", nested=True, rename={"optim.state.*.m": "optimizer.state.*.exp"}
        )
        assert [*restored["optimizer"]["state"]] == [0, 1]

    @pytest.mark.parametrize("kind", ["pt", "dcp"])
    def test_an_optimizers_lists_of_parameters_follow_their_states(self, kind: str, tmp_path: Path) -> None:
        state = {"optim": {"state": {"module.w": {"m": torch.ones(2)}, "b": {"m": torch.zeros(2)}},
                           "param_groups": [{"lr": 0.1, "params": ["module.w", "b"]}]}}  # fmt: skip
        if kind == "pt":
            torch.save(state, tmp_path / "m.pt")
        else:
            save_dcp(state, tmp_path / "m.dcp")
        for rename, names in (
            ({"optim.state.module.": "optim.state."}, ["w", "b"]),
            ({"optim.": "o.", "optim.state.": "o.state.net."}, ["net.module.w", "net.b"]),
            ({"optim.": "o."}, ["module.w", "b"]),
        ):
            restored = loaderkit.restore(tmp_path / f"m.{kind}", rename=rename, nested=True)
            (optimizer,) = restored.values()
            assert optimizer["param_groups"][0]["params"] == names
            assert {*optimizer["state"]} == {*names}

    def test_two_of_one_name_and_one_that_is_not_there(self, tmp_path: Path) -> None:
        torch.save({"a.w": torch.ones(1), "b.w": torch.ones(1)}, tmp_path / "m.pt")
        with pytest.raises(CheckpointError, match=r"'a.w' and 'b.w' the same name, 'b.w'"):
            loaderkit.restore(tmp_path / "m.pt", rename={"a.": "b."})
        with pytest.raises(CheckpointError, match=r"no name that begins with 'modul\.'"):
            loaderkit.restore(tmp_path / "m.pt", rename={"modul.": ""})

    @pytest.mark.parametrize("rename", [{"a": 1}, {"a.*.": "b.*.*."}, ["a"]])
    def test_a_wrong_one_is_named(self, rename: Any, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1)}, tmp_path / "m.pt")
        with pytest.raises(ConfigError, match="rename"):
            loaderkit.restore(tmp_path / "m.pt", rename=rename)

    @given(st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=4), st.data())
    def test_names_and_paths_agree(self, path: list[str], data: st.DataObject) -> None:
        cuts = data.draw(st.lists(st.booleans(), min_size=len(path) - 1, max_size=len(path) - 1))
        keys = [path[0]]
        for cut, part in zip(cuts, path[1:], strict=True):  # some keys of a state have dots in them
            keys[-1:] = [keys[-1], part] if cut else [f"{keys[-1]}.{part}"]
        begin = ".".join(path)[: data.draw(st.integers(1, 8))]
        renaming = Renaming({begin: data.draw(st.sampled_from(["", "c", "c.", "c.d.", "c.d"]))})
        assert ".".join(renaming.path(tuple(keys))) == renaming.name(".".join(keys))


def test_tied_weights_need_one_name(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(6, 4)
    head = torch.nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    weight = torch.randn(6, 4)
    safetensors.torch.save_file({"embedding.weight": weight}, tmp_path / "model.safetensors")
    loaderkit.restore(tmp_path, into=model.state_dict())
    assert torch.equal(head.weight, weight)
    head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):
        loaderkit.restore(tmp_path, into=model.state_dict())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_reads_its_shards(num_ranks: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "model.words.weight": torch.randn(700, 300, generator=generator).bfloat16(),
        "model.scalar": torch.tensor(3.5),
        "model.odd": torch.randn(5, 3, 7, generator=generator).transpose(0, 2),
        "model.few": torch.arange(2),
        "other": torch.ones(3),
    }
    name = ("m.pt", "m.dcp", "m.safetensors")[num_ranks - 1]
    if name.endswith(".pt"):
        torch.save(state, tmp_path / name)
    elif name.endswith(".dcp"):
        save_dcp(state, tmp_path / name)
    else:
        safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / name)
    assert run_ranks(restore_shards, num_ranks, tmp_path, name) == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_restore_what_deepspeed_has_saved(num_ranks: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = [{f"{g}.{n}": torch.randn(n + 3, 5, generator=generator) for n in range(3)} for g in range(2)]
    states = {"exp_avg": {name: tensor * 2 for group in groups for name, tensor in group.items()}}
    write_zero(tmp_path / "step-3", 1 + num_ranks % 3, 4, groups, states, frozen={}, buffers={}, tied={})
    assert run_ranks(restore_all, num_ranks, tmp_path, "step-3") == [0] * num_ranks
