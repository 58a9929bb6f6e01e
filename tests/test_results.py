"""
Check the figures on the pages: measured ones against the json files of results/, estimated ones
against `bench.py plan`.
"""

import math
import re
import shlex

import pytest
from doc_pages import GUIDES, code_blocks, holds, numbers, page_name, plan, read, result, shows
from program import ROOT

from configurator import load_config
from reports.runs import open_run

# -----------------------------------------------------------------------------
# Measured: (page, the values behind it)

PEERS = [  # files of one row of results/README.md; a set-up may have been measured again
    ("peer_124m", "peer_124m_again"),
    ("peer_124m_B32", "peer_124m_B32_again"),
    ("peer_124m_T1024", "peer_124m_T1024_again", "compare_124m_T1024"),
    ("compare_124m",),
    ("peer_T1024",),
]
# the same, but with nanoGPT both as shipped and with our malloc setting in one file
BOTH = ["compare_124m", "compare_124m_compiled"]


def peer_figures():
    """
    Yield (page, figures) for each row of nanoGPT comparisons on a CPU: the tokens/s ratios with
    their ranges, and the memory ratios. The last figures are the extremes of all speed ratios.
    """
    index = "results/README.md"
    shipped, same = [], []
    for names in PEERS:
        found = [result(f"cpu/{name}") for name in names]
        ratios = [[p["speed_ratio"], *p["speed_ratio_range"], p["memory_ratio"]] for p in found]
        yield index, [value for ratio in ratios for value in ratio]
        for name, p in zip(names, found, strict=True):
            if name.startswith("compare"):
                same.append(p["speed_ratio"])
            elif name.startswith("peer_124m"):
                shipped.append(p["speed_ratio"])
    for name in BOTH:
        p = result(f"cpu_amx/{name}")
        sides = [
            [p["speed_ratio"][side], *p["speed_ratio_range"][side], p["memory_ratio"][side]]
            for side in ("nanoGPT as shipped", "nanoGPT")
        ]
        yield index, [*sides[0], *sides[1]]
        shipped.append(sides[0][0])
        same.append(sides[1][0])
    for page in ("docs/from_nanogpt.md",):
        yield page, [min(shipped), max(shipped), min(same), max(same)]


def h100_figures():
    """
    Yield (page, figures) for both recipes' speed, MFU, memory and losses on an H100, and for the
    comparisons with nanoGPT and modded-nanogpt there.
    """
    rows, page = result("h100/measured")["rows"], "results/README.md"
    for name in ("step", "fast_step"):
        p = rows[name]["figures"]
        rates = [round(rate, -2) for rate in (p["tokens_per_sec"], *p["tokens_per_sec_range"])]
        yield page, [*rates, 100 * p["mfu"]]
    yield page, [rows[name]["figures"]["mem_gib"] for name in ("step", "fast_step")]
    peers = [result(f"h100/{name}") for name in ("peer", "peer_again", "peer_pairs")]
    ratios = [ratio for p in peers for ratio in p["speed_ratio_range"]["nanoGPT"]]
    yield page, [min(ratios), max(ratios), peers[0]["memory_ratio"]["nanoGPT"]]
    for run in result("h100/text")["runs"].values():
        losses = [evaluation["val_loss"] for evaluation in run["evaluations"]]
        yield page, [losses[0], losses[-1], round(run["tokens_per_sec"], -2)]
    differences = [
        result(f"h100/{name}")["float32"]["loss_difference"]
        for name in ("compare_modded", "compare_modded_small")
    ]
    yield page, [x * 10 ** -math.floor(math.log10(x)) for x in differences]


def h200_figures():
    """
    Yield (page, figures) for the two ladders, rung by rung and in all, and for the fast recipe's
    speed and short run on an H200.
    """
    index, page = "results/README.md", "docs/ladder.md"
    ours, notes = result("h200/ladder")["rows"], result("rows")["notes_ladder"]["rows"]
    before = [ours[0], *ours], [notes[0], *notes]
    for row, note, row_above, note_above in zip(ours, notes, *before, strict=False):
        rate, noted = row["tokens_per_sec"], note["tokens_per_sec"]
        gain, noted_gain = rate / row_above["tokens_per_sec"], noted / note_above["tokens_per_sec"]
        first = row is ours[0]
        yield page, [rate, *([] if first else [gain]), row["mem_gib"], noted, note["batch_size"]]
        yield page, [noted, note["batch_size"], *([] if first else [noted_gain])]
        assert first or row["gain"] == pytest.approx(gain)
    total = ours[-1]["tokens_per_sec"] / ours[0]["tokens_per_sec"]
    best = max(note["tokens_per_sec"] for note in notes)
    yield page, [ours[0]["tokens_per_sec"], ours[-1]["tokens_per_sec"], total]
    yield page, [notes[0]["tokens_per_sec"], best, best / notes[0]["tokens_per_sec"]]
    gains = [ours[i]["gain"] for i in (1, 3, 4, 5, 6)]
    yield index, [total, ours[0]["tokens_per_sec"], ours[-1]["tokens_per_sec"], *gains]
    fast, text = result("h200/fast"), result("h200/text")["runs"]
    rates = [round(rate, -2) for rate in (fast["tokens_per_sec"], *fast["tokens_per_sec_range"])]
    hours = 3250 * fast["tokens_per_iter"] / fast["tokens_per_sec"] / 3600
    yield index, [*rates, 100 * fast["mfu"], fast["mem_gib"], hours]
    yield "README.md", [hours, 14.6]
    yield "docs/fast_recipe.md", [162.4, 14.6, 1.6, hours]
    losses = [[found["val_loss"] for found in run["evaluations"]] for run in text.values()]
    yield index, [losses[0][0], losses[0][-1]]
    yield index, [max(abs(a - b) for a, b in zip(*losses, strict=True))]


MEASURED = [*peer_figures(), *h100_figures(), *h200_figures()]


@pytest.mark.parametrize("page, values", MEASURED)
def test_a_page_shows_the_measured_figures_of_the_results_files(page, values):
    assert shows(page, values)


def test_a_wrong_figure_on_a_page_would_be_noticed():
    """Guard the tests of this file: reordered or slightly different figures must not match."""
    row = " 1,089 | 2.09 (1.76 to 2.93) |"
    assert holds(row, [1089.4, 2.0851, 1.764, 2.93])
    for wrong in ([1089.4, 1.764, 2.0851], [1089.4, 2.0951, 1.764, 2.93], [1088, 2.09, 1.76, 2.93]):
        assert not holds(row, wrong)


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/fast124m_*.py")))
def test_a_fast_config_has_all_settings_of_the_public_runs(path):
    """Keep these runs comparable: compare.py does not compare runs with other settings."""
    band = open_run(ROOT / "results/public_runs/fineweb_124m_muon_h100.csv")
    config = load_config([str(path)])
    assert band.config["optimizer"] == "muon"
    assert {key: getattr(config, key) for key in band.config} == band.config
    # no token is read twice
    assert band.start["train_tokens"] == config.max_iters * config.iter_tokens


# -----------------------------------------------------------------------------
# Estimated, in table rows that name a config for a GPU: words of a column's head, and its values


def hours_with_range(p: dict) -> list[float]:
    """Return the hours, followed by their range if the source of the pace has one."""
    low, high = p["hours_range"]
    return [p["hours"]] if low == high else [p["hours"], low, high]


COLUMNS = {
    "hours": hours_with_range,
    "memory": lambda p: [p["vram_gib"]],
    "parameters": lambda p: [p["params"] / 1e6],
    "MFLOP per token": lambda p: [p["flops_per_token"] / 1e6],
    "checkpoint,": lambda p: [p["checkpoint_gb"]],
    "one checkpoint": lambda p: [p["checkpoint_gb"]],
    "three checkpoints": lambda p: [3 * p["checkpoint_gb"]],
    "iteration (": lambda p: [p["iter_seconds"]],
    "save to a disk of 0.5 GB/s": lambda p: [p["checkpoint_gb"] / 0.5],
}
CONFIG = re.compile(r"((?:gpt|fast)\d+m_(?!cpu)(\w+))(?:\.py)?((?: --\w+=\w+)*)")


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def planned_cells():
    """
    Yield (page, config and flags, column, cell) for each cell that plan computes, in the table rows
    that name a config. A cell that says "measured" is left out.
    """
    for page in GUIDES:
        for table in re.findall(r"(?:^\|.*\n)+", read(page), re.MULTILINE):
            head, _, *rows = table.splitlines()
            for row in rows:
                if not (named := CONFIG.search(row)):
                    continue
                card = re.match(r"\| RTX (\d+)", row)  # a row may name another card than the config
                gpu = card[1] if card else named[2]
                words = (named[1], f"--gpu={gpu}", *named[3].split())
                for title, cell in zip(cells_of(head), cells_of(row), strict=True):
                    for column in COLUMNS:
                        if column in title and numbers(cell) and "measured" not in cell:
                            yield page_name(page), words, column, cell


PLANNED = [*planned_cells()]


@pytest.mark.parametrize("page, words, column, cell", PLANNED)
def test_a_planned_figure_in_a_table_is_what_plan_computes(page, words, column, cell):
    figures = COLUMNS[column](plan(*words))
    assert holds(cell, figures) and len(numbers(cell)) == len(figures)


def examples_of_plan():
    """
    Yield (page, config and flags, lines shown) for each code block that begins with a plan command.
    """
    mark = "$ python bench.py plan config/"
    for page in GUIDES:
        for block in code_blocks(page):
            if block.startswith(mark):
                command, *shown = block.removeprefix(mark).splitlines()
                yield page_name(page), shlex.split(command), shown


EXAMPLES = [*examples_of_plan()]


@pytest.mark.parametrize("page, words, shown", EXAMPLES)
def test_an_example_of_plan_on_a_page_shows_the_figures_that_the_command_prints(page, words, shown):
    config, *flags = words
    printed = plan(config.removesuffix(".py"), *flags)["out"].splitlines()
    assert {(*numbers(line),) for line in shown} <= {(*numbers(line),) for line in printed}


def assumed_mfu(gpu: str) -> list[float]:
    p = plan("gpt124m_4070", "--dtype=float16", f"--gpu={gpu}")
    assert "assumed" in p["pace"]
    return [100 * p["mfu"]]


def speed_ups(config: str, *gpus: int) -> list[float]:
    """Return the seconds per iteration on one GPU and the speed-up on several."""
    card = f"--gpu={config.partition('_')[2]}"
    alone = plan(config, card)["iter_seconds"]
    return [alone, *(alone / plan(config, card, f"--gpus={n}")["iter_seconds"] for n in gpus)]


def larger_model(name: str) -> list[float]:
    """Return parameters, memory and hours of the command for this model in several_gpus.md."""
    text = read("docs/several_gpus.md").replace("\\\n", " ")
    (flags,) = re.findall(rf"(--out_dir=out/{name}\s[^>]*)> config/my", text)
    p = plan("gpt124m_a100", "--gpu=a100", "--gpus=8", *flags.split())
    return [p["params"] / 1e6, p["vram_gib"], *hours_with_range(p)]


def gpu_hours() -> list[float]:
    hours = {n: plan("gpt124m_a100", "--gpu=a100", f"--gpus={n}")["hours"] for n in (16, 8)}
    return [10, 16 * hours[16], 16, 8 * hours[8], 8]


FIGURES = [
    ("plan", lambda: assumed_mfu("3060")),
    ("plan", lambda: assumed_mfu("RTX 4070 Laptop")),
    ("plan", lambda: assumed_mfu("T4")),
    ("several_gpus", lambda: speed_ups("gpt124m_a100", 2, 4, 8, 16)),
    ("several_gpus", lambda: speed_ups("gpt124m_h200", 2, 4, 8)),
    ("several_gpus", lambda: speed_ups("gpt124m_4090", 2, 4, 8)),
    ("several_gpus", gpu_hours),
    pytest.param("several_gpus", lambda: larger_model("gpt350m"), marks=pytest.mark.slow),
    pytest.param("several_gpus", lambda: larger_model("gpt774m"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("page, values", FIGURES)
def test_estimated_figures_on_a_page_are_what_plan_computes(page, values):
    assert shows(f"docs/{page}.md", values())


def test_the_pages_show_plans_tokens_and_memory_for_eight_hours_of_the_fast_recipe():
    p = plan("fast124m_4070", "--gpu=4070", "--hours=8")
    billions = [tokens / 1e9 for tokens in (p["total_tokens"], *p["tokens_range"])]
    assert shows("docs/fast_recipe.md", billions) and shows("README.md", [p["vram_gib"]])


GPU_CONFIGS = [path.stem for path in sorted((ROOT / "config").glob("*m_*.py"))]


@pytest.mark.parametrize("config", GPU_CONFIGS)
def test_hours_and_minutes_in_a_configs_comments_are_what_plan_computes(config):
    path = f"config/{config}.py"
    text = read(path)
    command = rf'^# python bench.py plan {path} --gpu=("[\w ]+"|\w+)'
    found = re.search(command, text, re.MULTILINE)
    assert found, f"{path} needs the comment: python bench.py plan {path} --gpu=NAME"
    gpu = found[1].strip('"')
    p = plan(config, f"--gpu={gpu}")
    comments = " ".join(re.findall("# ?(.*)", text))
    assert holds(comments, COLUMNS["hours"](p))
    for key, minutes in re.findall(r"^(\w+) = .*(?:every|about) (\d+) minutes", text, re.M):
        iterations = getattr(load_config([str(ROOT / path)]), key)
        assert int(minutes) == pytest.approx(iterations * p["iter_seconds"] / 60, rel=0.1)
