"""Checkpoints that other programs have really written are restored equal to what they say themselves, at any number of ranks.

DeepSpeed and Megatron have an environment of their own: `python -m profiles.peers.environments deepspeed`, made here if it is
not there; LOADERKIT_DEEPSPEED_PYTHON names the interpreter of another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import same
from rank_programs import restore_all, run_ranks

import loaderkit
from loaderkit.checkpoint import latest
from profiles.peers import environments

pytestmark = pytest.mark.filterwarnings("ignore")
HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture(scope="module")
def other_python() -> Path:
    """The interpreter of the environment with DeepSpeed and Megatron."""
    given = os.environ.get("LOADERKIT_DEEPSPEED_PYTHON")
    if given is None:
        environments.make("deepspeed")
    return Path(given or environments.python_of("deepspeed"))


def torchrun(python: Path, num_ranks: int, program: str, *args: Any) -> None:
    """Run a program of the helpers on several ranks. Fails with the end of what it says."""
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if python != Path(sys.executable):
        environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*command, str(HELPERS / program), *map(str, args)], capture_output=True, text=True, env=environ, timeout=300
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("stage", "num_ranks", "dtype"),
    [
        (1, 2, "bfloat16"),
        (1, 4, "float32"),
        (2, 2, "bfloat16"),
        (2, 4, "float16"),
        (3, 2, "float32"),
        (3, 4, "bfloat16"),
    ],
)
def test_deepspeed(stage: int, num_ranks: int, dtype: str, tmp_path: Path, other_python: Path) -> None:
    torchrun(other_python, num_ranks, "train_deepspeed.py", tmp_path / "run", stage, dtype)
    expected = torch.load(tmp_path / "run.expected.pt", weights_only=False)
    state = loaderkit.restore(tmp_path / "run", nested=True)
    assert state["module"].keys() - expected["weights"].keys() <= {"frozen.weight", "frozen.bias"}  # its own loses them
    for name, tensor in expected["weights"].items():
        assert same(state["module"][name], tensor), name
    num_compared = 0
    for name, states in expected["state"].items():
        for kind in states.keys() & {"exp_avg", "exp_avg_sq"}:
            merged = state["optimizer"]["state"][name][kind]
            assert torch.equal(merged, states[kind].view(merged.shape)), (name, kind)
            num_compared += 1
    assert num_compared == 2 * len(state["optimizer"]["state"]) == 14
    assert (state["global_steps"], state["note"], state["numbers"]) == (3, "mine", [1, 2])
    for count in (1, 2, 3):
        (tmp_path / f"{count}").mkdir()
        (tmp_path / f"{count}" / "step").symlink_to(Path(latest(tmp_path / "run")))
        assert run_ranks(restore_all, count, tmp_path / f"{count}", "step") == [0] * count


@pytest.mark.prove
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_megatron(num_ranks: int, tmp_path: Path, other_python: Path) -> None:
    torchrun(other_python, num_ranks, "save_megatron.py", tmp_path / "run" / "iter_0000100")
    expected = torch.load(tmp_path / "run" / "iter_0000100.expected.pt")
    (tmp_path / "run" / "iter_0000100.expected.pt").unlink()
    for url in (tmp_path / "run", latest(tmp_path / "run")):
        restored = loaderkit.restore(url)
        assert all(same(restored[name], tensor) for name, tensor in expected.items())
        assert (restored["iteration"], restored["opt_param_scheduler.lr"]) == (100, 0.5)


@pytest.mark.integration
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_accelerate_fsdp(num_ranks: int, tmp_path: Path) -> None:
    torchrun(Path(sys.executable), num_ranks, "save_accelerate_fsdp.py", tmp_path / "checkpoint-3")
    expected = torch.load(tmp_path / "checkpoint-3.expected.pt")
    (tmp_path / "checkpoint-3.expected.pt").unlink()
    state = loaderkit.restore(latest(tmp_path), nested=True)
    assert all(same(state["model"][name], tensor) for name, tensor in expected["model"].items())
    for name, states in expected["optimizer"]["state"].items():
        assert all(same(state["optimizer"]["state"][name][kind], tensor) for kind, tensor in states.items())


@pytest.mark.integration
def test_trainer_and_hub_snapshots(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(vocab_size=50, **sizes))
    samples = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]
    settings = TrainingArguments(
        str(tmp_path / "out"), max_steps=10, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model, settings, train_dataset=samples)
    trainer.train()
    newest = latest(tmp_path / "out")
    assert newest.endswith("checkpoint-10")
    blank = BertForMaskedLM(BertConfig(vocab_size=50, **sizes))
    loaderkit.restore(newest, into=blank.state_dict(), strict={"unexpected": "*"})  # its tied decoder is there once
    assert all(map(same, blank.state_dict().values(), model.state_dict().values()))
    optimizer = loaderkit.restore(f"{newest}/optimizer.pt", nested=True)
    assert trainer.optimizer is not None
    saved = trainer.optimizer.state_dict()
    assert all(same(optimizer["state"][n]["exp_avg"], one["exp_avg"]) for n, one in saved["state"].items())
    model.save_pretrained(tmp_path / "hub")
    torch.save(model.state_dict(), tmp_path / "hub" / "pytorch_model.bin")  # as snapshots of older models have both
    again = BertForMaskedLM(BertConfig(vocab_size=50, **sizes))
    loaderkit.restore(tmp_path / "hub", into=again.state_dict())
    assert all(map(same, again.state_dict().values(), model.state_dict().values()))


@pytest.mark.integration
def test_lightning(tmp_path: Path) -> None:
    lightning: Any = import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(size, 2)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().sum()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "kept", every_n_train_steps=2, save_top_k=-1, save_last=True
    )
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, callbacks=[keep], enable_progress_bar=False
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    newest = latest(tmp_path / "kept")
    assert newest.endswith("step=12.ckpt")
    whole = loaderkit.restore(newest, nested=True)
    wanted = torch.load(newest, weights_only=False)
    assert whole.keys() == wanted.keys()
    assert whole["hyper_parameters"] == {"size": 4}
    blank = Module()
    loaderkit.restore(newest, into=blank.state_dict(), rename={"state_dict.": ""}, strict=False)
    assert all(map(same, blank.state_dict().values(), module.state_dict().values()))
    for number, saved in wanted["optimizer_states"][0]["state"].items():
        assert all(same(whole["optimizer_states"][0]["state"][number][kind], saved[kind]) for kind in saved)
