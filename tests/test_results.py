"""
results/ablate.py: bad studies, and a small one that is stopped and goes on.
"""

import json
import re
import shlex

import pytest
from helpers import ROOT, flags, records, run_process


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "results").glob("*.py")))
def test_help_is_the_docstring(name):
    code, out, err = run_process(f"results/{name}", "--help")
    usage = re.search(rf"python results/{name}.*", (ROOT / "results" / name).read_text())[0]
    assert code == 0 and usage in out and not err


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["a=--max_iters=2", "a=--max_iters=3"], "two have one name"),
        (["config/quickstart.py"], "config/quickstart.py: needs NAME="),
        (["old=--max_iters=3"], "old: was '--max_iters=2' in this folder"),
        (["b=--max_iters=2", "--seeds=0"], "--seeds"),
    ],
)
def test_what_cannot_be_a_study_is_one_line(arguments, says, tmp_path):
    (tmp_path / "variants.json").write_text('{"old": "--max_iters=2"}')
    code, _, err = run_process("results/ablate.py", str(tmp_path), *arguments)
    assert code == 2 and len(err.splitlines()) == 1 and says in err


def test_a_study_goes_on_where_it_stopped_and_compares_at_equal_tokens(dataset, tmp_path):
    options = shlex.join(
        option
        for option in flags(dataset, tmp_path, eval_interval=2)
        if not option.startswith("--out_dir")
    )
    variants = [
        f"slow={options}",
        f"quick={options.replace('--learning_rate=0.01', '--learning_rate=0.03')}",
    ]
    command = ["results/ablate.py", str(tmp_path / "study"), "--seeds=2"]
    assert run_process(*command, variants[0])[0] == 0
    first = (tmp_path / "study/slow-1/metrics.jsonl").read_text()
    code, out, err = run_process(*command, *variants)
    assert code == 0, err
    assert (
        tmp_path / "study/slow-1/metrics.jsonl"
    ).read_text() == first  # a finished run is left alone
    result = json.loads((tmp_path / "study/ablation.json").read_text())
    slow, quick = result["variants"]
    finals = [records(tmp_path / f"study/slow-{seed}", "eval")[-1]["val_loss"] for seed in (1, 2)]
    assert slow["val_loss"] == result["target"] == pytest.approx(sum(finals) / 2)
    assert slow["spread"] == pytest.approx(abs(finals[0] - finals[1])) and finals[0] != finals[1]
    assert quick["tokens"] == slow["tokens"] == 8 * 4 * 16 * 2
    assert (tmp_path / "study/ablation.png").stat().st_size > 10_000


def test_a_variant_that_fails_stops_the_study_in_one_line(tmp_path):
    code, _, err = run_process("results/ablate.py", str(tmp_path / "study"), "x=--n_head=7")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ") and "n_head" in err
