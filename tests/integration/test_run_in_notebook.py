"""Run the scripts as a notebook's %run does."""

import io
import runpy
import signal
from unittest import mock

import pytest
from program import ROOT, TINY_RUN, flags


class OutStream(io.StringIO):
    """Stand in for Jupyter's stdout, which is no TextIOWrapper."""


def test_a_notebook_runs_the_scripts_and_gets_its_signal_handlers_back(tokens, tmp_path):
    def of_the_notebook(number, frame):
        pass

    signal.signal(signal.SIGTERM, of_the_notebook)
    out_dir = tmp_path / "run"
    keys = TINY_RUN | dict(dataset=tokens, out_dir=out_dir)
    keys |= dict(max_iters=4, eval_interval=2, eval_tokens=64)
    out = OutStream()
    scripts = [
        ("train.py", *flags(**keys)),
        ("train.py", *flags(**keys | dict(init_from="resume", learning_rate=-1))),  # refused
        ("sample.py", f"--out_dir={out_dir}", "--num_samples=1", "--max_new_tokens=3"),
        ("compare.py", out_dir),
        ("convert.py", "--help"),
    ]
    for script, *arguments in scripts:
        with (
            mock.patch("builtins.get_ipython", object, create=True),
            mock.patch("sys.stdout", out),
            mock.patch("sys.argv", [script, *map(str, arguments)]),
            pytest.raises(SystemExit),
        ):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert signal.getsignal(signal.SIGTERM) is of_the_notebook
    assert "iter 3: loss" in out.getvalue()
    assert "best val loss" in out.getvalue()
