"""What tells of a job's end: a file, a cloud's metadata, a time, and torchrun, which kills sooner than the cloud."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loaderkit.checkpoint.manager.notice import EndNotice
from loaderkit.checkpoint.manager.settings import NoticeArgs
from loaderkit.checkpoint.timing.torchrun import shutdown_timeout_s
from loaderkit.checkpoint.timing.watch import NoticeWatch, tells_of_the_end
from loaderkit.errors import ConfigError


@contextmanager
def metadata(answer: Callable[[BaseHTTPRequestHandler], tuple[int, str]]) -> Iterator[str]:
    """The URL of a server that gives such answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = answer(self)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/latest/meta-data/spot/instance-action"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class TestUrls:
    @pytest.mark.parametrize(
        ("code", "text", "expected"),
        [
            (404, "", False),
            (500, "TRUE", False),
            (200, '{"action": "terminate", "time": "2026-11-29T08:22:00Z"}', True),
            (200, "FALSE", False),
            (200, "TRUE\n", True),
            (200, "NONE", False),
            (200, "TERMINATE_ON_HOST_MAINTENANCE", True),
            (200, "MIGRATE_ON_HOST_MAINTENANCE", False),  # it goes on, on another machine
            (200, '{"DocumentIncarnation": 1, "Events": []}', False),
            (200, '{"Events": [{"EventType": "Reboot"}]}', False),
            (200, '{"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt"}]}', True),
        ],
    )
    def test_what_the_clouds_answer(self, code: int, text: str, expected: bool) -> None:
        with metadata(lambda request: (code, text)) as url:
            assert tells_of_the_end(url) == expected

    @pytest.mark.parametrize("token", ["abc", "xyz"])
    def test_a_token_is_asked_for(self, token: str) -> None:
        def answer(request: BaseHTTPRequestHandler) -> tuple[int, str]:
            if request.command == "PUT":
                is_asked = (
                    request.path == "/latest/api/token" and request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                )
                return (200, token) if is_asked else (400, "")
            return (200, "{}") if request.headers["X-aws-ec2-metadata-token"] == "abc" else (401, "")

        with metadata(answer) as url:
            assert tells_of_the_end(url) == (token == "abc")

    def test_one_that_does_not_answer(self) -> None:
        with metadata(lambda request: (200, "TRUE")) as url:
            pass
        assert not tells_of_the_end(url)


class TestWatch:
    def test_a_file_is_seen_by_the_thread_which_then_ends(self, tmp_path: Path) -> None:
        file = tmp_path / "preempt"
        file.touch()
        watch = NoticeWatch([str(tmp_path / "other"), str(file)], [])
        watch._thread.join(60.0)
        assert watch.noted is not None
        assert watch.noted[0] == f"{file} is there"
        watch.close()

    def test_files_are_looked_for_more_often_than_urls(self, tmp_path: Path) -> None:
        asked: list[str] = []

        def looked_at(url: str) -> bool:
            asked.append(url)
            return len(asked) == 2

        watch = NoticeWatch([], [], looked_at=looked_at)
        watch._urls = ["a", "b"]
        assert not watch.look(at_urls=False)
        assert not asked
        assert watch.look(at_urls=True)
        assert asked == ["a", "b"]
        assert watch.noted is not None
        assert watch.noted[0] == "b tells of the end"
        watch.close()

    def test_nothing_to_look_for_needs_no_thread(self) -> None:
        before = threading.active_count()
        NoticeWatch([], []).close()
        assert threading.active_count() == before

    def test_close_ends_the_thread(self, tmp_path: Path) -> None:
        watch = NoticeWatch([str(tmp_path / "never")], [])
        watch.close()
        watch.close()
        assert not watch._thread.is_alive()


class TestEnd:
    def test_the_first_end_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times_s = iter([5000.0, 5069.9, 5070.0])
        monkeypatch.setenv("JOB_END", "5100")
        args = NoticeArgs(signals=("SIGUSR2",), within=30.0, until="JOB_END")
        notice = EndNotice(args, clock=lambda: next(times_s))
        try:
            assert [notice.reason, notice.reason] == [None, None]
            assert str(notice.reason).startswith("the job ends at ")
            assert notice.end_s == 5100.0
            os.kill(os.getpid(), signal.SIGUSR2)
            assert notice.reason == "SIGUSR2"
            assert notice.end_s == 5100.0  # the signal came in this year
        finally:
            notice.close()

    def test_without_a_time_the_whole_is_saved(self) -> None:
        notice = EndNotice(NoticeArgs(signals=("SIGUSR2",)))
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (notice.reason, notice.end_s) == ("SIGUSR2", None)
        finally:
            notice.close()

    def test_an_end_that_is_over(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """Such as that of an earlier job: each start stops after a step, and should say why before it does."""
        monkeypatch.setenv("JOB_END", "1700000000")
        EndNotice(NoticeArgs(signals=(), within=30.0, until="JOB_END")).close()
        assert "JOB_END was 2023-11-1" in caplog.text
        assert "the job stops after its next step" in caplog.text

    def test_an_environment_without_the_time(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.delenv("JOB_END", raising=False)
        args = NoticeArgs(signals=(), within=30.0, until="JOB_END")
        assert EndNotice(args).reason is None
        assert "the environment has no JOB_END, so no end of the job is known" in caplog.text
        monkeypatch.setenv("JOB_END", "soon")
        with pytest.raises(ConfigError, match="JOB_END is 'soon': expected a time in seconds of Unix time"):
            EndNotice(args)

    def test_torchrun_kills_sooner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "20")
        notice = EndNotice(NoticeArgs(within=300.0))
        try:
            assert notice.shutdown_timeout_s == 20.0
            os.kill(os.getpid(), signal.SIGTERM)
            assert notice.end_s == notice._signals.noted_s + 20.0  # type: ignore[union-attr]
        finally:
            notice.close()

    def test_what_torchrun_was_told(self, tmp_path: Path) -> None:
        command = tmp_path / "cmdline"
        torchrun = {"TORCHELASTIC_RUN_ID": "none"}
        assert shutdown_timeout_s("SIGTERM", {}, command) is None
        assert shutdown_timeout_s("SIGTERM", torchrun, command) == 30.0
        assert shutdown_timeout_s("SIGUSR1", torchrun, command) is None
        assert shutdown_timeout_s("SIGUSR1", torchrun | {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR1"}, command) == 30.0
        for flag in ("--shutdown-timeout\0 90", "--shutdown_timeout\x0090", "--shutdown-timeout=90"):
            command.write_text(f"python\0-m\0torch.distributed.run\0{flag.replace(' ', '')}\0train.py\0")
            assert shutdown_timeout_s("SIGTERM", torchrun | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, command) == 90.0
        command.write_text("python\0train.py\0")
        assert shutdown_timeout_s("SIGTERM", torchrun | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, command) == 5.0
        assert shutdown_timeout_s("SIGTERM", torchrun | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, command) == 30.0
