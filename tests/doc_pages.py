"""Read pages, code blocks, commands and figures in README, docs/ and results/."""

import contextlib
import functools
import json
import re
import shlex
import tempfile
from pathlib import Path
from unittest import mock

from program import ROOT, InProcessRun, run

README = ROOT / "README.md"
GUIDES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*GUIDES, *sorted((ROOT / "results").glob("*.md"))]  # results may name older files


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code_blocks(page: Path, language: str = r"\w*") -> list[str]:
    """Return the code blocks of a page that are marked with a language; by default all of them."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def command_lines(page: Path) -> list[list[str]]:
    """
    Return the words, from the script on, of each `python X.py ...` on a page and of each
    `torchrun ... X.py ...` in its code blocks.
    """
    lines = re.findall(r"`(python [^`\n]+)`", read(page))
    for block in code_blocks(page):
        lines += block.replace("\\\n", " ").splitlines()
    commands = []
    for line in lines:
        # both scripts run the command that follows
        line = line.removeprefix("$ ").replace("python night.py ", "python ")
        line = line.replace("python dev/same_run.py -- ", "python train.py ")
        if line.startswith(("python ", "torchrun ")):
            words = shlex.split(line, comments=True)
            if words[1] == "-m":
                words[2] = words[2].replace(".", "/") + ".py"
            first = next(i for i, word in enumerate(words) if word.endswith(".py"))
            commands.append(words[first:])
    return commands


@functools.cache
def known_flags(script: str, mode: str = "") -> set[str]:
    """Return the flags that a script's --help lists. `mode` is bench.py's."""
    told = run(script, *mode.split(), "--help").out
    flags = {*re.findall(r"--(\w+)", told)}
    if script in ("bench.py", "configurator.py"):  # these take train.py's keys too
        return flags | known_flags("train.py")
    return flags


def flags_of(command: list[str]) -> set[str]:
    """Return the names of all flags that a command's script and mode take."""
    script, *arguments = command
    mode = arguments[0] if script == "bench.py" and arguments else ""
    return known_flags(script, mode if mode.isidentifier() else "") | {"help"}


# -----------------------------------------------------------------------------
# Figures


def block_with(text: str) -> str:
    """Return the only code block with this text on the pages outside results/."""
    (block,) = [block for page in GUIDES for block in code_blocks(page) if text in block]
    return block


def numbers(text: str) -> list[str]:
    """
    Return the unsigned numbers in a text, as written. Skips digits after a letter, '-', '.' or '/',
    as in GPT-2 or a path; of a date only the year remains.
    """
    return re.findall(r"(?<![\w./-])\d[\d,]*(?:\.\d+)?(?![\d/])", text)


def rounds_to(value: float, shown: str) -> bool:
    """Return whether `shown` is `value`, rounded to as many decimals as are shown."""
    decimals = len(shown.partition(".")[2])
    return abs(value - float(shown.replace(",", ""))) <= 0.5 * 10**-decimals + 1e-9


def holds(text: str, values: list[float]) -> bool:
    """Return whether a text has these figures, rounded and in order, perhaps among others."""
    shown = iter(numbers(re.sub(r"\d{4}-\d\d-\d\d", "", text)))
    return all(any(rounds_to(value, number) for number in shown) for value in values)


@functools.cache
def plan(config: str, *flags: str) -> dict:
    """
    Return the figures and the output of `bench.py plan` for a config in config/, without a dataset,
    at the time of the evening that the pages show.
    """
    evening = mock.patch("time.time", lambda: InProcessRun.EVENING)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), evening:
        path = ROOT / "config" / f"{config}.py"
        told = run("bench.py", "plan", path, *flags, "--json=plan.json")
        assert told.code == 0, told.err
        return json.loads(Path("plan.json").read_text()) | dict(out=told.out)
