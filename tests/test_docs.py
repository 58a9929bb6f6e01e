"""
README and docs: links that lead somewhere, commands that run, messages that the program prints,
and figures that it still computes or that were measured.
"""

import ast
import contextlib
import importlib
import json
import math
import os
import re
import shlex
import statistics
import subprocess
from pathlib import Path

import draw_study
import pytest
import yaml
from helpers import ON_WINDOWS, ROOT, write_dataset
from matplotlib.figure import Figure
from packaging.requirements import Requirement

import bench
from configurator import FIELDS, find_keys, load_config
from reports import plan as planning
from sample import SampleConfig
from training.gpus import read_gpu_table, short_name
from training.hardware import CUDA_BUILD

README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results").glob("*.md")),
]
GUIDES = [page for page in PAGES if page.parent.name != "results"]  # those name scripts of old
FOLDERS = ["", "data", "training", "reports", "common", "results"]


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
        experiments = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")
        return {*FIELDS, *re.findall(r"^\+    (\w+): \w+ = ", experiments, re.MULTILINE)}
    if script == "sample.py":
        return {*find_keys(SampleConfig)}
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


def test_readme_is_a_front_door():
    """Short, with the first command on the first screen."""
    text = README.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    assert len(re.findall(r"\S*\w\S*", prose)) <= 1100
    assert text[: text.index("```bash")].count("\n") < 30


def test_the_first_two_bash_blocks_are_the_two_set_ups():
    """A script runs them as they are in a fresh clone."""
    venv = "python3 -m venv .venv && . .venv/bin/activate"
    install = "pip install -r {} -c constraints.txt"
    quickstart, tests = [block.splitlines() for block in code_blocks(README, "bash")]
    assert quickstart[:2] == [venv, install.format("requirements.txt")]
    assert quickstart[2:] == ["python train.py config/quickstart.py"]
    assert tests[:2] == [venv, install.format("requirements-dev.txt")]
    assert tests[2:] == ['pytest -m "not slow" -n 3']


def constraint(package: str) -> Requirement:
    """What constraints.txt says of it."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    (one,) = [requirement for requirement in found if requirement.name == package]
    return one


def test_the_constraints_leave_a_torch_with_cuda_alone_on_windows():
    """PyPI's torch has none there, and pip would put it in the place of one that has."""
    binds = constraint("torch").marker.evaluate
    assert not binds({"sys_platform": "win32"})
    assert binds({"sys_platform": "linux"}) and binds({"sys_platform": "darwin"})


@pytest.mark.parametrize("page", GUIDES, ids=page_name)
def test_a_page_installs_the_torch_that_was_tested(page):
    (tested,) = constraint("torch").specifier
    versions = re.findall(r"torch==([\d.]+)", page.read_text(encoding="utf-8"))
    assert all(version == tested.version for version in versions)
    assert versions or page.name != "install.md"


def test_powershell_asks_nothing_where_a_block_is_pasted():
    """It would take the next line for the answer; without one it is no."""
    blocks = code_blocks(ROOT / "docs" / "install.md", "powershell")
    lines = [line for block in blocks for line in block.splitlines() if "ExecutionPolicy" in line]
    assert lines and all(line.endswith(" -Force") for line in lines)


@pytest.mark.upstream
def test_a_laptops_4070_has_room_for_the_configs_that_the_install_page_gives_it(capsys):
    """With 1 GB for its desktop, of the 90 % that plan takes for free."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    small = [["config/gpt124m_4070.py"], ["config/fast40m_4070.py", "--batch_size=8"]]
    assert all(f"`{word}`" in text for command in small for word in command)
    for command, fits in [*((c, True) for c in small), (["config/fast124m_4070.py"], False)]:
        config = [str(ROOT / command[0]), *command[1:]]
        bench.main(["plan", *config, "--gpu=RTX 4070 Laptop"])
        out = capsys.readouterr().out
        modelled, room = (float(n) for n in re.findall(r"([\d.]+) GiB(?: estimated|[;,])", out)[:2])
        assert (modelled + 1 < room) is fits


def test_the_program_names_the_command_of_the_install_page():
    """For a torch without CUDA: the same version, and `+cu130`, or pip would leave a CPU build."""
    (tested,) = constraint("torch").specifier
    assert f"torch=={tested.version}+cu130 " in CUDA_BUILD
    assert CUDA_BUILD in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_the_workflow_runs_what_people_run():
    """GitHub's machines: the commands of `.ci/run` and of README, and the tested torch."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    linux, others = ([s["run"] for s in job["steps"] if "run" in s] for job in jobs.values())
    assert linux == [".ci/run"] and (ROOT / ".ci" / "run").is_file()
    (tested,) = constraint("torch").specifier
    dev = "-r requirements-dev.txt -c constraints.txt"
    assert others == [f"pip install torch=={tested.version} {dev}", 'pytest -m "not slow" -n 3']


def test_the_form_asks_for_the_file_of_the_command_on_the_status_page():
    form = ROOT / ".github" / "ISSUE_TEMPLATE" / "measurement.yml"
    (command,) = [c for c in command_lines(ROOT / "docs" / "status.md") if len(c) == 1]
    assert f"python {command[0]}\n" in form.read_text(encoding="utf-8")
    assert yaml.safe_load(form.read_text(encoding="utf-8"))["name"] in (
        (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    )


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_an_anchor_is_written_as_github_writes_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `key`: SwiGLU\n```\n# no heading\n```\n## After 0:00, plan's two-hour run\n"
    )
    assert anchors(page) == {"a-key-swiglu", "after-000-plans-two-hour-run"}


@pytest.mark.parametrize("page", GUIDES, ids=page_name)
def test_every_command_names_a_script_its_config_files_and_its_flags(page, capsys):
    commands = command_lines(page)
    written = [word.partition("--write=")[2] for command in commands for word in command]
    written += [file for c in commands for mark, file in zip(c, c[1:], strict=False) if mark == ">"]
    for script, *arguments in commands:
        assert (ROOT / script).is_file(), script
        flags = known_flags(script, arguments, capsys) | {"help"}
        for word in arguments:
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                assert name in flags, f"{script} {word}"
            elif word.startswith("config/"):
                assert word in written or (ROOT / word).is_file(), f"{script} {word}"


def test_commands_are_found_in_readme():
    """Guards the test above against a pattern that finds nothing."""
    scripts = {command[0] for command in command_lines(README)}
    assert {"train.py", "bench.py", "sample.py", "compare.py", "convert.py"} <= scripts


def test_the_layout_in_readme_names_what_exists():
    section = README.read_text(encoding="utf-8").partition("## How the code is laid out")[2]
    names = re.findall(r"\w+(?:\.\w+|/)", section.split("```")[1])
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_index_links_every_page():
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"\]\(([^)#]+)\)", index.read_text(encoding="utf-8"))
    linked = {(index.parent / link).resolve() for link in links}
    assert {page.resolve() for page in GUIDES} - {index} <= linked


def test_the_log_lines_in_readme_multiply_to_the_tokens_of_an_iteration():
    """time x tok/s is the quickstart's 32 sequences of 64 tokens."""
    lines = re.findall(r"^iter .*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert lines
    for line in lines:
        ms = float(re.search(r"time ([\d.]+)ms", line)[1])
        tokens_per_sec = float(re.search(r"tok/s ([\d,]+)", line)[1].replace(",", ""))
        assert ms / 1000 * tokens_per_sec == pytest.approx(32 * 64, rel=0.01)


def test_the_other_figures_in_readmes_log_follow_from_each_other(tmp_path):
    """
    The quickstart trains on bytes: a loss in nats per byte is loss / ln 2 in bits per byte and
    e^loss in perplexity. `tokens` is what came before the update.
    """
    text = README.read_text(encoding="utf-8")
    for line in re.findall(r"^iter .*$", text, re.MULTILINE):
        iteration = int(re.match(r"iter (\d+):", line)[1])
        assert rounds_to(iteration * 32 * 64 / 1e6, re.search(r"tokens ([\d.]+)M", line)[1])
    evaluations = re.findall(r"^step .*$", text, re.MULTILINE)
    assert evaluations
    for line in evaluations:
        loss = float(re.search(r"val loss ([\d.]+)", line)[1])
        half = 0.5e-4  # of the last decimal that is shown
        perplexity = float(re.search(r"perplexity ([\d.]+)", line)[1])
        assert math.log(perplexity) == pytest.approx(loss, abs=half + 0.5e-3 / perplexity)
        bits = float(re.search(r"([\d.]+) bits per byte", line)[1])
        # the end of a document is a token and no byte: one in some 20,000
        assert bits * math.log(2) == pytest.approx(loss * (1 + 1 / 20_000), abs=2 * half)
    bytes_of_python = write_dataset(tmp_path / "bytes", [70_000], vocab=256)
    path = tmp_path / "plan.json"
    run = [f"--dataset={bytes_of_python}", "--gpu=4070", f"--json={path}"]
    assert bench.main(["plan", str(ROOT / "config/quickstart.py"), *run]) == 0
    modelled_mb = 1000 * json.loads(path.read_text())["checkpoint_gb"]
    saved = re.findall(r"^checkpoint .*?, ([\d.]+)MB", text, re.MULTILINE)
    assert saved and all(float(mb) == pytest.approx(modelled_mb, rel=0.01) for mb in saved)


def table_of_cards() -> list[list[str]]:
    """[card, config, hours, memory] of each row of README's table of cards."""
    text = README.read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*_\w+ \| .* GiB \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


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
    assert_planned(re.search("^# Estimated, not measured .*$", text, re.M)[0], plan)
    assert all(rounds_to(plan["params"] / 1e6, m) for m in re.findall(r"stores (\d+)M", text))
    for name, minutes in re.findall(
        r"^(\w+_interval) = .*(?:every|about) (\d+) minutes", text, re.M
    ):
        expected = getattr(load_config([str(config)]), name) * plan["iter_seconds"] / 60
        assert int(minutes) == pytest.approx(expected, rel=0.1)


def test_the_mfu_ranges_on_the_page_are_those_of_plan():
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| .* \| (\d+)% \| (\d+)% \| (\d+)% \|$", text, re.M)
    ranges = (planning.GEFORCE_MFU, planning.LAPTOP_MFU, planning.OTHER_MFU)
    assert [tuple(int(percent) / 100 for percent in row) for row in shown] == list(ranges)
    published = re.search(r"^Published, in %: (.*?)\.\n", text, re.M | re.S)[1].replace("\n", " ")
    entry = r"([^,]+?)(?: \(\w+\))? (\d+(?:-\d+)?)(?: \(.*?\))?(?:, |$)"  # L4 28 (a remark)
    entries = dict(re.findall(entry, published))
    for row in read_gpu_table():
        if row["mfu_percent"]:
            names = [name for name in entries if name in short_name(row)]
            assert entries[max(names, key=len)] == row["mfu_percent"], row["name"]
    assert len(entries) == 22


def runs_on_the_plan_page() -> list[tuple[str, ...]]:
    """(GPU, config, hours, memory) of each run in the two tables of plan.md."""
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (.+) \| `(\w+)` \| (.+) \| (.+) GiB \|$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "gpu, config, hours, memory",
    runs_on_the_plan_page(),
    ids=lambda cell: cell.replace(" ", "-"),
)
def test_the_hours_on_the_plan_page_are_what_plan_estimates(
    gpu, config, hours, memory, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # no dataset: GPT-2's vocabulary
    plan = plan_of(ROOT / f"config/{config}.py", gpu, tmp_path)
    assert_planned(hours, plan)
    assert rounds_to(plan["vram_gib"], memory)


def test_the_runs_on_the_plan_page_are_read():
    assert len(runs_on_the_plan_page()) >= 10


def test_the_example_on_the_plan_page_is_what_bench_prints(capsys, tmp_path, monkeypatch):
    block = code_blocks(ROOT / "docs" / "plan.md")[0]
    command, *shown = block.splitlines()
    arguments = [ROOT / word if "config/" in word else word for word in shlex.split(command)[4:]]
    monkeypatch.chdir(tmp_path)  # no dataset
    assert bench.main(["plan", *map(str, arguments)]) == 0
    assert capsys.readouterr().out.splitlines() == shown


def test_the_table_of_cards_is_read_and_says_that_it_is_estimated():
    assert len(table_of_cards()) >= 6
    (head,) = re.findall(r"^\| card \|.*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert head == "| card | config | estimated hours (range) | estimated memory |"


# -----------------------------------------------------------------------------
# The figures of the other pages


def after(page: str, start: str) -> str:
    """What follows `start` on the one line of a page that begins with it."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith(start)]
    assert len(found) == 1, f"{page}: {len(found)} lines begin with {start!r}"
    return found[0].removeprefix(start)


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w./])\d[\d,]*(?:\.\d+)?(?![\d/])", text)


def check(page: str, start: str, values: list[float]):
    """The numbers behind `start`, in their order, are these, rounded as they are shown."""
    shown = numbers(after(page, start))
    assert len(shown) == len(values), f"{start!r} shows {shown} for {values}"
    for value, number in zip(values, shown, strict=True):
        assert rounds_to(value, number.replace(",", "")), f"{start!r} shows {number} for {value}"


def result(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_a_figure_that_is_not_the_measured_one_is_found(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("| run, 4 x 256 | 1,089 | 2.09 (1.76 to 2.93) |\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    check("page.md", "| run, 4 x 256 |", [1089.4, 2.0851, 1.764, 2.93])
    for wrong in ([1089.4, 2.0851, 1.764], [1089.4, 2.0951, 1.764, 2.93], [1088, 2.09, 1.76, 2.93]):
        with pytest.raises(AssertionError):
            check("page.md", "| run, 4 x 256 |", wrong)


def peer_figures(name: str) -> list[float]:
    """A row of speed.md: tok/s of both, the ratio with its range, memory of both, its ratio"""
    p = result(name)
    median = {side: statistics.median(times) for side, times in p["seconds_per_iter"].items()}
    speeds = [p["tokens_per_iter"] / median[side] for side in ("nanoGPT", "ours")]
    ratio = [p["speed_ratio"], *p["speed_ratio_range"]]
    gib = [p["memory_gib"]["nanoGPT"], p["memory_gib"]["ours"]]
    return [*speeds, *ratio, *gib, p["memory_ratio"]]


PEERS = {
    "| 12 x 768, 4 x 256 | compiled |": "cpu/peer_124m",
    "| 12 x 768, 4 x 256, again | compiled |": "cpu/peer_124m_again",
    "| 12 x 768, 32 x 256 | compiled |": "cpu/peer_124m_B32",
    "| 12 x 768, 32 x 256, again | compiled |": "cpu/peer_124m_B32_again",
    "| 12 x 768, 2 x 1024 | eager |": "cpu/peer_124m_T1024",
    "| 12 x 768, 2 x 1024, again | eager |": "cpu/peer_124m_T1024_again",
    "| 4 x 256, 8 x 1024 | eager |": "cpu/peer_T1024",
}


@pytest.mark.parametrize("start, name", PEERS.items(), ids=PEERS.values())
def test_the_table_against_nanogpt_is_what_was_measured(start, name):
    check("../results/speed.md", start, peer_figures(name))


def page_row(page: Path, start: str) -> list[str]:
    """The cells behind the first one, on the one row of the page's tables that begins so."""
    (row,) = re.findall(rf"^\| {re.escape(start)}.*$", page.read_text(encoding="utf-8"), re.M)
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "from_nanogpt.md"], ids=page_name)
def test_the_short_table_against_nanogpt_is_what_was_measured(page):
    """Speed and memory are in results/cpu/peer_124m*.json, the rest in the pages of results/."""
    peers = [result(name) for name in PEERS.values() if "124m" in name]
    for start, key in (("tokens per second, 12", "speed_ratio"), ("memory", "memory_ratio")):
        nanogpt, ours, _ = page_row(page, start)
        ratios = [peer[key] for peer in peers]
        assert nanogpt == "1"
        for value, shown in zip((min(ratios), max(ratios)), ours.split(" to "), strict=True):
            assert rounds_to(value, shown)
    measured = [entry.read_text(encoding="utf-8") for entry in (ROOT / "results").glob("*.md")]
    nanogpt, ours, how = page_row(page, "Shakespeare demo, val loss")
    assert (nanogpt, ours) == ("1.90", "1.53") and "0.91 to 1.01 of the CPU time" in how
    assert any(all(n in text for n in ("1.898", "1.528", "0.91", "1.01")) for text in measured)
    nanogpt, ours, how = page_row(page, "tokens per second, nanoGPT's CPU demo")
    assert (nanogpt, ours) == ("1", "2.08") and how.endswith("1.03")
    assert any("2.08 (1.95 to 2.33)" in text and "1.03 (1.00 to 1.05)" in text for text in measured)


def test_readmes_token_ratios_are_the_target_and_the_measured_ones():
    text = " ".join(README.read_text(encoding="utf-8").split())
    target = load_config([str(ROOT / "config" / "fast124m_4070.py")])
    aim = target.max_iters * target.tokens_per_iter
    assert f"With {aim / 1e9:.1f}B tokens ({aim / 10e9:.0%}) the [fast recipe]" in text
    rows = [row for name in ("transfer", "transfer_again") for row in result(name)["shares"]]
    rows = [row for row in rows if (row["of"], row["by"]) == ("classic", "fast") and row["share"]]
    low, high = (f(row["share"] for row in rows) for f in (min, max))
    assert f"needed {low:.0%} to {high:.0%}" in text
    assert f"at most {max(row['matrices'] for row in rows) / 1e6:.1f}M non-embedding" in text


STUDY = "internals/recipe_study.md"
# a study's name in the first column of the page -> its result
STUDIES = {
    "prose": "transfer",
    "prose, repeated": "transfer_again",
    "Python code": "transfer_sources",
}


def ratios(of: str, by: str, name: str = "transfer") -> dict[tuple[str, str], dict]:
    """Size and length, as in ("4.72M", "4") -> that run's row."""
    rows = [row for row in result(name)["shares"] if (row["of"], row["by"]) == (of, by)]
    return {(f"{row['matrices'] / 1e6:.2f}M", f"{row['length']:g}"): row for row in rows}


def check_cells(start: str, values: list[float | None]):
    """The cells behind `start` are these values, and "not known" for None."""
    cells = after(STUDY, start).strip(" |").split(" | ")
    assert len(cells) == len(values), start
    for cell, value in zip(cells, values, strict=True):
        known = value is not None and rounds_to(value, re.sub(r"M|%", "", cell))
        assert known or (value is None and cell == "not known"), (start, cell, value)


def percent(rows: dict[tuple[str, str], dict], key: tuple[str, str]) -> float | None:
    return 100 * rows[key]["share"] if key in rows else None


@pytest.mark.parametrize("study", STUDIES)
def test_the_token_ratios_are_those_measured(study):
    fast, bare = (ratios("classic", by, STUDIES[study]) for by in ("fast", "no_tables"))
    assert len(fast | bare) >= 3
    for key, row in (fast | bare).items():
        tokens = row["matrices"] * row["length"] / 1e6
        found = [percent(by, key) for by in (fast, bare)]
        check_cells(f"| {study} | {key[0]} | {key[1]} | ", [tokens, row["loss"], *found])


def test_the_ranges_on_the_fast_recipes_page_are_those_measured():
    for start, names in (
        ("| English prose, up to two seeds |", ("transfer", "transfer_again")),
        ("| Python code, one seed, two run lengths |", ("transfer_sources",)),
    ):
        ranges = []
        for by in ("fast", "no_tables"):
            rows = [row for name in names for row in ratios("classic", by, name).values()]
            ranges += [f(100 * row["share"] for row in rows) for f in (min, max)]
        sizes = sorted({row["matrices"] / 1e6 for row in rows})
        check("fast_recipe.md", start, [*dict.fromkeys((sizes[0], sizes[-1])), *ranges])


GROUPS = {
    "| lookup tables and key offset | ": ("no_tables", "fast", "transfer"),
    "| the same, prose repeated | ": ("no_tables", "fast", "transfer_again"),
    "| the same, Python code | ": ("no_tables", "fast", "transfer_sources"),
    "| value embeddings alone | ": ("no_values", "fast", "transfer"),
    "| bigram embedding and key offset alone | ": ("no_pairs", "fast", "transfer"),
    "| the other components, against Muon in a GPT-2 | ": ("muon", "no_tables", "transfer"),
}


@pytest.mark.parametrize("start", GROUPS)
def test_what_the_components_bring_is_what_was_measured(start):
    text = (ROOT / "docs" / STUDY).read_text(encoding="utf-8")
    header = re.search(r"^\| group \|(.*)\|$", text, re.M)[1]
    columns = re.findall(r"(\d\.\d\dM), ([\d.]+)", header)
    assert len(columns) == 5
    needed = [percent(ratios(*GROUPS[start]), key) for key in columns]
    assert sum(value is not None for value in needed) >= 2
    check_cells(start, needed)


def test_the_studys_pictures_draw_what_was_measured():
    """A line per recipe up to its longest run; a line per length of both prose studies and code."""
    losses, both = Figure(), Figure()
    draw_study.draw_losses(losses)
    runs = [run for run in result("transfer")["runs"] if run["matrices"] == draw_study.SIZE]
    recipes = [line for line in losses.axes[0].lines if len(line.get_label().split()) > 1]
    for line, name in zip(recipes, draw_study.RECIPES, strict=True):
        longest = max((run for run in runs if run["name"] == name), key=lambda run: run["tokens"])
        assert (line.get_xdata()[-1] * 1e6, line.get_ydata()[-1]) == pytest.approx(
            (longest["tokens"], longest["val_loss"])
        )
    draw_study.draw_ratios(both)
    shown = sorted(y for line in both.axes[0].lines for y in line.get_ydata())
    measured = [
        row for name in STUDIES.values() for row in ratios("classic", "fast", name).values()
    ]
    assert shown == pytest.approx(sorted(100 * row["share"] for row in measured))


def plan_rows() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "fast_recipe.md").read_text(encoding="utf-8")
    return re.findall(r"^(\| [^`|]*`(config/\w+\.py[^`]*)` \|)", text, re.MULTILINE)


@pytest.mark.parametrize("start, command", plan_rows(), ids=lambda cell: cell[-40:])
def test_the_sizes_of_both_recipes_are_what_plan_counts(start, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no dataset: GPT-2's vocabulary
    path = tmp_path / "plan.json"
    config, *changes = command.split()
    card = re.search(r"_(\w+)\.py", config)[1]
    flags = [str(ROOT / config), *changes, f"--gpu={card}", f"--json={path}"]
    assert bench.main(["plan", *flags]) == 0
    p = json.loads(path.read_text())
    millions = [p["params"] / 1e6, p["flops_per_token"] / 1e6]
    check("fast_recipe.md", start, [*millions, p["vram_gib"], p["checkpoint_gb"]])


def test_the_sizes_of_both_recipes_are_read():
    assert len(plan_rows()) >= 6


def test_the_chain_to_the_target_multiplies():
    text = (ROOT / "docs" / STUDY).read_text(encoding="utf-8")
    table = text.partition("| step of the chain |")[2].partition("\n\n")[0]
    tokens = 3250 * 524_288 / 1e9
    rows = [row.strip("|").split("|") for row in table.splitlines()[2:]]
    assert len(rows) == 5
    for name, factor, shown, source in rows:
        if factor.strip():
            before, after_it = map(int, re.search(r"(\d{4}) to (\d{4}) steps", source).groups())
            taken_out = re.search(r"of which (\d+) are taken out", source)
            saved = before - after_it - (int(taken_out[1]) if taken_out else 0)
            assert rounds_to((before - saved) / before, factor.strip()), name
            tokens *= (before - saved) / before
        assert rounds_to(tokens, shown.strip().removesuffix("B")), name


LINKS = [  # GB/s
    ("| A100, NVLink, gpt124m_a100 |", "gpt124m_a100", "A100", 230),
    ("| H200, NVLink, gpt124m_h200 |", "gpt124m_h200", "H200", 370),
    ("| H200, NVLink, fast124m_h200 |", "fast124m_h200", "H200", 370),
    ("| RTX 4090, PCIe, gpt124m_4090 |", "gpt124m_4090", "4090", 12),
    ("| gpt124m_a100, 100 Gbit/s |", "gpt124m_a100", "A100", 10),
    ("| gpt124m_4090, 10 Gbit/s |", "gpt124m_4090", "4090", 1.1),
]


@pytest.mark.parametrize("start, config, gpu, link", LINKS, ids=lambda cell: str(cell))
def test_what_a_further_gpu_brings_is_the_roofline_that_the_page_describes(
    start, config, gpu, link, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    p = plan_of(ROOT / f"config/{config}.py", gpu, tmp_path)
    seconds = p["iter_seconds"]
    muon = 0.0  # seconds of its update on every GPU
    if config.startswith("fast"):
        # in units of 2 C^3 operations, a step of Newton-Schulz takes 3 for each of the 4 matrices
        # (C, C) of a layer, q, k, v and the projection, and 9 for each of the 2 of (4 C, C)
        muon = 12 * 5 * (4 * 3 + 2 * 9) * 2 * 768**3 / (p["mfu"] * p["peak_tflops"] * 1e12)
    shown = numbers(after("several_gpus.md", start))
    ratios = []
    for n in (2, 4, 8, 16)[: len(shown) - 1]:
        exchange = (n - 1) / n * 2 * 4 * p["params"]
        ratios.append((seconds + muon) / (seconds / n + muon + exchange / (link * 1e9)))
    check("several_gpus.md", start, [seconds, *ratios])


@pytest.mark.parametrize("name", ["gpt350m", "gpt774m"])
def test_a_larger_models_command_is_planned_as_the_page_says(name, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "several_gpus.md").read_text(encoding="utf-8")
    (flags,) = re.findall(rf"(--out_dir=out/{name}\s[^>]*)> config/my", text)
    flags = flags.replace("\\\n", " ").split()
    monkeypatch.chdir(tmp_path)
    p = plan_of(ROOT / "config" / "gpt124m_a100.py", "a100", tmp_path, "--gpus=8", *flags)
    assert p["fits"] and p["gpu"] == "A100-SXM4-40GB"
    hours = [p["hours"], *p["hours_range"]]
    values = [p["params"] / 1e6, p["vram_gib"], *hours]
    row = after("several_gpus.md", f"| {name} |")
    for value, shown in zip(values, re.findall(r"[\d.]+", row), strict=True):
        assert rounds_to(value, shown), (row, value)


ROOMS = [
    ("| GPT-2 124M |", "gpt124m_4070"),
    ("| fast124m_4070, with its lookup tables |", "fast124m_4070"),
]


@pytest.mark.parametrize("start, config", ROOMS)
def test_the_room_on_the_recovery_page_is_what_plan_estimates(start, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = plan_of(ROOT / f"config/{config}.py", "4070", tmp_path)["checkpoint_gb"]
    check("recovery.md", start, [size, 3 * size])


STOPS = [
    ("| H200, gpt124m_h200 |", "gpt124m_h200", "h200"),
    ("| A100 40GB, gpt124m_a100 |", "gpt124m_a100", "a100"),
    ("| RTX 4090, gpt124m_4090 |", "gpt124m_4090", "4090"),
    ("| RTX 4070, gpt124m_4070 |", "gpt124m_4070", "4070"),
    ("| A100 40GB, fast124m_a100 |", "fast124m_a100", "a100"),
    ("| RTX 3060, gpt124m_3060 |", "gpt124m_3060", "3060"),
]


@pytest.mark.parametrize("start, config, gpu", STOPS)
def test_how_long_a_stop_takes_is_what_plan_estimates(start, config, gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    p = plan_of(ROOT / f"config/{config}.py", gpu, tmp_path)
    check("recovery.md", start, [p["iter_seconds"], p["checkpoint_gb"] / 0.5])


def test_the_plans_line_about_the_link_is_the_page_s(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan_of(ROOT / "config" / "gpt124m_a100.py", "a100", tmp_path, "--gpus=16")
    (line,) = re.findall("^link .*$", capsys.readouterr().out, re.MULTILINE)
    assert line == "link " + after("several_gpus.md", "link ")


def test_the_gpu_hours_on_8_and_16_gpus_are_what_plan_estimates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ROOT / "config" / "gpt124m_a100.py"
    on_16, on_8 = (plan_of(config, "a100", tmp_path, f"--gpus={n}") for n in (16, 8))
    check("several_gpus.md", "So 10B tokens cost ", [16 * on_16["hours"], 16, 8 * on_8["hours"], 8])


def prose_lines(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [line for line in text.splitlines() if not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_line_of_prose_is_longer_than_100_characters(page):
    assert [line for line in prose_lines(page) if len(line) > 100] == []


SHORT = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT.remove(ROOT / "docs" / "hacking.md")  # holds eight diffs


@pytest.mark.parametrize("page", SHORT, ids=page_name)
def test_a_page_is_short(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120


# -----------------------------------------------------------------------------
# Troubleshooting


def quoted_messages() -> list[str]:
    """Messages of this program: in the first cells of the page, and those that README repeats."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    ours = text.partition("## Messages of other programs")[0]
    cells = re.findall(r"^\| (`.*?) \| ", ours, re.MULTILINE)
    front = re.findall("^- (`[^`]+`):", README.read_text(encoding="utf-8"), re.MULTILINE)
    return [message for cell in cells + front for message in re.findall("`([^`]+)`", cell)]


def program_texts() -> list[str]:
    """The strings of the program. Those of an f-string are the parts between its values."""
    folders = ["", "data", "training", "reports", "common"]
    trees = [ast.parse(f.read_text("utf-8")) for d in folders for f in (ROOT / d).glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


PROGRAM_TEXTS = program_texts()


@pytest.mark.parametrize("message", quoted_messages())
def test_a_message_on_the_page_is_one_that_the_program_prints(message):
    """`...` stands for values; at other punctuation the program may have joined two strings."""
    parts = [part.strip(" :,.") for part in re.split(r"\.\.\.|[;:] | \(|\)", message)]
    parts = [part for part in parts if part]
    assert parts and sum(map(len, parts)) >= 8
    for part in parts:
        assert any(part in text for text in PROGRAM_TEXTS), part


def test_the_messages_are_read():
    assert len(quoted_messages()) >= 40


@pytest.mark.skipif(ON_WINDOWS, reason="a script for clusters")
def test_the_slurm_script_starts_one_torchrun_per_machine_at_a_port_of_its_own(tmp_path):
    """With stand-ins for Slurm's commands: srun starts its command on each of the two machines."""
    text = (ROOT / "docs" / "several_gpus.md").read_text()
    (script,) = re.findall(r"```\n(#!/bin/bash\n#SBATCH.*?)```", text, re.DOTALL)
    stand_ins = dict(
        scontrol="printf 'first\\nsecond\\n'",
        srun='for n in 0 1; do SLURM_NODEID=$n "${@:2}"; done',
        torchrun='echo "$@"',
    )
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.sh").write_text(script)
    given = dict(SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_ID="4012345", SLURM_NNODES="2")
    given |= dict(SLURM_CPUS_PER_TASK="32", PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = ["bash", "-eu", tmp_path / "train.sh"]
    out = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [
        f"--nnodes=2 --node_rank={rank} --master_addr=first --master_port=22345 --nproc_per_node=8 "
        "--shutdown-timeout=100 train.py config/gpt124m_a100.py"
        for rank in (0, 1)
    ]
