"""
Provide sources of text for the tests of preparation (documents, files, and a Hugging Face hub on
this machine), read what was prepared from them, and let a prepared folder grow shard by shard.
"""

import hashlib
import json
import random
import re
import threading
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


def write_parquet(path: Path, texts: list, column: str = "text") -> Path:
    """Write these texts to a parquet file, in row groups of 100 rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(texts))), column: texts})
    pq.write_table(table, path, row_group_size=100)
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
    """Answer what Hugging Face's libraries ask of the hub about one dataset, under two names."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}
    newest = REVISION
    away: set[str] = set()  # files that are listed but not sent
    wrong: set[str] = set()  # files that are sent once with wrong bytes

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
        asked = re.match(r"(?:/api)?/datasets/(?:org/name|kjj0/fineweb10B-gpt2)(/.*)?$", path)
        rest = (asked[1] or "") if asked else "/none"
        name = re.split(f"/{REVISION}/|/main/", rest)[-1]
        if rest in ("", "/revision/main", f"/revision/{REVISION}"):
            sha = REVISION if rest.endswith(REVISION) else self.newest
            siblings = [dict(rfilename=file) for file in self.files]
            about = dict(id="org/name", sha=sha, siblings=siblings, tags=[])
            self.answer(200, json.dumps(about).encode())
        elif rest.startswith(f"/tree/{REVISION}"):
            folder = rest.removeprefix(f"/tree/{REVISION}").strip("/")
            entries = [
                dict(type="file", path=file, size=len(content), oid=file)
                for file, content in self.files.items()
                if file.rpartition("/")[0] == folder
            ]
            if not folder:
                entries.append(dict(type="directory", path="small", size=0, oid="small"))
            self.answer(200, json.dumps(entries).encode())
        elif name in self.files:
            self.send_file(name, self.files[name])
        else:
            self.answer(404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def send_file(self, name: str, content: bytes) -> None:
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last or len(content)) + 1]
            where = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            status = 410 if name in self.away else 206
            self.answer(status, part, Content_Range=where)
            return
        etag = hashlib.sha256(content).hexdigest()
        if self.command == "GET" and name in self.wrong:
            self.wrong.remove(name)
            content = content[::-1]
        self.answer(200, content, ETag=f'"{etag}"')


@contextmanager
def serve_hub(source: Path, inside: str = "small/") -> Iterator[str]:
    """
    Serve the files of a folder as the dataset org/name, and as the one that train.py downloads, in
    the folder `inside` or, if it is empty, at the top. Yield the hub's address.
    """
    Hub.newest, Hub.away, Hub.wrong = REVISION, set(), set()
    Hub.files = {"README.md": CARD.encode()}
    Hub.files |= {f"{inside}{path.name}": path.read_bytes() for path in source.iterdir()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
