"""
Provide sources of text for the tests of preparation (documents, files, and a Hugging Face hub on
this machine), read what was prepared from them, and let a prepared folder grow shard by shard.
"""

import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WORDS = "alpha beta, gamma 12 delta! epsilon\n\nzeta naïve 漢字 🙂 eta's theta  iota".split(" ")
REVISION = "a" * 40
CARD = (
    "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: small/*\n---\n"
)


def documents(count: int, seed: int = 0) -> list[str | None]:
    """Return documents of very different lengths, one in 200 of them null or empty."""
    rng = random.Random(seed)
    made = [
        " ".join(["a", *rng.choices(WORDS, k=rng.randint(1, 60) ** 2 // 60 + 1)])
        for _ in range(count)
    ]
    # make only a few of them empty, in the second half, because a preparation complains if many of
    # the rows that it has read hold no text
    for at in rng.sample(range(count // 2, count), count // 200):
        made[at] = rng.choice([None, ""])
    return made


def write_parquet(path: Path, texts: list, column: str = "text", rows: int = 100) -> Path:
    """Write these texts to a parquet file, in row groups of so many rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(texts))), column: texts})
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_jsonl(path: Path, texts: list) -> Path:
    lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def stored(folder: Path, split: str) -> list[int]:
    """Return the tokens of a split without using the program: skip the headers, read uint16."""
    shards = sorted(folder.glob(f"{split}_*.bin"))
    return [int(i) for shard in shards for i in np.fromfile(shard, dtype="<u2", offset=1024)]


def stored_texts(folder: Path, split: str) -> list[str]:
    """Return the documents of a split whose tokens are bytes."""
    return bytes(stored(folder, split)).decode().split("\0")[1:]


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each shard, by file name."""
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob("*.bin")}


def check_documents(val: list[str], train: list[str], texts: list[str]) -> None:
    """
    Check that the two splits hold each text once, in order: its beginning in training, its end in
    validation, either perhaps empty.
    """
    ends, begins = val[:], train[:]
    for text in texts:
        if begins and begins[0] == text:
            begins.pop(0)
            continue
        end = ends.pop(0)
        assert text.endswith(end)
        if begin := text.removesuffix(end):
            assert begins.pop(0) == begin
    assert not begins and not ends


def check_folder(out: Path, texts: list[str]) -> list[str]:
    """Check that a byte dataset holds each text once, in order. Return its validation documents."""
    val, train = stored_texts(out, "val"), stored_texts(out, "train")
    check_documents(val, train, texts)
    return val


def on_hub(*files):
    """Let each dataset of the hub, in this process, consist of these local files."""
    return mock.patch("data.text.hub_files", lambda *_: ([*map(str, files)], REVISION))


class Hub(BaseHTTPRequestHandler):
    """Answer the requests that the datasets library sends to the Hugging Face hub."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}
    newest = REVISION
    troubles: dict[int, str | int] = {}  # what happens at the n-th range request
    ranges = 0  # the number of range requests so far
    etags = "sha256"
    wrong: set[str] = set()  # files that are sent once with wrong bytes
    allowed: dict[str, int] = {}  # range requests for a file until the hub refuses it

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        always = {"Content-Length": str(len(body)), "X-Repo-Commit": REVISION}
        for name, value in (always | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        asked = re.match(r"/api/datasets/(org/name|kjj0/fineweb10B-gpt2)(?=/|$)", path)
        rest = path[asked.end() :] if asked else ""
        if asked and rest in ("", "/revision/main", f"/revision/{REVISION}"):
            sha = REVISION if path.endswith(REVISION) else self.newest
            siblings = [{"rfilename": name} for name in self.files]
            about = dict(id=asked[1], sha=sha, siblings=siblings, tags=[])
            self.answer(200, json.dumps(about).encode())
        elif rest.startswith(f"/tree/{REVISION}"):
            folder = path.partition(REVISION)[2].strip("/")
            inside = [name for name in self.files if name.rpartition("/")[0] == folder]
            entries = [
                dict(type="file", path=name, size=len(self.files[name]), oid=name)
                for name in inside
            ]
            if not folder:
                entries.append(dict(type="directory", path="small", size=0, oid="small"))
            self.answer(200, json.dumps(entries).encode())
        elif (name := re.split(f"/{REVISION}/|/main/", path)[-1]) in self.files:
            self.send_file(name, self.files[name])
        else:
            self.answer(404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def send_file(self, name: str, content: bytes) -> None:
        if not self.headers.get("Range"):
            etag = hashlib.new(Hub.etags, content).hexdigest()
            if self.command == "GET" and name in Hub.wrong:
                Hub.wrong.remove(name)
                content = content[::-1]
            self.answer(200, content, ETag=f'"{etag}"')
        elif Hub.allowed.get(name) == 0:
            self.answer(410)
        else:
            Hub.allowed[name] = Hub.allowed.get(name, 10**9) - 1
            Hub.ranges += 1
            trouble = Hub.troubles.pop(Hub.ranges, None)
            if isinstance(trouble, int):
                self.answer(trouble)
                return
            if trouble == "slow":
                time.sleep(3)
            begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            first, last = int(begin), int(end or len(content))
            part = content[first : last + 1]
            where = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
            if trouble == "break":
                self.send_response(206)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Content-Range", where)
                self.end_headers()
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
                return
            self.answer(206, part, Content_Range=where)


@contextmanager
def serve_hub(source: Path, inside: str = "small/") -> Iterator[str]:
    """
    Serve the files of a folder as the dataset org/name, and as the one that train.py downloads, in
    the folder `inside` or, if it is empty, at the top. Yield the hub's address.
    """
    Hub.ranges = 0
    Hub.files = {"README.md": CARD.encode()}
    for path in source.iterdir():
        Hub.files[f"{inside}{path.name}"] = path.read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    Hub.allowed, Hub.newest, Hub.troubles, Hub.wrong = {}, REVISION, {}, set()
