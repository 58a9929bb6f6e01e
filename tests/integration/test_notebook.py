"""
Run notebook.ipynb with tiny models on a CPU, both the steps that need no GPU and those that do.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import documents, serve_hub, write_parquet
from program import ROOT, changed, column, records, write_tokens

from common.console import UserError
from data.tokenizer import Tokenizer

NOTEBOOK = ROOT / "notebook.ipynb"
ALL_CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CELLS = ["".join(cell["source"]) for cell in ALL_CELLS if cell["cell_type"] == "code"]
# what IPython gives to the shell: a line that begins with !, and its continuation lines
SHELL = re.compile(r"^( *)!((?:.*\\\n)*.*)$", re.MULTILINE)
TINY = "--n_layer=6 --n_head=1 --n_embd=16 --block_size=32 --batch_size=4 --max_iters=4 "
TINY += "--eval_interval=2 --eval_tokens=256 --sample_tokens=8 --device=cpu --compile=False"


def commit_program(folder: Path) -> str:
    """Commit a copy of the program to a new repository and return its address."""
    shutil.copy(ROOT / "requirements.txt", changed(folder, {}))
    someone = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*someone, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return f"file://{folder}"


def run_command(command: str, outputs: list[str]) -> None:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    outputs.append(done.stdout)


def edit(cells: list[str], **lines: str) -> list[str]:
    """Return the cells after changing the environment variables in `lines` to these values."""
    for name, value in lines.items():
        line = re.compile(rf'^(os\.environ\["{name}"\] = )".*"', re.MULTILINE)
        assert len(line.findall("\n".join(cells))) == 1, name
        cells = [line.sub(rf'\1"{value}"', source) for source in cells]
    return cells


def run_cells(cells: list[str], **flags: str) -> list[str]:
    """
    Run the cells as one program and return what each of their shell commands printed. No command
    may fail. `flags` are added to the commands that contain their name.
    """
    outputs = []
    names = dict(run_command=run_command, outputs=outputs)

    def call(match: re.Match) -> str:
        added = " ".join(["", *(more for name, more in flags.items() if name in match[2])])
        return f"{match[1]}run_command(r'''{match[2]}{added}''', outputs)"

    for source in cells:
        exec(SHELL.sub(call, source), names)
    return outputs


@pytest.fixture
def fresh_folder(tmp_path, monkeypatch):
    """
    Change to an empty folder. Give pip no package index, and the cells none of the variables that
    they set.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names = dict(PATH=path, PIP_NO_INDEX="1", OMP_NUM_THREADS="1")
    for name in "REPOSITORY BOOK TEXT TEXT_FLAGS OWN ITERS OUT".split():  # which the cells set
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_book(path: Path) -> None:
    path.write_text("\n\n".join(filter(None, documents(300))), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_notebooks_cells_run_in_order_in_a_fresh_folder(fresh_folder, monkeypatch):
    """
    Replace FineWeb-Edu with a parquet file of 300 documents. Run the first five cells again, as
    after closing the browser: no run trains again.
    """
    try:
        Tokenizer({"kind": "gpt2"})
    except UserError as error:
        pytest.skip(str(error))
    parquet = write_parquet(fresh_folder / "fineweb" / "a.parquet", documents(300))
    write_book(fresh_folder / "book.txt")
    flags = dict(
        ITERS=TINY,
        prepare_fineweb="--dataset=org/name --name=small --tokens=4000 --val_fraction=0.15",
        fast40m=f"{TINY} --tokens_per_iter=256 --dtype=float16",
        fast124m=f"{TINY} --tokens_per_iter=256 --dtype=float16",
    ) | {"config/quickstart.py": TINY}
    pictures = []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=pictures.append))

    cells = edit(CELLS, REPOSITORY=commit_program(fresh_folder / "source"))
    with serve_hub(parquet.parent) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(fresh_folder / "hub"))
        outputs = run_cells(cells, **flags)
    _, _, quickstart, book, read, wrote, prepared, trained, figures, samples, changed, compared = (
        outputs
    )
    clone = fresh_folder / "nightshift"
    assert Path.cwd() == clone
    assert "end: max_iters after 4 iterations" in quickstart
    assert "data/my_book_" in book and "end: max_iters after 4 iterations" in read
    assert wrote.count("The ") >= 2
    tokens = re.search(r"data/fineweb_100M: .* ([\d,]+) tokens for training", prepared)[1]
    assert 4000 <= int(tokens.replace(",", "")) < 4200
    assert "end: max_iters after 4 iterations, 1.02k tokens" in trained
    start = records(clone / "out" / "notebook", "start")[0]
    assert (start["dtype"], start["config"]["model"]) == ("float16", "fast")
    assert "best val loss" in figures
    assert [(clone / name).read_bytes()[:4] for name in pictures] == [b"\x89PNG"]
    assert samples.count("The sun is") == 3
    # the changed model trained and was compared, and the file is as it was
    assert "end: max_iters after 4 iterations" in changed and "best val loss" in compared
    runs = [column(clone / "out" / name, "eval", "val_loss") for name in ("quickstart", "changed")]
    assert runs[0] != runs[1]
    assert (clone / "model_fast.py").read_bytes() == (ROOT / "model_fast.py").read_bytes()
    # once more, as after closing the browser: nothing is lost and nothing fails
    _, quickstart, read, _, prepared, trained = run_cells(cells[:5], **flags)
    assert all("all 4 iterations are done" in out for out in (quickstart, read))
    assert "nothing to do" in prepared
    assert "all 4 iterations are done" in trained


@pytest.mark.slow
def test_the_night_on_two_gpus_continues_in_a_second_session(fresh_folder, monkeypatch):
    """Replace the GPUs with two processes on the CPU, and the download with small shards."""
    for path in write_tokens(fresh_folder / "shards", [3000] * 20, [3000]).glob("*.bin"):
        path.rename(path.with_name(f"fineweb_{path.name}"))
    changed(fresh_folder / "nightshift", {})
    monkeypatch.chdir(fresh_folder / "nightshift")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    _, _, _, data, train, *_ = CELLS
    cells = ["import os", data.replace("NIGHT = False", "NIGHT = True"), train]
    flags = f"{TINY} --tokens_per_iter=256 --dtype=float16 --checkpoint_interval=2"
    with serve_hub(fresh_folder / "shards", inside="") as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        (first,) = run_cells(cells, fast124m=f"{flags} --keep_checkpoints=2")
        Path("out/night/ckpt-00000004.pt").unlink()  # as if the session had ended before it
        (second,) = run_cells(cells, fast124m=flags)
    assert "resume: out/night/ckpt-00000002.pt" in second
    assert all("end: max_iters after 4 iterations" in output for output in (first, second))
    start = records(Path("out/night"), "start")[0]
    assert (start["dtype"], start["world_size"], start["config"]["hours"]) == ("float16", 2, 11)
