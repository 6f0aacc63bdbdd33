"""Folders with files of several formats, as frameworks write them: what belongs to the checkpoint, and what does not, is told
or named."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_states import save_dcp

import loaderkit
from loaderkit.checkpoint.save.copy import copy_checkpoint
from loaderkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")
BESIDE = [
    "optimizer.pt",
    "scheduler.pt",
    "rng_state_0.pth",
    "training_args.bin",
    "optimizer_1.bin",
    "scaler.pt",
    "common.pt",
]


def drawn(rng: random.Random, prefix: str = "w") -> dict[str, torch.Tensor]:
    return {f"{prefix}{n}": torch.full((rng.randrange(1, 9),), rng.random()) for n in range(rng.randrange(2, 6))}


def save_beside(folder: Path, rng: random.Random) -> list[str]:
    names = rng.sample(BESIDE, rng.randrange(1, 4))
    for name in names:
        torch.save({"state": {}, "last_epoch": 3}, folder / name)
    return names


def save_shards(folder: Path, stem: str, state: dict[str, torch.Tensor], rng: random.Random) -> str:
    """The name of the index of shards of a state. Each shard has a tensor that the index does not name."""
    suffix = ".safetensors" if not stem.startswith("pytorch") else ".bin"
    files: dict[str, dict[str, torch.Tensor]] = {f"{stem}-{n:05d}-of-00002{suffix}": {} for n in (1, 2)}
    where = {name: list(files)[number % 2] for number, name in enumerate(state)}
    for name, file in where.items():
        files[file][name] = state[name]
    for file, named in files.items():
        stale = {name: torch.zeros(1) for name in (*state, "unnamed")}
        content = {**stale, **named} if rng.random() < 0.5 else named
        if suffix == ".bin":
            torch.save(content, folder / file)
        else:
            safetensors.torch.save_file(content, folder / file)
    index = f"{stem}{suffix}.index.json"
    (folder / index).write_text(json.dumps({"weight_map": where}))
    return index


def assert_restored(url: Path, state: dict[str, torch.Tensor]) -> None:
    restored = loaderkit.restore(url)
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


def test_a_description_decides_and_can_be_named(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(8):
        folder, state = tmp_path / f"step-{number}", drawn(rng)
        kind = rng.choice(["dcp", "model", "pytorch_model", "both", "loaderkit"])
        if kind == "dcp":
            save_dcp(state, folder)
            description = ".metadata"
        elif kind == "loaderkit":
            with loaderkit.CheckpointManager(tmp_path / "own", format="safetensors") as checkpoints:
                checkpoints.save(number, {"x": state})
            folder, description = tmp_path / "own" / f"step-{number:010d}", "loaderkit-state.json"
        else:
            folder.mkdir()
            other = save_shards(folder, "pytorch_model", drawn(rng) if kind == "both" else state, rng)
            description = other if kind == "pytorch_model" else save_shards(folder, "model", state, rng)
            if kind == "model":
                for path in folder.glob("pytorch_model*"):
                    path.unlink()
        beside = save_beside(folder, rng)
        for url in (folder, folder / description):
            caplog.clear()
            if kind == "loaderkit":
                assert torch.equal(loaderkit.restore(url)["x.w0"], state["w0"])
            else:
                assert_restored(url, state)
            assert "is restored without what lies beside it" in caplog.text
            assert any(name in caplog.text for name in beside) or kind == "both"
        assert loaderkit.checkpoint.latest(folder.parent) == str(folder)
        if kind == "both":
            assert set(loaderkit.restore(folder / other)) != {"unnamed"}


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "lora.pt", "adapter_model.safetensors"])
def test_a_model_among_what_frameworks_write_beside_it(tmp_path: Path, rng: random.Random, weights: str) -> None:
    folder, state = tmp_path / "checkpoint-500", drawn(rng)
    folder.mkdir()
    (safetensors.torch.save_file if weights.endswith("safetensors") else torch.save)(state, folder / weights)
    save_beside(folder, rng)
    assert loaderkit.checkpoint.latest(tmp_path) == str(folder)
    assert_restored(folder, state)
    torch.save(state, folder / "second.pt")
    with pytest.raises(CheckpointError, match=r"name the (file|one) that is meant"):
        loaderkit.restore(folder)


def test_two_indexes_are_named_and_can_be(tmp_path: Path, rng: random.Random) -> None:
    states = {name: drawn(rng, name) for name in ("first", "second")}
    indexes = {name: save_shards(tmp_path, name, state, rng) for name, state in states.items()}
    with pytest.raises(CheckpointError, match=r"has two indexes, .*such as .*\.safetensors\.index\.json"):
        loaderkit.restore(tmp_path)
    for name, state in states.items():
        assert_restored(tmp_path / indexes[name], state)


@pytest.mark.parametrize("small", ["scheduler.bin", "extra.pt", "rng_state_0.pth", None])
def test_weights_in_folders_below(tmp_path: Path, rng: random.Random, small: str | None) -> None:
    folder, state = tmp_path / "checkpoint-3", drawn(rng)
    names = rng.sample(["shards_0", "weights", "mp_rank_00/tensors"], rng.randrange(1, 3))
    for name in names:
        save_dcp(state, folder / name)
    if small is not None:
        torch.save({"last_epoch": 3}, folder / small)
    for call in (
        lambda: loaderkit.restore(folder),
        lambda: loaderkit.checkpoint.latest(tmp_path),
        lambda: copy_checkpoint(folder, tmp_path / "copy"),
    ):
        with pytest.raises(CheckpointError, match=f"below it there are {min(names)}/"):
            call()
    assert_restored(folder / names[0], state)
    (folder / "extra.pt").unlink(missing_ok=True)
    torch.save(state, folder / "pytorch_model.bin")  # as those who gather the weights do
    assert_restored(folder, state)
    with pytest.raises(CheckpointError, match="which would not be copied"):
        copy_checkpoint(folder, tmp_path / "copy")


def test_a_tar_is_told_by_its_content(tmp_path: Path, rng: random.Random) -> None:
    state = drawn(rng)
    torch.save(state, tmp_path / "model_best.pth.tar")
    assert_restored(tmp_path / "model_best.pth.tar", state)
    copied = copy_checkpoint(tmp_path / "model_best.pth.tar", tmp_path / "copy")
    assert_restored(Path(copied.url), state)
    data = safetensors.torch.save(state)
    for name in ("step-7", "model.nemo", "x.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            member = tarfile.TarInfo("folder/model.safetensors")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        assert_restored(tmp_path / name, state)
    (tmp_path / "x.tar").rename(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt is a tar archive: rename it to end in \.tar"):
        loaderkit.restore(tmp_path / "x.pt")
    (tmp_path / "x.nemo").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(CheckpointError, match="compressed by gzip"):
        loaderkit.restore(tmp_path / "x.nemo")


def test_a_state_of_two_files_is_not_guessed(tmp_path: Path, rng: random.Random) -> None:
    safetensors.torch.save_file(drawn(rng), tmp_path / "encoder.safetensors")
    torch.save(drawn(rng), tmp_path / "decoder.pt")
    with pytest.raises(CheckpointError, match=r"two formats.*encoder\.safetensors.*decoder\.pt.*such as"):
        loaderkit.restore(tmp_path)
