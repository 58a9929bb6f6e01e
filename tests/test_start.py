"""What a start takes from a checkpoint, and what it refuses."""

import shutil
from pathlib import Path

import pytest
from helpers import ROOT, flags, load, run_here, run_process

from common.console import UserError, count


@pytest.mark.slow
def test_a_new_field_of_the_model_is_architecture_from_the_start(dataset, tmp_path):
    """In a copy of the program, as somebody would add one: first the field, then its key."""
    for folder in (".", "common", "data", "training", "reports"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for path in [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.csv")]:
            shutil.copy(path, tmp_path / folder)

    def insert(file: str, before: str, line: str) -> None:
        text = Path(tmp_path / file).read_text()
        assert text.count(before) == 1
        (tmp_path / file).write_text(text.replace(before, line + before))

    def run(**changes) -> tuple[int, str]:
        arguments = flags(dataset, tmp_path / "run", max_iters=2, **changes)
        code, _, err = run_process("train.py", *arguments, cwd=tmp_path, cold=True)
        return code, err

    insert("model.py", "    dropout: float", "    window: int = 0\n")
    insert("configurator.py", "    dropout: float", "    window: int = 0\n")
    assert run()[0] == 0
    code, err = run(init_from="resume", window=8)
    assert code == 2 and "window 0 (asked for: 8)" in err


@pytest.mark.parametrize("name", ["best.pt", "ckpt-00000008 (1).pt"])
def test_a_checkpoint_of_another_name_is_not_passed_over(name, dataset, tmp_path):
    """A browser gives such names; a new run in its place would cost hours."""
    assert run_here(dataset, tmp_path / "a", max_iters=8) == 0
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "ckpt-00000008.pt", tmp_path / "b" / name)
    with pytest.raises(UserError) as raised:
        run_here(dataset, tmp_path / "b", init_from="auto", max_iters=10)
    (problem,) = raised.value.problems
    target = tmp_path / "b" / "ckpt-00000008.pt"
    assert name in problem
    shutil.copy(tmp_path / "b" / name, target)
    assert run_here(dataset, tmp_path / "b", init_from="auto", max_iters=10) == 0


def test_the_tokens_of_a_resumed_run_count_what_is_trained_already(dataset, tmp_path, capsys):
    run_here(dataset, tmp_path, max_iters=8, batch_size=4)
    tokens = load(tmp_path, 8)["progress"]["tokens"]
    capsys.readouterr()
    run_here(dataset, tmp_path, init_from="resume", max_iters=10, batch_size=2)
    out = capsys.readouterr().out
    total = load(tmp_path, 10)["progress"]["tokens"]
    assert total < 2 * tokens and f"run: 10 iterations, {count(total)} tokens" in out
