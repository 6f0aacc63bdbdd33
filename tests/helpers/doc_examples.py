"""The examples on pages of documentation."""

from __future__ import annotations

import importlib
import importlib.util
import re
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LIBRARIES = re.compile(r"^import (\w+)|object: \"(\w+):", re.MULTILINE)
_FRAMEWORK_WORDS = ("torch.utils.tensorboard", "tokenize", "make_chats.py", "make_image_text.py")
LOOPS = ("lightning", "accelerate", "transformers")

with suppress(ModuleNotFoundError):
    # The thread that watches the progress bars of `datasets` would end in the middle of another test, which counts threads.
    importlib.import_module("tqdm").tqdm.monitor_interval = 0


def examples(page: str) -> list[tuple[str, str]]:
    """(language, text) of each."""
    return _FENCE.findall((ROOT / page).read_text())


def named(page: str, name: str) -> str:
    """The example whose first line is its file's name, without that line."""
    (text,) = (text for _, text in examples(page) if text.startswith(f"# {name}\n"))
    return text.partition("\n")[2]


def libraries(text: str) -> set[str]:
    """What an example imports whole, or takes its data set from."""
    return {name for pair in _LIBRARIES.findall(text) for name in pair if name}


def needs_frameworks(text: str) -> bool:
    """True if `make integration` installs what an example imports."""
    names = {"datasets", "tokenizers", "torchvision", *LOOPS}
    return bool(libraries(text) & names) or any(word in text for word in _FRAMEWORK_WORDS)


def needs_cluster(text: str) -> bool:
    """True if an example begins a Ray cluster, or loads by one."""
    return "ray start " in text or "executor: ray" in text
