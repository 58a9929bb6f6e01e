"""
What nanoGPT printed, read as records like those of this program's metrics.jsonl.
"""

import math
import re
import statistics
from pathlib import Path

import numpy as np

from common.console import UserError
from configurator import FIELDS, NANOGPT_FIELDS, fit, parse, translate
from reports.records import Run, percentile

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT divides by an A100's peak on every card
# where nanoGPT's defaults differ from this program's; it pads GPT-2's vocabulary only
NANOGPT_DEFAULTS = dict(device="cuda", lr_decay_iters=600000)
NANOGPT_DEFAULTS |= dict.fromkeys(("dtype", "pad_vocab_multiple", "eval_tokens"))  # by the run

N = r"-?(?:[\d.]+|nan|inf)"
STEP = re.compile(rf"iter (\d+): loss ({N}), time ({N})ms, mfu ({N})%")
EVAL = re.compile(rf"step (\d+): train loss {N}, val loss ({N})")
CONFIG_LINE = re.compile(r"(Overriding: )?(\w+)\s*=\s*([^#]+)(?:#.*)?")
NAMES = {"out_dir", "wandb_run_name", "wandb_project"}  # often made of other values; no figures
PRODUCT = re.compile(r"(\d+) ?\* ?(\d+)")  # the one kind of formula in nanoGPT's config files


def read_nanogpt_log(path: Path) -> Run:
    """
    Read what nanoGPT printed, or the part of it that was kept. Raises UserError and OSError.

    Its iteration times include evaluations and checkpoints. Where there was one, the time above the
    median is booked as that. FLOPs per token come from the configuration that it printed.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if ", tok/s " in text:
        raise UserError(f"{path}: this is train.py's console output; give the run's out_dir")
    config, unknown, warnings = *read_settings(text.splitlines()), []
    if names := unknown.keys() - NAMES:
        lines = ", ".join(f"{name} = {unknown[name]}" for name in sorted(names))
        warnings.append(f"{path}: no plain value in {lines}; it and what needs it are n/a")
    tokens_per_iter = find_number(r"tokens per iteration will be: ([\d,]+)", text)
    if math.isnan(tokens_per_iter):
        missing = "no line 'tokens per iteration will be: N', so no tok/s; add it to the file"
        warnings.append(f"{path}: {missing}")
    records, mfu = read_records(text.splitlines(), tokens_per_iter, config.get("compile") is False)
    parameters, flops = find_sizes(text, config)
    start = dict(kind="start", program="nanoGPT", config=config, tokens_per_iter=tokens_per_iter)
    start |= dict(parameters=parameters, flops_per_token=flops, dtype=config.get("dtype"))
    if "cuda" not in (config.get("device") or "cuda"):  # which does not tell which card it was
        start["device"] = config["device"]
    run = Run(path.stem, [start, *records])
    # The printed MFU is relative to an A100, whatever the card, and evaluations pull it down: it
    # only tells how many cards there were.
    speeds = flops * run.step["tokens_per_sec"] / NANOGPT_PEAK_FLOPS
    ratio = (percentile(speeds, 50) or math.nan) / (percentile(mfu[mfu > 0], 50) or math.nan)
    run.start["world_size"] = max(1, round(ratio)) if math.isfinite(ratio) else 1
    run.warnings += warnings
    return run


def find_number(pattern: str, text: str) -> float:
    """A number that the log has printed with commas; NaN where it has not."""
    match = re.search(pattern, text)
    return float(match[1].replace(",", "")) if match else math.nan


def read_settings(lines: list[str]) -> tuple[dict, dict[str, str]]:
    """
    The configuration of the run, None for what is not known, and the keys whose value is computed,
    such as n_layer = layers. Both are empty where the log prints no configuration: then not even
    the defaults are certain.
    """
    printed, unknown, known = {}, {}, NANOGPT_FIELDS | FIELDS
    for line in lines:
        match = CONFIG_LINE.fullmatch(line)
        if match and match[2] in known:
            is_flag, key, text = match[1], match[2], match[3].strip()
            printed.pop(key, None)
            unknown.pop(key, None)
            try:
                printed[key] = read_value(text, known[key], bool(is_flag))
            except UserError:
                unknown[key] = text
    if not printed and not unknown:
        return {}, {}
    config = {name: field.default for name, field in FIELDS.items()} | NANOGPT_DEFAULTS
    config |= translate(printed) | dict.fromkeys(translate(unknown))
    if any(line.startswith("found vocab_size") for line in lines):
        config["pad_vocab_multiple"] = 1
    if "dtype" not in printed | unknown and config["device"]:  # autocast on CUDA only
        config["dtype"] = "bfloat16" if "cuda" in config["device"] else "float32"
    return config, unknown


def read_value(text: str, field, is_flag: bool):
    """
    A printed value in its key's type. Raises UserError where it is none. nanoGPT prints what flags
    have set without the quotes of texts, and files as they are.
    """
    if product := PRODUCT.fullmatch(text):
        return int(product[1]) * int(product[2])
    value = parse(text, field.type)
    if value == text and field.type is str and not is_flag:
        raise UserError(text)
    return fit(value, field, field.name)


def read_records(
    lines: list[str], tokens_per_iter: float, is_eager: bool
) -> tuple[list[dict], np.ndarray]:
    """The records of steps and evaluations, and the fractions that were printed as MFU."""
    # after a resume the later line counts
    steps = {int(m[1]): [*map(float, m.groups()[1:])] for m in map(STEP.match, lines) if m}
    evals = {int(m[1]): float(m[2]) for m in map(EVAL.match, lines) if m}
    plain = [ms for it, (_, ms, _) in steps.items() if it > 0 and it not in evals]
    usual_ms = statistics.median(plain) if plain else math.nan
    records, pauses_ms = [], 0.0
    for it in sorted(steps.keys() | evals.keys()):
        so_far = dict(iter=it, tokens=it * tokens_per_iter)
        if it in evals:
            # the first iteration's time holds compilation, too
            if it in steps and (it > 0 or is_eager):
                pauses_ms += max(0, steps[it][1] - usual_ms)
            hours = (it * usual_ms + pauses_ms) / 3.6e6
            records.append(so_far | dict(kind="eval", hours=hours, val_loss=evals[it]))
        if it in steps:
            loss, ms, _ = steps[it]
            ms = math.nan if it in evals or it == 0 or not ms else ms
            hours, speed = ((it + 1) * usual_ms + pauses_ms) / 3.6e6, tokens_per_iter / ms * 1e3
            values = dict(hours=hours, loss=loss, step_ms=ms, tokens_per_sec=speed)
            records.append(so_far | dict(kind="step", **values))
    return records, np.array([mfu for _, _, mfu in steps.values()]) / 100


def find_sizes(text: str, config: dict) -> tuple[float | None, float]:
    """
    Parameters, rounded where the log does not have them in full, and FLOPs per token. nanoGPT's own
    figure leaves out the position embeddings.
    """
    in_products = 1e6 * find_number(r"number of parameters: ([\d.]+)M", text)
    counted = re.findall(r"parameter tensors: \d+, with ([\d,]+) parameters", text)[-2:]
    parameters = sum(float(number.replace(",", "")) for number in counted)
    flops = math.nan
    L, C, T = (config.get(key) for key in ("n_layer", "n_embd", "block_size"))
    if None not in (L, C, T):
        flops = 6 * in_products + 12 * L * C * T
        if not parameters and math.isfinite(in_products):
            parameters = round(in_products + T * C, -4)  # no more digits than were printed
    return parameters or None, flops
