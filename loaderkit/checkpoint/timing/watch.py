"""Files and URLs that tell of a job's end, looked at by a thread.

Of URLs what the clouds' metadata servers answer is understood: Google's `instance/preempted` (TRUE) and `maintenance-event`,
AWS's `spot/instance-action` (404 until the notice), Azure's `scheduledevents` (a list of events).
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urljoin

_FILES_S = 1.0  # between two looks
_NUM_FILE_LOOKS = 5  # for each look at the URLs
_ANSWER_S = 2.0
_MAX_BYTES = 65536
_NOTHING = ("", "FALSE", "NONE", "MIGRATE_ON_HOST_MAINTENANCE")  # the last one moves the machine without ending it
_ENDS = ("Preempt", "Terminate")  # of Azure's events
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}


class NoticeWatch:
    """Looks for `files` each second and at `urls` each five seconds, until one tells of the end, or `close`."""

    def __init__(
        self, files: Sequence[str], urls: Sequence[str], *, looked_at: Callable[[str], bool] | None = None
    ) -> None:
        """`looked_at`: True for a URL that tells of the end; default `tells_of_the_end`."""
        self.noted: tuple[str, float] | None = None
        """What told of the end, and when, in seconds of Unix time."""
        self._files, self._urls = [Path(file) for file in files], urls
        self._looked_at = looked_at or tells_of_the_end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loaderkit-notice", daemon=True)
        if files or urls:
            self._thread.start()

    def look(self, *, at_urls: bool) -> bool:
        """Look once; True if there was a notice."""
        found = next((f"{file} is there" for file in self._files if _is_there(file)), None)
        if found is None and at_urls:
            found = next((f"{url} tells of the end" for url in self._urls if self._looked_at(url)), None)
        if found is not None:
            self.noted = found, time.time()
        return found is not None

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _ANSWER_S)

    def _run(self) -> None:
        number = 0
        while not self.look(at_urls=number % _NUM_FILE_LOOKS == 0) and not self._stopped.wait(_FILES_S):
            number += 1


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # it cannot be told now
        return False


def tells_of_the_end(url: str) -> bool:
    """True if a URL answers with something else than nothing, FALSE, NONE, a live migration or no event that ends the machine.
    One that does not answer tells nothing."""
    try:
        return _is_notice(_read(url, _HEADERS))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 401:
            return False
    except (OSError, HTTPException, ValueError):
        return False
    try:  # AWS: a token first
        token = _read(urljoin(url, "/latest/api/token"), {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        return _is_notice(_read(url, {"X-aws-ec2-metadata-token": token.strip()}))
    except (OSError, HTTPException, ValueError):
        return False


def _is_notice(answer: str) -> bool:
    try:
        said = json.loads(answer)
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("Events"), list):
        return any(isinstance(event, dict) and event.get("EventType") in _ENDS for event in said["Events"])
    return answer.strip().upper() not in _NOTHING


def _read(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - http or https, by the settings
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_ANSWER_S) as answer:
        data: bytes = answer.read(_MAX_BYTES)
    return data.decode(errors="replace")
