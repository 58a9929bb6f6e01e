"""
nanoGPT's console output, read as records like those of metrics.jsonl.
"""

import ast
import contextlib
import math
import re
import statistics
from pathlib import Path

from common.console import UserError
from common.files import plain, read_text
from configurator import FIELDS, NANOGPT_FIELDS, check_value

NANOGPT_PEAK_FLOPS = 312e12  # nanoGPT divides by an A100's peak on every card
NANOGPT_DATASET = "openwebtext"  # its default, which it does not print

N = r"-?(?:[\d.]+|nan|inf)"
STEP = re.compile(rf"^iter (\d+): loss ({N}), time ({N})ms(?:, mfu ({N})%)?", re.MULTILINE)
EVAL = re.compile(rf"^step (\d+): train loss {N}, val loss ({N})", re.MULTILINE)
SAVE = re.compile(r"^saving checkpoint to", re.MULTILINE)
SETTING = re.compile(r"^(Overriding: )?(\w+) *= *([^#=\n]+?) *(?:#.*)?$", re.MULTILINE)
PRODUCT = re.compile(r"(\d+) ?\* ?(\d+)")  # the only kind of formula in nanoGPT's config files


def read_nanogpt_log(path: Path) -> tuple[list[dict], list[str]]:
    """
    The records of what nanoGPT printed, or of the part of it that was kept, and warnings. Raises
    UserError and OSError.
    """
    text = read_text(path)
    if ", tok/s " in text:
        raise UserError(f"{path}: this is train.py's console output; give the run's out_dir")
    warnings = []
    tokens_per_iter = find_number(r"tokens per iteration will be: ([\d,]+)", text)
    if math.isnan(tokens_per_iter):
        missing = "no line 'tokens per iteration will be: N', so no tok/s; add it to the file"
        warnings.append(f"{path}: {missing}")
    config = read_settings(text)
    parameters = count_parameters(text, config)
    gpu_flops = flops_of_one_gpu(text)
    # 6 FLOPs per parameter and token, and attention's; several GPUs would share them. NaN: unknown
    is_all_work = gpu_flops > 0.9 * 6 * parameters * tokens_per_iter
    device = config.get("device") or "cuda"
    start = dict(
        kind="start",
        program="nanoGPT",
        config=config,
        device=None if "cuda" in device else device,  # "cuda" does not say which GPU it was
        device_type=device.partition(":")[0],
        parameters=plain(parameters),
        dtype=config.get("dtype"),
        tokens_per_iter=plain(tokens_per_iter),
        flops_per_token=plain(gpu_flops / tokens_per_iter),  # on one GPU
        world_size=1 if is_all_work else None,
    )
    return [start, *read_lines(text, tokens_per_iter)], warnings


def find_number(pattern: str, text: str) -> float:
    """A number that the log prints with commas; NaN if it does not."""
    match = re.search(pattern, text)
    return float(match[1].replace(",", "")) if match else math.nan


def read_settings(text: str) -> dict:
    """
    The configuration that the log prints, which is the config files and flags, not nanoGPT's
    defaults. None for a value that is computed, such as n_layer = layers.
    """
    known = NANOGPT_FIELDS | FIELDS
    config: dict = {}
    for is_flag, key, value in SETTING.findall(text):
        if key not in known:
            continue
        config[key] = None
        with contextlib.suppress(UserError, ValueError, SyntaxError):
            config[key] = check_value(read_value(value, bool(is_flag)), known[key], key)
    if config:
        config.setdefault("dataset", NANOGPT_DATASET)
    return config


def read_value(text: str, is_flag: bool):
    """
    A printed value. Raises ValueError or SyntaxError if it is a formula. nanoGPT prints strings
    from flags without quotes, and config files as they are.
    """
    if product := PRODUCT.fullmatch(text):
        return int(product[1]) * int(product[2])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if is_flag:
            return text
        raise


def count_parameters(text: str, config: dict) -> float:
    """The number of weights as metrics.jsonl counts them; NaN if the log does not show it."""
    counted = re.findall(r"parameter tensors: \d+, with ([\d,]+) parameters", text)[-2:]
    if counted:
        return float(sum(int(digits.replace(",", "")) for digits in counted))
    # the rounded figure leaves out the position embeddings
    positions = (config.get("block_size") or math.nan) * (config.get("n_embd") or math.nan)
    return 1e6 * find_number(r"number of parameters: ([\d.]+)M", text) + positions


def flops_of_one_gpu(text: str) -> float:
    """
    FLOPs of an iteration on one GPU, from its time and the MFU that nanoGPT prints; NaN if unknown.
    That MFU is a running mean. After the first evaluation, it is too low, because nanoGPT counts
    the time of evaluations; later lines are used only if there are no others.
    """
    evaluated = {0, *(int(it) for it, _ in EVAL.findall(text))}
    later = [match.start() for match in EVAL.finditer(text) if match[1] != "0"]
    for part in (text[: min(later, default=len(text))], text):
        shares = [
            float(ms) / 1000 * float(mfu) / 100
            for it, _, ms, mfu in STEP.findall(part)
            if mfu and float(mfu) > 0 and int(it) not in evaluated
        ]
        if shares:
            return statistics.median(shares) * NANOGPT_PEAK_FLOPS
    return math.nan


def read_lines(text: str, tokens_per_iter: float) -> list[dict]:
    """
    The records of steps, evaluations and checkpoints. nanoGPT's iteration times include evaluations
    and checkpoints; for such iterations, the time above the median counts as the pause.
    """
    # after a resume the later line counts
    steps = {int(it): (float(loss), float(ms)) for it, loss, ms, _ in STEP.findall(text)}
    evals = {int(it): float(loss) for it, loss in EVAL.findall(text)}
    plain_ms = [ms for it, (_, ms) in steps.items() if it > 0 and it not in evals]
    usual_ms = statistics.median(plain_ms or [math.nan])
    records = []
    pauses_ms = 0.0
    for it in sorted(steps.keys() | evals.keys()):
        loss, ms = steps.get(it, (math.nan, math.nan))
        tokens = it * tokens_per_iter
        if it in evals:
            # the time of the first iteration includes compilation
            pause_ms = max(0.0, ms - usual_ms) if it in steps and it > 0 else 0.0
            pauses_ms += pause_ms
            records.append(
                dict(
                    kind="eval",
                    iter=it,
                    tokens=tokens,
                    hours=(it * usual_ms + pauses_ms) / 3.6e6,
                    val_loss=evals[it],
                    seconds=pause_ms / 1000,
                )
            )
        if it in steps:
            is_plain = it > 0 and it not in evals and ms > 0
            step_ms = ms if is_plain else math.nan
            records.append(
                dict(
                    kind="step",
                    iter=it,
                    tokens=tokens,
                    tokens_after=tokens + tokens_per_iter,
                    hours=((it + 1) * usual_ms + pauses_ms) / 3.6e6,
                    loss=loss,
                    step_ms=step_ms,
                    tokens_per_sec=tokens_per_iter / step_ms * 1000,
                )
            )
    # the seconds of a checkpoint are in those of the evaluation before it
    records += [dict(kind="checkpoint")] * len(SAVE.findall(text))
    return records
