"""Models named hf:owner/repo, from a stand-in of the hub on this machine: which files are fetched, and what is said if none can be."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from moetriage.errors import UsageError
from moetriage.gguf.hub import choose

Start = Callable[..., "subprocess.Popen[str]"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The three answers that the hub's client needs: the list of files, a file's head, a file."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/models/someone/model/tree/main":
            entries = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in self.files.items()]
            self.answer(json.dumps(entries).encode(), "application/json")
        elif (name := path.removeprefix("/someone/model/resolve/")) != path:
            self.answer(self.files.get(name.split("/", 1)[1]), "application/octet-stream")
        else:
            self.answer(None, "")

    do_HEAD = do_GET  # noqa: N815

    def answer(self, data: bytes | None, kind: str) -> None:
        self.send_response(404 if data is None else 200)
        if data is not None:
            self.send_header("Content-Type", kind)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if data is not None and self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def hub(tiny: Callable[..., Path], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Serve a repository with one model in two shards and another in one file; yields the environment that leads there."""
    first = tiny("tiny-qwen3moe", split=2)
    shards = sorted(first.parent.glob(first.name.replace("00001-of", "*-of")))
    files = {f"q4/m-{path.name[-19:]}": path.read_bytes() for path in shards}
    handler = type("ThisHub", (Hub,), {"files": files | {"olmoe.gguf": tiny("tiny-olmoe").read_bytes(), "README.md": b"# a model"}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), "")
        yield {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        } | proxies
        server.shutdown()


def inspect(start: Start, env: dict[str, str], model: str) -> tuple[int, str, str]:
    process = start("inspect", model, "--disk-mb-s", "1000", "--json", env=env)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_all_shards_of_a_model_are_fetched_and_found_again_without_a_network(start: Start, hub: dict[str, str]) -> None:
    pytest.importorskip("huggingface_hub")
    code, out, err = inspect(start, hub, "hf:someone/model:m-*")
    assert (code, err) == (0, "")
    paths = [Path(path) for path in json.loads(out)["paths"]]
    assert [path.name for path in paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert not list(Path(hub["HF_HOME"]).rglob("olmoe.gguf"))
    assert inspect(start, hub | {"HF_HUB_OFFLINE": "1"}, "hf:someone/model:m-*") == (code, out, err)


REFUSED = {
    "hf:someone/model": ("2 models match", "olmoe.gguf, q4/m"),
    "hf:someone/model:*q8*": ("no GGUF file there matches", "olmoe.gguf"),
    "hf:someone/model:m-00001*": ("1 of the 2 shards",),
    "hf:someone/else": ("no such repository", "HTTP 404"),
}
#: In one process, as the client takes a second to load; it reads its environment when it does.
INSPECT_EACH = "import sys; from moetriage.cli.main import invoke; print([invoke(['inspect', model]) for model in sys.argv[1:]])"


def test_what_cannot_be_fetched_is_one_line(hub: dict[str, str]) -> None:
    pytest.importorskip("huggingface_hub")
    command = [sys.executable, "-c", INSPECT_EACH, *REFUSED]
    done = subprocess.run(command, env=os.environ | hub, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{[2] * len(REFUSED)}\n"
    for line, (model, parts) in zip(done.stderr.splitlines(), REFUSED.items(), strict=True):
        assert line.startswith(f"moetriage: {model}: ")
        for part in parts:
            assert part in line


@pytest.mark.parametrize(
    "gone",
    [{"HF_HUB_OFFLINE": "1"}, pytest.param({"HF_ENDPOINT": "http://127.0.0.1:9"}, marks=pytest.mark.slow, id="the client's retries")],
)
def test_without_a_network_or_a_copy_it_is_one_line(gone: dict[str, str], start: Start, hub: dict[str, str]) -> None:
    pytest.importorskip("huggingface_hub")
    code, out, err = inspect(start, hub | gone, "hf:someone/model:olmoe*")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "cannot be downloaded: " in err


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from moetriage.gguf.hub import fetch

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'moetriage\[hub\]'"):
        fetch("hf:someone/model")


@pytest.mark.parametrize(
    ("glob", "chosen"),
    [
        ("*Q4*", ["b/m-Q4.gguf"]),
        ("m-Q4.gguf", ["b/m-Q4.gguf"]),
        ("c/*", ["c/x-00001-of-00002.gguf", "c/x-00002-of-00002.gguf"]),
        ("a.gguf", ["a.gguf"]),
    ],
)
def test_a_glob_matches_the_path_or_the_name(glob: str, chosen: list[str]) -> None:
    names = ["c/x-00002-of-00002.gguf", "c/x-00001-of-00002.gguf", "a.gguf", "b/m-Q4.gguf", "b/m-Q4.txt"]
    assert choose("hf:o/r", names, glob) == chosen
