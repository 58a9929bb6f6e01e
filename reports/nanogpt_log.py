"""
What nanoGPT printed, read as if it were a run of this program.
"""

import math
import re
from pathlib import Path

import numpy as np

from common.console import UserError
from configurator import FIELDS, parse
from reports.records import RunRecords, add_totals, as_number, median, tabulate

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT divides by an A100's peak on every card
NANOGPT_DEFAULTS = dict(
    device="cuda", dtype="bfloat16", lr_decay_iters=600000
)  # where this program's differ

ITER_LINE = re.compile(r"iter (\d+): loss (\S+), time ([\d.]+)ms, mfu (-?[\d.]+)%")
EVAL_LINE = re.compile(r"step (\d+): train loss (\S+), val loss ([^\s,]+)")
TOKENS_LINE = re.compile(r"tokens per iteration will be: ([\d,]+)")
PARAMETERS_LINE = re.compile(r"number of parameters: ([\d.]+)M")  # position embeddings left out
CONFIG_LINE = re.compile(r"(?:Overriding: )?(\w+) = ([^#]+)(?:#.*)?")
PRODUCT = re.compile(
    r"(\d{1,9}) ?\* ?(\d{1,9})"
)  # the one kind of formula in nanoGPT's config files


def read_nanogpt_log(path: Path) -> RunRecords:
    """
    What nanoGPT prints, or the part of it that was kept. Its iteration times hold evaluation and
    checkpoint where there was one: there, what exceeds the median is booked as evaluation. Its MFU
    is relative to an A100, so it is not taken over; the model's FLOPs per token come from what is
    printed of its configuration, else from that MFU.
    """
    steps, evals, saved, config, start = {}, {}, {}, {}, dict(kind="start")
    matmul_parameters = math.nan
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if ", tok/s " in line:
            raise UserError(
                f"{path}: this is train.py's console output; give its out_dir, whose metrics.jsonl says more"
            )
        if match := ITER_LINE.match(line):
            steps[match[1]] = dict(
                kind="step", iter=match[1], loss=match[2], step_ms=match[3], mfu=match[4]
            )
        elif match := EVAL_LINE.match(line):
            evals[match[1]] = dict(
                kind="eval", iter=match[1], train_loss=match[2], val_loss=match[3]
            )
        elif line.startswith("saving checkpoint to") and evals:
            last = list(evals)[-1]
            saved[last] = dict(kind="checkpoint", iter=last)
        elif match := TOKENS_LINE.search(line):
            start["tokens_per_iter"] = match[1].replace(",", "")
        elif match := PARAMETERS_LINE.search(line):
            matmul_parameters = 1e6 * as_number(match[1])
        elif (match := CONFIG_LINE.fullmatch(line)) and match[1] in FIELDS:
            text = match[2].strip().strip("'\"")
            product = PRODUCT.fullmatch(text)
            config[match[1]] = (
                int(product[1]) * int(product[2]) if product else parse(text, FIELDS[match[1]].type)
            )
    if config:
        start["config"] = (
            {name: field.default for name, field in FIELDS.items()} | NANOGPT_DEFAULTS | config
        )
        start["dtype"] = start["config"]["dtype"]
    run = tabulate(path.stem, [start, *steps.values(), *evals.values(), *saved.values()])
    complete_nanogpt_run(run, matmul_parameters)
    if not math.isfinite(run.tokens_per_iter):
        run.warnings.append(
            f"{path}: no 'tokens per iteration will be: N' in it, so no tok/s; add that line to the file"
        )
    return run


def complete_nanogpt_run(run: RunRecords, matmul_parameters: float) -> None:
    """Tell iterations from evaluations, and work out what nanoGPT does not print."""
    step, config = run.step, run.config
    evaluated = np.isin(step["iter"], run.eval["iter"])
    usual = median(step["step_ms"][~evaluated & (step["iter"] > 0)])
    excess = dict(zip(step["iter"], np.maximum(0, step["step_ms"] - usual) / 1e3))
    run.eval["seconds"] = np.array(
        [excess.get(it, math.nan) if it > 0 else math.nan for it in run.eval["iter"]], dtype=float
    )
    step["step_ms"][evaluated | (step["iter"] == 0)] = (
        math.nan
    )  # the first one holds compilation, too
    step["tokens"] = step["iter"] * run.tokens_per_iter
    step["tokens_per_sec"] = run.tokens_per_iter / step["step_ms"] * 1e3
    printed_mfu = median(step["mfu"][step["mfu"] > 0]) / 100
    step["mfu"] = np.full(len(evaluated), math.nan)
    # Of several cards, tokens are those of all and its MFU is that of one. Only roughly:
    # evaluations pull its mean down
    flops_per_card = (
        printed_mfu * NANOGPT_PEAK_FLOPS * median(step["step_ms"]) / 1e3 / run.tokens_per_iter
    )
    run.flops_per_token = flops_per_card
    if config and math.isfinite(matmul_parameters):
        L, C, T = config["n_layer"], config["n_embd"], config["block_size"]
        run.parameters = matmul_parameters + T * C
        flops = 6 * matmul_parameters + 12 * L * C * T
        run.flops_per_token = flops / max(
            1, round(flops / flops_per_card) if flops_per_card > 0 else 1
        )
    add_totals(run)
