"""A Hugging Face dataset, read by the real client from a stand-in of the hub on this machine. Needs `pip install datasets` (300 MB)."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("datasets")

Start = Callable[..., "subprocess.Popen[str]"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "/datasets/someone/texts/resolve/"
ROWS = [{"text": f"Text {number} says {number * number}. " + f"{number} is a number. " * 40} for number in range(300)]
FILES = {"train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(), "README.md": b"# texts\n"}


class Hub(BaseHTTPRequestHandler):
    """What the client asks of the hub: facts of a revision, the list of files, files and parts of them."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/datasets/someone/texts/tree/"):
            entries = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in FILES.items()]
            self.answer(json.dumps(entries).encode())
        elif path.startswith("/api/datasets/someone/texts"):
            facts = {
                "id": "someone/texts",
                "sha": COMMIT,
                "private": False,
                "tags": [],
                "siblings": [{"rfilename": name} for name in FILES],
            }
            self.answer(json.dumps(facts).encode())
        elif path.startswith(REPOSITORY):
            self.answer(FILES.get(path.removeprefix(REPOSITORY).split("/", 1)[1]))
        else:
            self.answer(None)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def answer(self, data: bytes | None) -> None:
        whole, asked = data or b"", self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = asked.partition("-")
        part = whole[int(first or 0) : int(last) + 1 if last else len(whole)]
        self.send_response(404 if data is None else 206 if asked else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha256(whole).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if asked:
            self.send_header("Content-Range", f"bytes {int(first)}-{int(first) + len(part) - 1}/{len(whole)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), "")
        here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        yield here | proxies
        server.shutdown()


def build(start: Start, environment: dict[str, str], out: Path, name: str) -> tuple[int, str]:
    process = start("data", "build", str(out), "--hf-dataset", name, "--max-mb", "1", "--vocab-size", "300", env=environment)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def test_data_are_built_from_the_rows_of_a_dataset(start: Start, environment: dict[str, str], tmp_path: Path) -> None:
    code, err = build(start, environment, tmp_path / "data", "someone/texts")
    assert code == 0, err
    heldout = (tmp_path / "data/heldout.txt").read_text()
    manifest = (tmp_path / "data/manifest.json").read_text()
    assert sum(row["text"] in heldout for row in ROWS) > 0
    assert "Hugging Face dataset someone/texts" in manifest


def test_a_dataset_that_is_not_there_is_one_line(start: Start, environment: dict[str, str], tmp_path: Path) -> None:
    code, err = build(start, environment, tmp_path / "data", "someone/else")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--hf-dataset someone/else: cannot be had: " in err
    assert not (tmp_path / "data").exists()
