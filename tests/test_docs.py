"""
README and docs: one page, links that lead somewhere, commands that run, and figures that the
program still prints.
"""

import contextlib
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from helpers import ROOT

import bench
from benchmarks import plan as planning
from configurator import FIELDS, load_config
from training.gpus import read_gpu_table, short_name

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "LOG.md"]
GUIDES = [page for page in PAGES if page.name != "LOG.md"]  # the log names scripts that are gone
FOLDERS = ["", "data", "training", "reports", "benchmarks", "common", "results"]


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code_blocks(page: Path, language: str = r"\w*") -> list[str]:
    """The code blocks of a page that are marked with a language; by default all of them."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def command_lines(page: Path) -> list[list[str]]:
    """The words of each `python X.py ...` and `torchrun ... X.py ...`, from the script on."""
    lines = re.findall(r"`(python [^`\n]+)`", page.read_text(encoding="utf-8"))
    for block in code_blocks(page):
        lines += block.replace("\\\n", " ").splitlines()
    commands = []
    for line in lines:
        line = line.removeprefix("$ ")
        if line.startswith(("python ", "torchrun ")):
            words = shlex.split(line, comments=True)
            if words[1] == "-m":
                words[2] = words[2].replace(".", "/") + ".py"
            first = next(i for i, word in enumerate(words) if word.endswith(".py"))
            commands.append(words[first:])
    return commands


def known_flags(script: str, arguments: list[str], capsys) -> set[str]:
    """The names of the flags that a script documents."""
    if script in ("train.py", "configurator.py"):
        experiments = (ROOT / "docs" / "experiment.md").read_text(encoding="utf-8")
        return {*FIELDS, *re.findall(r"^\+    (\w+): \w+ = key\(", experiments, re.MULTILINE)}
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    subcommand = arguments[:1] if script in ("bench.py", "convert.py") else []
    with contextlib.suppress(SystemExit):
        module.main([*subcommand, "--help"])
    flags = set(re.findall(r"--(\w+)", capsys.readouterr().out))
    if script == "bench.py":  # takes the configuration's keys too
        flags |= set(FIELDS) | set(re.findall(r"--(\w+)", bench.__doc__))
    return flags


def rounds_to(value: float, shown: str) -> bool:
    """Whether `shown` is `value` rounded to as many decimals as it has."""
    decimals = len(shown.partition(".")[2])
    return abs(value - float(shown)) <= 0.5 * 10**-decimals + 1e-9


@pytest.mark.upstream
def test_readme_is_one_page():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 140
    assert len(text.split()) <= 1800


def test_the_first_two_bash_blocks_are_the_two_set_ups():
    """A script runs them as they are in a fresh clone."""
    venv = "python3 -m venv .venv && . .venv/bin/activate"
    install = "pip install -r {} -c constraints.txt"
    quickstart, tests = [block.splitlines() for block in code_blocks(README, "bash")]
    assert quickstart[:2] == [venv, install.format("requirements.txt")]
    assert quickstart[2:] == ["python train.py config/quickstart.py"]
    assert tests[:2] == [venv, install.format("requirements-dev.txt")]
    assert tests[2:] == ['pytest -m "not slow"']


def test_readme_installs_the_torch_that_was_tested():
    version = re.search(r"pip install (torch==[\d.]+) ", README.read_text(encoding="utf-8"))
    assert version[1] in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        if target.startswith(("http://", "https://", "#")):
            continue
        assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", GUIDES, ids=page_name)
def test_every_command_names_a_script_its_config_files_and_its_flags(page, capsys):
    for script, *arguments in command_lines(page):
        assert (ROOT / script).is_file(), script
        flags = known_flags(script, arguments, capsys) | {"help"}
        for word in arguments:
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                assert name in flags, f"{script} {word}"
            elif word.startswith("config/"):
                assert (ROOT / word).is_file(), f"{script} {word}"


def test_commands_are_found_in_readme():
    """Guards the test above against a pattern that finds nothing."""
    scripts = {command[0] for command in command_lines(README)}
    assert {"train.py", "bench.py", "sample.py", "compare.py", "convert.py"} <= scripts


def test_the_tree_in_readme_names_files_that_exist():
    section = README.read_text(encoding="utf-8").partition("## Where is what")[2]
    tree = section.split("```")[1]
    names = re.findall(r"[\w/]+\.(?:py|csv|md)", tree)
    assert len(names) > 10
    for name in names:
        assert any((ROOT / folder / name).exists() for folder in FOLDERS), name


def test_the_log_lines_in_readme_multiply_to_the_tokens_of_an_iteration():
    """time x tok/s is the quickstart's 32 sequences of 64 tokens."""
    lines = re.findall(r"^iter .*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert lines
    for line in lines:
        ms = float(re.search(r"time ([\d.]+)ms", line)[1])
        tokens_per_sec = float(re.search(r"tok/s ([\d,]+)", line)[1].replace(",", ""))
        assert ms / 1000 * tokens_per_sec == pytest.approx(32 * 64, rel=0.01)


def test_the_plan_in_readme_is_what_bench_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    block = next(b for b in code_blocks(README) if b.startswith("$ python bench.py plan"))
    command, *shown = block.splitlines()
    arguments = shlex.split(command)[3:]
    given = " ".join(arguments)
    assert "--gpu=" in given and "--iter_seconds=" in given  # the same figures on any machine
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert shown
    for line in shown:
        assert line in printed


def table_of_cards() -> list[tuple[str, str, str, str]]:
    """(card, config, hours, memory) of each run in README's table of cards."""
    runs = []
    text = README.read_text(encoding="utf-8")
    for row in re.findall(r"^\| .*_\w+ \| .* GiB \|.*$", text, re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        card = cells[0]
        for config, hours, memory in (cells[1:4], cells[4:7]):
            if config:
                runs.append((card, config, hours, memory))
    return runs


@pytest.mark.parametrize(
    "card, config, hours, memory", table_of_cards(), ids=lambda cell: cell.replace(" ", "-")
)
def test_the_table_of_cards_is_what_plan_estimates(
    card, config, hours, memory, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    plan = plan_of(ROOT / f"config/{config}.py", card, tmp_path)
    assert_planned(hours, plan)
    assert rounds_to(plan["vram_gib"], memory.removesuffix(" GiB"))


def plan_of(config: Path, gpu: str, tmp_path: Path, *flags: str) -> dict:
    path = tmp_path / "plan.json"
    bench.main(["plan", str(config), f"--gpu={gpu}", f"--json={path}", *flags])
    return json.loads(path.read_text())


def assert_planned(text: str, plan: dict) -> None:
    """`63 hours (48 to 91)`, or as README's table has it, 63 (48 to 91)"""
    shown = re.search(r"([\d.]+)(?: hours)? \(([\d.]+) to ([\d.]+)\)", text).groups()
    for hours, rounded in zip((plan["hours"], *plan["hours_range"]), shown, strict=True):
        assert rounds_to(hours, rounded), (text, hours)


GPU_CONFIGS = [
    path for path in sorted((ROOT / "config").glob("*m_*.py")) if path.stem != "gpt124m_cpu"
]


@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda path: path.stem)
def test_the_times_in_a_configs_comments_are_what_plan_estimates(config, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = config.read_text(encoding="utf-8")
    gpu = re.search(rf"^# python bench.py plan config/{config.name} --gpu=(\w+)$", text, re.M)[1]
    plan = plan_of(config, gpu, tmp_path)
    assert_planned(
        re.search("^# Not measured on that card. Estimated for .*$", text, re.M)[0], plan
    )
    for name, minutes in re.findall(
        r"^(\w+_interval) = .*(?:every|at most) (\d+) minutes", text, re.M
    ):
        expected = getattr(load_config([str(config)]), name) * plan["iter_seconds"] / 60
        assert int(minutes) == pytest.approx(expected, rel=0.1)


def test_the_hours_of_the_fast_recipes_projection_are_what_plan_estimates(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "fast_recipe.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| ([\d.]+)B \| (.* hours, .*) \| (.* hours, .*) \|$", text, re.M)
    assert len(rows) == 3
    for billions, *cells in rows:
        recipe, flags = "fast124m", []  # 1.30B is the length of that config
        if billions != "1.30":
            recipe, flags = "gpt124m", [f"--max_iters={round(1e9 * float(billions) / 524_288)}"]
        for gpu, watts, cell in zip(("4070", "a100"), (200, 400), cells, strict=True):
            plan = plan_of(ROOT / f"config/{recipe}_{gpu}.py", gpu, tmp_path, *flags)
            assert_planned(cell, plan)
            low, high = re.search(r"([\d.]+) to ([\d.]+) kWh", cell).groups()
            assert rounds_to(plan["hours_range"][0] * watts / 1000, low)
            assert rounds_to(plan["hours_range"][1] * watts / 1000, high)


def test_the_mfu_ranges_in_benchmarks_are_those_of_plan():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| .* \| (\d+) % \| (\d+) % \| (\d+) % \|$", text, re.M)
    ranges = (planning.GEFORCE_MFU, planning.LAPTOP_MFU, planning.OTHER_MFU)
    assert [tuple(int(percent) / 100 for percent in row) for row in shown] == list(ranges)
    published = re.search(r"^Published, in %: (.*?)\.\n", text, re.M | re.S)[1].replace("\n", " ")
    entry = r"([^,]+?)(?: \(\w+\))? (\d+(?:-\d+)?)(?: \(.*?\))?(?:, |$)"  # L4 28 (a remark)
    entries = dict(re.findall(entry, published))
    for row in read_gpu_table():
        if row["mfu_percent"]:
            names = [name for name in entries if name in short_name(row)]
            assert entries[max(names, key=len)] == row["mfu_percent"], row["name"]
    assert len(entries) == 14


def test_the_table_of_cards_is_read():
    assert len(table_of_cards()) >= 6
