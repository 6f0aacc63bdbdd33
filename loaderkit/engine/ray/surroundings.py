"""What a process on another machine needs of the trainer's environment: modules, folder, credentials."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PREFIXES = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "GCS",
    "GCLOUD_",
    "HF_",
    "HUGGINGFACE_",
    "FSSPEC_",
    "OSS_",
    "B2_",
    "DATABRICKS_",
    "LOADERKIT_",
)
_NAMES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)


def boot_id() -> str:
    """The same in all processes of this machine, until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Surroundings:
    """Goes to an actor as an argument: Ray shows a runtime environment to everybody who sees the cluster's dashboard."""

    environment: Mapping[str, str]
    path: tuple[str, ...]
    arguments: tuple[str, ...]
    folder: str

    @classmethod
    def here(cls) -> Surroundings:
        """The surroundings of this process: variables that stores and this package read, `sys.path`, `sys.argv` and the
        current folder."""
        environment = {
            name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) or name in _NAMES
        }
        path = tuple(folder for folder in sys.path if isinstance(folder, str))
        return cls(environment, path, tuple(map(str, sys.argv)), os.getcwd())

    def enter(self) -> None:
        """Apply them to this process. Entries of its own `sys.path` that the trainer's lacks stay, at the end."""
        os.environ.update(self.environment)
        own = [folder for folder in sys.path if folder not in self.path]
        sys.path[:] = [*self.path, *own]
        sys.argv[:] = self.arguments
        if os.path.isdir(self.folder):
            os.chdir(self.folder)

    def __repr__(self) -> str:
        return f"Surroundings({len(self.environment)} variables)"  # never their values
