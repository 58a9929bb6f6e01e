"""
Measure what shuffling costs when data is prepared, compared with the files' own order: time, memory
and downloaded bytes. The two orders take turns, and download from a simulated hub on this machine.

    python dev/order_cost.py --tokens=40e6 --rounds=4 --json=results/order_cost_40M.json

The source is Python's standard library, cut into documents of 6 kB, in four parquet files. Tokens
are GPT-2's if TIKTOKEN_CACHE_DIR is set, otherwise bytes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from http.server import ThreadingHTTPServer
from itertools import cycle, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from documents import Hub  # noqa: E402

FILES, DOCUMENT, GROUP = 4, 6000, 40  # files, bytes per document, documents per row group
# runs a preparation and then prints its process's seconds, CPU seconds and memory peak
MEASURED = """
import re, runpy, sys, time
sys.argv = sys.argv[1:]
sys.path[0] = "data"
began = time.perf_counter()
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
    print("figures:", time.perf_counter() - began, time.process_time(), int(peak) / 1024)
"""


def make_source(size: int) -> dict[str, bytes]:
    """Make parquet files with about `size` bytes of text; no document follows itself."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(f.read_text("utf-8", "ignore") for f in sorted(library.glob("**/*.py"))[:2000])
    documents = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    each = size // DOCUMENT // FILES
    endless = cycle(documents)
    files = {}
    for number in range(FILES):
        table = pa.table({"text": list(islice(endless, each))})
        buffer = pa.BufferOutputStream()
        pq.write_table(
            table, buffer, row_group_size=GROUP, compression="none", use_dictionary=False
        )
        files[f"{number}.parquet"] = buffer.getvalue().to_pybytes()
    return files


def prepare(order: str, tokens: int, tokenizer: str, address: str, work: Path) -> dict:
    before = Hub.sent
    command = [sys.executable, "-c", MEASURED, "data/prepare_fineweb.py", "--dataset=org/name"]
    command += [f"--tokens={tokens}", "--val_tokens=500k", f"--tokenizer={tokenizer}"]
    command += [f"--order={order}", f"--out={work / order}{time.time()}", "--workers=1"]
    hub = dict(HF_ENDPOINT=address, HF_HOME=str(work), HF_HUB_OFFLINE="0")
    done = subprocess.run(command, cwd=ROOT, env=os.environ | hub, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    wall, cpu, peak = map(float, re.findall(r"figures: (\S+) (\S+) (\S+)", done.stdout)[0])
    figures = dict(wall_s=round(wall, 2), cpu_s=round(cpu, 2), peak_mb=round(peak))
    return dict(order=order, **figures, downloaded_mb=round((Hub.sent - before) / 1e6, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, default=40e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = int(options.tokens)
    tokenizer = "gpt2" if os.environ.get("TIKTOKEN_CACHE_DIR") else "byte"
    # make more text than a preparation reads; code has about 3.2 bytes per GPT-2 token
    Hub.files = make_source(tokens * (5 if tokenizer == "gpt2" else 2) + 80_000_000)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for order in ("prefix", "shuffled"):
                rows.append(prepare(order, tokens, tokenizer, address, Path(folder)))
                print(rows[-1], flush=True)
    server.shutdown()
    if options.json:
        what = f"{tokens:,} tokens of {tokenizer}, 500k for validation, in turn"
        found = dict(command=" ".join(["python", *sys.argv]), what=what, runs=rows)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
