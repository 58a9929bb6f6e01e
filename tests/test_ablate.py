"""
benchmarks/ablate.py: a small study that is stopped and continued, and studies that cannot be.
"""

import json
import re

import pytest

from benchmarks import ablate

# Stands for train.py: writes the metrics.jsonl of a run whose final loss is 2 - rate - seed / 100,
# or fails where it is told to. It leaves a run that it finds alone, as --init_from=auto does.
STUB = """
import json, pathlib, sys
given = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
if "fail" in given:
    sys.exit("error: n_head: 7 does not divide n_embd")
assert given["init_from"] == "auto"
folder = pathlib.Path(given["out_dir"])
if not folder.exists():
    folder.mkdir()
    final = 2 - float(given["rate"]) - int(given["seed"]) / 100
    config = dict(learning_rate=float(given["rate"]), seed=int(given["seed"]))
    config |= dict(eval_tokens=int(given.get("eval_tokens", 8192)))
    records = [dict(kind="start", iter=0, config=config, tokens_per_iter=1000)]
    records[0] |= dict(data_fingerprint=given.get("data", "prose"))
    for it, loss in ((0, 5.0), (50, 3.0), (100, final)):
        records.append(dict(kind="eval", iter=it, val_loss=loss, seconds=1.0))
        records.append(dict(kind="step", iter=it, tokens=1000 * it, loss=loss, step_ms=10.0))
    text = "".join(json.dumps(record) + chr(10) for record in records[:-1])
    (folder / "metrics.jsonl").write_text(text)
"""


@pytest.fixture
def study(script, tmp_path):
    """ablate.py with the stub in place of train.py: (exit code, stdout, lines of stderr)."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)

    def run(*arguments):
        return script(ablate.main, tmp_path / "study", f"--script={stub}", *arguments)

    return run


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["a=--rate=2", "a=--rate=3"], "a: was '--rate=2' before"),
        (["config/quickstart.py"], "config/quickstart.py: needs NAME="),
        (["old=--rate=3"], "old: was '--rate=2' before"),
        (["b=--rate=2", "--seeds=0"], "--seeds"),
    ],
)
def test_what_cannot_be_a_study_is_one_line(arguments, says, tmp_path, study):
    (tmp_path / "study" / "old-1").mkdir(parents=True)
    (tmp_path / "study" / "variants.json").write_text('{"old": "--rate=2"}')
    code, _, err = study(*arguments)
    assert code == 2 and len(err) == 1 and says in err[0]


def test_a_study_continues_where_it_stopped_and_compares_at_equal_tokens(study, tmp_path):
    assert study("--seeds=2", "slow=--rate=0.2")[0] == 0
    first = tmp_path / "study" / "slow-1" / "metrics.jsonl"
    written = first.stat().st_mtime_ns
    code, out, _ = study("--seeds=2", "slow=--rate=0.2", "quick=--rate=0.5")
    assert code == 0 and first.stat().st_mtime_ns == written
    result = json.loads((tmp_path / "study" / "ablation.json").read_text())
    assert re.fullmatch("[0-9a-f]{7,40}", result["commit"])
    slow, quick = result["variants"]
    # 2 - 0.2 less 0.01 and 0.02
    assert slow["val_loss"] == result["target"] == pytest.approx(1.785)
    assert slow["spread"] == pytest.approx(0.01)
    assert slow["tokens_to_target"] == slow["tokens"] == quick["tokens"] == 100_000
    # from 3.0 at 50,000 tokens to 1.485 at 100,000
    reached = 50_000 + 50_000 * (3.0 - 1.785) / (3.0 - 1.485)
    assert quick["tokens_to_target"] == pytest.approx(reached)
    assert "90.1k" in out
    assert (tmp_path / "study" / "ablation.png").stat().st_size > 10_000


@pytest.mark.parametrize("other", ["--data=sources", "--eval_tokens=4096"])
def test_losses_on_unequal_tokens_are_not_ranked(other, study):
    code, out, err = study("--seeds=1", "a=--rate=0.2", f"b=--rate=0.3 {other}")
    assert code == 2 and not out and "losses do not compare" in err[-1]


def test_seeds_with_other_settings_are_not_averaged(study, tmp_path):
    assert study("--seeds=1", "a=--rate=0.2")[0] == 0
    file = tmp_path / "study" / "a-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"learning_rate": 0.2', '"learning_rate": 0.1'))
    code, _, err = study("--seeds=2", "a=--rate=0.2")
    assert code == 2 and "a: its seeds differ in learning_rate" in err[-1]


def test_a_variant_that_never_ran_may_be_mended_under_its_name(study):
    assert study("--seeds=1", "x=--fail=1")[0] == 2
    assert study("--seeds=1", "x=--rate=0.2")[0] == 0


def test_a_variant_that_fails_stops_the_study_in_one_line(study):
    code, _, err = study("x=--fail=1")
    assert code == 2 and err[-1].startswith("error: ") and "exit code 1" in err[-1]
