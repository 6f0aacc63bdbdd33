"""The addresses at which this process serves metrics, and the loaders that each address shows.

Loader ──> export ──> Endpoint of its address ──> MetricsServer, while a loader is open
                        └── ExportedLoader ...      ──scrape──> prometheus.written ──> points of all of them

Several loaders may share an address. A closed loader's counters stay there, and a later loader with the same name
continues them.
"""

from __future__ import annotations

import _thread
import errno
import logging
import os
import threading
import weakref
from dataclasses import dataclass, field

from loaderkit._internal.system.listeners import listener_of
from loaderkit._internal.system.local_rank import local_rank
from loaderkit.diagnosis.stats import Stats
from loaderkit.errors import ConfigError, MissingExtraError
from loaderkit.metrics.address import ListenAddress, parse_address
from loaderkit.metrics.exported import ExportedLoader, ScrapedLoader
from loaderkit.metrics.server import MetricsServer
from loaderkit.metrics.totals import Totals

logger = logging.getLogger("loaderkit")


@dataclass
class _Endpoint:
    """The loaders at one address, open or closed, and the server while one is open."""

    address: ListenAddress
    loaders: list[ExportedLoader] = field(default_factory=list)
    server: MetricsServer | None = None

    def admit(self, name: str, rank: int, action: str, first: Stats) -> ExportedLoader:
        """Add a new loader. If an open loader has its name already, it gets another one: training, training-2."""
        names = {loader.name for loader in self.loaders if loader.is_open}
        unique = next(one for one in (name, *(f"{name}-{n}" for n in range(2, len(names) + 3))) if one not in names)
        before = next((loader for loader in self.loaders if loader.name == unique), None)
        totals = Totals() if before is None else before.totals
        loader = ExportedLoader(unique, rank, action, first, totals)
        self.loaders = [*(one for one in self.loaders if one is not before), loader]
        return loader

    def open(self) -> None:
        """Listen, unless it does already. A port that is in use is a warning. Raises ConfigError for an impossible
        address."""
        if self.server is not None:
            return
        from loaderkit.metrics.prometheus import written  # the package is an extra

        try:
            self.server = MetricsServer(self.address, lambda accept: written(self.loaders, accept))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or str(error)
                raise ConfigError(f"metrics.prometheus: {self.address} cannot be listened on: {reason}") from error
            _warn_of_taken(self.address)
        except RuntimeError as error:  # no more threads
            logger.warning("training goes on without metrics at %s: %s", self.address, error)
        else:
            logger.info("metrics are at http://%s/metrics", self.address)

    def leave(self, loader: ExportedLoader) -> None:
        """Close a loader, and with the last one the server."""
        loader.close()
        if self.server is not None and not any(one.is_open for one in self.loaders):
            self.server.close()
            self.server = None


class _Process:
    """The endpoints of this process. A fork's child has none."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may close a loader
        self.endpoints: dict[ListenAddress, _Endpoint] = {}

    def after_fork(self) -> None:
        endpoints, self.lock, self.endpoints = self.endpoints, threading.RLock(), {}
        for endpoint in endpoints.values():
            if endpoint.server is not None:
                endpoint.server.forget()
                endpoint.server = None


_process = _Process()
os.register_at_fork(after_in_child=_process.after_fork)


class Export:
    """A loader's place at an endpoint: `loader` is what is shown of it there."""

    def __init__(self, prometheus: int | str, *, name: str, rank: int, action: str, first: Stats) -> None:
        """Listens at `prometheus`, a port or "HOST:PORT", which the first rank of a machine has; others have the next
        ports. `first`: the statistics before anything has run. Raises ConfigError, MissingExtraError."""
        try:
            import prometheus_client  # noqa: F401 - an extra
        except ImportError as error:
            raise MissingExtraError(
                f"metrics.prometheus needs the package prometheus_client ({error}): pip install 'loaderkit[metrics]'"
            ) from error
        self._prometheus, self._name, self._action, self._first = prometheus, name, action, first
        self._loader: weakref.ref[ScrapedLoader] | None = None
        self._finalizer: weakref.finalize[..., ScrapedLoader] | None = None
        self._join(rank)

    def _join(self, rank: int) -> None:
        address = parse_address(self._prometheus)
        address = address._replace(port=address.port + local_rank())
        if address.port > 65535:
            raise ConfigError(
                f"metrics.prometheus: {self._prometheus} and LOCAL_RANK {local_rank()} make port {address.port}"
            )
        self._pid = os.getpid()
        with _process.lock:
            self._endpoint = _process.endpoints.setdefault(address, _Endpoint(address))
            self.loader = self._endpoint.admit(self._name, rank, self._action, self._first)
            try:
                self._endpoint.open()
            except BaseException:
                self._endpoint.leave(self.loader)
                raise

    def attach(self, loader: ScrapedLoader) -> None:
        """Show this loader from now on; if it is collected and was not closed, it leaves as well."""
        self._loader = weakref.ref(loader)
        self.loader.attach(loader)
        # In a thread of its own: the collector may run in any, which may hold any lock.
        self._finalizer = weakref.finalize(loader, _thread.start_new_thread, self._leave, ())
        self._finalizer.atexit = False

    def before_run(self) -> None:
        """An executor is about to be made. If the process was forked since the last one, it joins an endpoint of its own."""
        loader = None if self._loader is None else self._loader()
        if loader is not None and os.getpid() != self._pid:
            self._detach()
            self._join(self.loader.rank)
            self.attach(loader)
        self.loader.before_run()

    def close(self) -> None:
        """Leave the endpoint. Idempotent."""
        self._detach()
        self._leave()

    def _detach(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()

    def _leave(self) -> None:
        if os.getpid() == self._pid:
            with _process.lock:
                self._endpoint.leave(self.loader)


def _warn_of_taken(address: ListenAddress) -> None:
    who = listener_of(address.port)
    who = f"by {who}" if who is not None else "by another program"
    if who.startswith(f"by process {os.getpid()} "):
        who = "by this program itself, not by loaderkit"
    logger.warning(
        "training goes on without metrics: metrics.prometheus: %s is taken %s. Choose another port, as by "
        "build(overrides={'metrics.prometheus': ...}). Ranks of one machine get a port each where their launcher sets "
        "LOCAL_RANK, as torchrun does",
        address,
        who,
    )
