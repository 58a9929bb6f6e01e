"""
Check how torch's threads wait for one another.

libgomp itself reports how it waits: with OMP_DISPLAY_ENV it prints its settings when torch is
imported.
"""

import os
import re
import runpy
import sys

import pytest
from cases import slow_but
from program import finish, start

from common import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's on Linux")


USER = [{}, dict(GOMP_SPINCOUNT="77"), dict(OMP_WAIT_POLICY="active")]


@pytest.mark.parametrize("given", USER)
def test_threads_spin_shortly_unless_the_user_says_how_they_wait(given, monkeypatch):
    monkeypatch.setattr(os, "environ", {"HOME": "/home/user"} | given)
    runpy.run_path(environment.__file__)
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    found = {name: os.environ[name] for name in names if name in os.environ}
    assert found == (given or dict(GOMP_SPINCOUNT="10000"))


@pytest.mark.parametrize("script", slow_but("train.py", of=["train.py", "sample.py", "bench.py"]))
def test_every_script_that_trains_or_samples_sets_how_torchs_threads_wait(script, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    ended = finish(start(script, "--help", cold=True, OMP_DISPLAY_ENV="verbose"))
    assert ended.code == 0
    assert re.findall("GOMP_SPINCOUNT = '(.*)'", ended.err) == ["10000"]
