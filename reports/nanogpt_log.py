"""
nanoGPT's console output, read as records like those of metrics.jsonl.
"""

import ast
import math
import re
import statistics
from pathlib import Path

from common.console import UserError
from common.files import plain, read_text
from configurator import FIELDS, NANOGPT_FIELDS, Field, check_value, from_nanogpt
from reports.records import Run, number, percentile

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT divides by an A100's peak on every card
# nanoGPT's defaults that differ from ours; it pads GPT-2's vocabulary only
NANOGPT_DEFAULTS = dict(device="cuda", lr_decay_iters=600000)
NANOGPT_DEFAULTS |= dict.fromkeys(("dtype", "pad_vocab_multiple", "eval_tokens"))  # by the run

N = r"-?(?:[\d.]+|nan|inf)"
STEP = re.compile(rf"^iter (\d+): loss ({N}), time ({N})ms", re.MULTILINE)
EVAL = re.compile(rf"^step (\d+): train loss {N}, val loss ({N})", re.MULTILINE)
SETTING = re.compile(r"(Overriding: )?(\w+) *= *([^#=]+?) *(?:#.*)?")
ASSIGNED = re.compile(r"([^#(]*)(?<![<>!=])=(?!=)")  # everything left of the last = of a line
PRODUCT = re.compile(r"(\d+) ?\* ?(\d+)")  # the only kind of formula in nanoGPT's config files


def read_nanogpt_log(path: Path) -> Run:
    """
    Read what nanoGPT printed, or the part of it that was kept. Raises UserError and OSError.

    Its iteration times include evaluations and checkpoints; for such iterations, the time above the
    median counts as the pause. FLOPs per token come from the printed configuration.
    """
    text = read_text(path)
    if ", tok/s " in text:
        raise UserError(f"{path}: this is train.py's console output; give the run's out_dir")
    warnings, (config, unknown) = [], read_settings(text)
    if unknown:
        lines = ", ".join(dict.fromkeys(unknown.values()))
        warnings.append(f"{path}: no plain value in {lines}; what depends on it is n/a")
    tokens_per_iter = find_number(r"tokens per iteration will be: ([\d,]+)", text)
    if math.isnan(tokens_per_iter):
        missing = "no line 'tokens per iteration will be: N', so no tok/s; add it to the file"
        warnings.append(f"{path}: {missing}")

    start = dict(kind="start", program="nanoGPT", config=config, dtype=config.get("dtype"))
    if "cuda" not in (config.get("device") or "cuda"):  # "cuda" does not say which GPU it was
        start["device"] = config["device"]
    parameters, flops = find_sizes(text, config)
    sizes = dict(parameters=parameters, flops_per_token=flops, tokens_per_iter=tokens_per_iter)
    start |= {key: plain(float(value)) for key, value in sizes.items()}
    run = Run(path.stem, [start, *read_records(text, tokens_per_iter)])
    # The printed MFU is relative to an A100 on every GPU; it only shows how many GPUs there were
    shares = [float(mfu) / 100 for mfu in re.findall(rf"mfu ({N})%", text) if float(mfu) > 0]
    speed = number(percentile(run.step["tokens_per_sec"], 50))
    cards = flops * speed / NANOGPT_PEAK_FLOPS / statistics.median(shares or [math.nan])
    run.start["world_size"] = max(1, round(cards)) if math.isfinite(cards) else 1
    run.warnings += warnings
    return run


def find_number(pattern: str, text: str) -> float:
    """A number that the log prints with commas; NaN if it does not."""
    match = re.search(pattern, text)
    return float(match[1].replace(",", "")) if match else math.nan


def read_settings(text: str) -> tuple[dict, dict[str, str]]:
    """
    The configuration of the run, None for unknown values; and by key, the lines whose values are
    computed, such as n_layer = layers. Both are empty if the log prints no configuration, because
    then not even the defaults are certain.
    """
    printed, unknown, known = {}, dict[str, str](), NANOGPT_FIELDS | FIELDS
    del known["wandb_run_name"]  # in nanoGPT's config files it holds the time of day
    for line in text.splitlines():
        match, assigned = SETTING.fullmatch(line), ASSIGNED.match(line)
        keys = known.keys() & set(re.findall(r"\w+", assigned[1] if assigned else ""))
        try:
            if match and match[2] in known:
                is_flag, key, value = match.groups()
                printed[key] = read_value(value, known[key], bool(is_flag))
                unknown.pop(key, None)
                continue
        except (UserError, ValueError, SyntaxError):
            pass
        unknown |= dict.fromkeys(keys, line.strip())
    if not printed and not unknown:
        return {}, {}
    config: dict = {name: field.default for name, field in FIELDS.items()} | NANOGPT_DEFAULTS
    config |= from_nanogpt(printed) | dict.fromkeys(from_nanogpt(unknown))
    if "found vocab_size" in text:
        config["pad_vocab_multiple"] = 1
    if "dtype" not in printed | unknown and config["device"]:  # autocast on CUDA only
        config["dtype"] = "bfloat16" if "cuda" in config["device"] else "float32"
    return config, unknown


def read_value(text: str, field: Field, is_flag: bool):
    """
    A printed value in its key's type. Raises UserError, ValueError or SyntaxError if it is not a
    value. nanoGPT prints strings from flags without quotes, and config files as they are.
    """
    if is_flag and field.type is str:
        return text
    if product := PRODUCT.fullmatch(text):
        return int(product[1]) * int(product[2])
    return check_value(ast.literal_eval(text), field, field.name)


def read_records(text: str, tokens_per_iter: float) -> list[dict]:
    # after a resume the later line counts
    steps = {int(it): (float(loss), float(ms)) for it, loss, ms in STEP.findall(text)}
    evals = {int(it): float(loss) for it, loss in EVAL.findall(text)}
    plain_ms = [ms for it, (_, ms) in steps.items() if it > 0 and it not in evals]
    usual_ms = statistics.median(plain_ms or [math.nan])
    records, pauses_ms = [], 0.0
    for it in sorted(steps.keys() | evals.keys()):
        so_far = dict(iter=it, tokens=it * tokens_per_iter)
        if it in evals:
            # the time of the first iteration includes compilation
            if it in steps and it > 0:
                pauses_ms += max(0, steps[it][1] - usual_ms)
            hours = (it * usual_ms + pauses_ms) / 3.6e6
            records.append(so_far | dict(kind="eval", hours=hours, val_loss=evals[it]))
        if it in steps:
            loss, ms = steps[it]
            ms = math.nan if it in evals or it == 0 or not ms else ms
            hours, speed = ((it + 1) * usual_ms + pauses_ms) / 3.6e6, tokens_per_iter / ms * 1e3
            values = dict(hours=hours, loss=loss, step_ms=ms, tokens_per_sec=speed)
            values |= dict(tokens_after=(it + 1) * tokens_per_iter)
            records.append(so_far | dict(kind="step", **values))
    return records


def find_sizes(text: str, config: dict) -> tuple[float, float]:
    """Parameters and FLOPs per token, NaN if the log does not show them."""
    L, C, T = (number(config.get(key)) for key in ("n_layer", "n_embd", "block_size"))
    counted = re.findall(r"parameter tensors: \d+, with ([\d,]+) parameters", text)[-2:]
    exact = sum(int(digits.replace(",", "")) for digits in counted)
    # nanoGPT's rounded figure leaves out the T x C position embeddings
    parameters = exact or 1e6 * find_number(r"number of parameters: ([\d.]+)M", text) + T * C
    return parameters, 6 * (parameters - T * C) + 12 * L * C * T
