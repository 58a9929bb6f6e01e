"""
Compare the shards of --order=records with those of llm.c's own script, on local parquet files:

    python dev/compare_llmc.py --script=../llm.c/dev/data/fineweb.py sample.parquet

llm.c's script runs unchanged, but its load_dataset reads the local files instead of the hub's.
Prints JSON: each shard's tokens, and whether the bytes are equal.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THEIRS = """
import runpy, sys
import datasets
files, script = sys.argv[1].split("|"), sys.argv[2]
load = datasets.load_dataset
datasets.load_dataset = lambda *_, **__: load("parquet", data_files=files, split="train")
sys.argv = sys.argv[2:]
sys.path.insert(0, script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="parquet files")
    parser.add_argument("--script", type=Path, required=True, help="llm.c's dev/data/fineweb.py")
    parser.add_argument("--shard_tokens", type=int, default=25_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in (arguments.script.name, "data_common.py"):
            (work / name).write_bytes((arguments.script.parent / name).read_bytes())
        (work / "source").mkdir()
        for number, name in enumerate(arguments.files):
            (work / "source" / f"{number:03}.parquet").write_bytes(Path(name).read_bytes())
        files = "|".join(str(path) for path in sorted((work / "source").iterdir()))
        size = f"--shard_size={arguments.shard_tokens}"
        command = [sys.executable, "-c", THEIRS, files, str(work / arguments.script.name), size]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=work)
        command = [sys.executable, "data/prepare_fineweb.py", f"--source={work / 'source'}"]
        command += ["--order=records", "--tokens=1B", f"--shard_tokens={arguments.shard_tokens}"]
        command += [f"--out={work / 'ours'}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        rows = []
        theirs = sorted((work / "fineweb10B").glob("*.bin"), key=lambda path: path.stem[-6:])
        ours = sorted((work / "ours").glob("*.bin"), key=lambda path: path.stem[-6:])
        for a, b in zip(theirs, ours, strict=True):
            content = a.read_bytes()
            row = dict(llmc=a.name, ours=b.name, tokens=(len(content) - 1024) // 2)
            equal = content == b.read_bytes()
            rows.append(row | dict(sha256=hashlib.sha256(content).hexdigest(), equal=equal))
    rows_equal = sum(row["equal"] for row in rows)
    print(json.dumps(dict(shards=len(rows), byte_equal=rows_equal, rows=rows), indent=1))
    sys.exit(rows_equal != len(rows))


if __name__ == "__main__":
    main()
