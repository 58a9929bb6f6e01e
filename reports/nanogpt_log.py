"""
What nanoGPT printed, read as if it were a run of this program.
"""

import math
import re
from pathlib import Path

import numpy as np

from common.console import UserError
from configurator import FIELDS, NANOGPT_FIELDS, parse
from reports.records import Records, RunRecords, add_totals, known_keys, percentile

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT divides by an A100's peak on every card
# where nanoGPT's defaults differ from this program's; it pads GPT-2's vocabulary only
NANOGPT_DEFAULTS = {"device": "cuda", "dtype": "bfloat16", "lr_decay_iters": 600000}
NANOGPT_DEFAULTS |= {"pad_vocab_multiple": None, "eval_tokens": None}

N = r"-?(?:[\d.]+|nan|inf)"
# kind of record -> the line that it is read from; groups are named as in metrics.jsonl
LINES = {
    "step": rf"iter (?P<iter>\d+): loss (?P<loss>{N}), time (?P<step_ms>{N})ms, mfu (?P<mfu>{N})%",
    "eval": rf"step (?P<iter>\d+): train loss (?P<train_loss>{N}), val loss (?P<val_loss>{N})",
}
CONFIG_LINE = re.compile(r"(?:Overriding: )?(\w+) = ([^#]+)(?:#.*)?")
PRODUCT = re.compile(r"(\d+) ?\* ?(\d+)")  # the one kind of formula in nanoGPT's config files


def read_nanogpt_log(path: Path) -> RunRecords:
    """
    Read what nanoGPT printed, or the part of it that was kept.

    Its iteration times include evaluations and checkpoints. Where there was one, the time above the
    median is booked as evaluation. FLOPs per token come from the configuration that it printed.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if ", tok/s " in text:
        raise UserError(f"{path}: this is train.py's console output; give the run's out_dir")
    found = {}  # by kind and iteration: after a resume the later line counts
    for line in text.splitlines():
        for kind, pattern in LINES.items():
            if match := re.match(pattern, line):
                it = int(match["iter"])
                found[kind, it] = match.groupdict() | {"kind": kind, "iter": it}
    records = Records(path)
    for record in [settings(text.splitlines()), *found.values()]:
        records.add(record)
    run = RunRecords(path.stem, records)
    if tokens := re.search(r"tokens per iteration will be: ([\d,]+)", text):
        run.tokens_per_iter = float(tokens[1].replace(",", ""))
    else:
        missing = "no line 'tokens per iteration will be: N', so no tok/s; add it to the file"
        run.warnings.append(f"{path}: {missing}")
    separate_evaluations(run)
    counted = re.findall(r"parameter tensors: \d+, with ([\d,]+) parameters", text)[-2:]
    rounded = re.search(r"number of parameters: ([\d.]+)M", text)
    run.parameters = sum(float(number.replace(",", "")) for number in counted) or math.nan
    find_flops(run, 1e6 * float(rounded[1]) if rounded else math.nan)
    return run


def settings(lines: list[str]) -> dict:
    """
    The configuration that the log prints, as a start record. Empty if it prints none: then not even
    the defaults are certain.
    """
    printed, known = {}, NANOGPT_FIELDS | FIELDS
    for line in lines:
        match = CONFIG_LINE.fullmatch(line)
        if match and match[1] in known:
            key, text = match[1], match[2].strip()
            if product := PRODUCT.fullmatch(text):
                printed[key] = int(product[1]) * int(product[2])
            else:
                printed[key] = parse(text, known[key].type)
    if not printed:
        return {}
    defaults = {name: field.default for name, field in FIELDS.items()} | NANOGPT_DEFAULTS
    config = defaults | known_keys(printed)
    on_cuda = "cuda" in config["device"]
    if any(line.startswith("found vocab_size") for line in lines):
        config["pad_vocab_multiple"] = 1
    if not on_cuda and "dtype" not in printed:
        config["dtype"] = "float32"  # nanoGPT uses autocast on CUDA only
    # "cuda" does not tell which card it was
    device = None if on_cuda else config["device"]
    return {"kind": "start", "config": config, "device": device, "dtype": config["dtype"]}


def separate_evaluations(run: RunRecords) -> None:
    """Take evaluations and compilation out of the iteration times. Adds tokens and tok/s."""
    step, evals = run.step, run.eval
    evaluated = np.isin(step["iter"], evals["iter"])
    usual_ms = percentile(step["step_ms"][~evaluated & (step["iter"] > 0)], 50)
    for i, it in enumerate(evals["iter"]):
        step_ms = step["step_ms"][step["iter"] == it]
        # the first iteration's time holds compilation, too
        if (it > 0 or run.config.get("compile") is False) and len(step_ms):
            evals["seconds"][i] = max(0, step_ms[0] - usual_ms) / 1e3
    step["step_ms"][evaluated | (step["iter"] == 0)] = math.nan
    step["tokens"] = step["iter"] * run.tokens_per_iter
    step["tokens_per_sec"] = run.tokens_per_iter / step["step_ms"] * 1e3
    add_totals(run)


def find_flops(run: RunRecords, matmul_parameters: float) -> None:
    """
    Set FLOPs per token from the printed configuration and parameters, which leave out position
    embeddings. FLOPs are divided by the number of cards: tok/s are those of all cards, MFU is that
    of one. Only the printed MFU tells how many cards there were. Evaluations pull it down, so it
    serves for no more than that, and it is removed here: it is not the MFU of the run's card.
    The parameters follow from the same where the log does not have them in full.
    """
    printed_mfu = percentile(run.step["mfu"][run.step["mfu"] > 0], 50) / 100
    run.step["mfu"] = np.full(len(run.step["iter"]), math.nan)
    if not run.config:
        return
    L, C, T = run.config["n_layer"], run.config["n_embd"], run.config["block_size"]
    if math.isnan(run.parameters):
        run.parameters = round(matmul_parameters + T * C, -4)  # no more digits than were printed
    run.flops_per_token = 6 * matmul_parameters + 12 * L * C * T
    # FLOP/s of all cards over those of one
    cards = run.flops_per_token * percentile(run.step["tokens_per_sec"], 50)
    cards /= printed_mfu * NANOGPT_PEAK_FLOPS
    if math.isfinite(cards):
        run.flops_per_token /= max(1, round(cards))
