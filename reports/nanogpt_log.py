"""
Read nanoGPT's console output into records like those of metrics.jsonl.
"""

import ast
import contextlib
import math
import re
import statistics
from itertools import pairwise
from pathlib import Path

from common.console import UserError
from common.files import plain, read_text
from configurator import FIELDS, NANOGPT_FIELDS, check_value

NANOGPT_PEAK_FLOPS = 312e12  # an A100's peak, which nanoGPT divides by on every card
NANOGPT_DATASET = "openwebtext"  # nanoGPT's default, which it does not print

N = r"-?(?:[\d.]+|nan|inf)"
STEP = re.compile(rf"^iter (\d+): loss ({N}), time ({N})ms(?:, mfu ({N})%)?", re.MULTILINE)
LOSSES = rf"val loss (?P<val_loss>{N})(?:, low (?P<low>{N}), high (?P<high>{N}))?"
EVAL = re.compile(rf"^step (\d+): train loss {N}, {LOSSES}", re.MULTILINE)
SAVE = re.compile(r"^saving checkpoint to", re.MULTILINE)
# a row below a header of iter,val_loss and perhaps low,high,sd: see results/public_runs
CSV_ROW = re.compile(rf"^(\d+),({N})(?:,({N}),({N}),{N})?$", re.MULTILINE)
SETTING = re.compile(r"^(Overriding: )?(\w+) *= *([^#=\n]+?) *(?:#.*)?$", re.MULTILINE)
PRODUCT = re.compile(r"(\d+) ?\* ?(\d+)")  # nanoGPT's config files contain no other formula


def read_nanogpt_log(path: Path) -> tuple[list[dict], list[str]]:
    """
    Return the records of what nanoGPT printed, or of the part that was kept, and warnings. A CSV
    has the means of several runs, after lines with # that hold their settings. Raises UserError for
    a file of another program, and OSError.
    """
    text = read_text(path)
    if ", tok/s " in text:
        raise UserError(f"{path}: this is train.py's console output; give the run's out_dir")
    warnings = []
    if "\niter,val_loss" in text:
        line = r"step \1: train loss nan, val loss \2, low \3, high \4"
        text = CSV_ROW.sub(line, text.replace("# ", ""))
    tokens_per_iter = find_number(r"tokens per iteration will be: ([\d,]+)", text)
    if math.isnan(tokens_per_iter):
        missing = "no line 'tokens per iteration will be: N', so no tok/s; add it to the file"
        warnings.append(f"{path}: {missing}")
    config = read_settings(text)
    parameters = count_parameters(text, config)
    gpu_flops = flops_of_one_gpu(text)
    # A token costs 6 FLOPs per parameter, plus attention. If one GPU did less, several shared the
    # work. The comparison is false if either side is NaN, which means unknown.
    is_all_work = gpu_flops > 0.9 * 6 * parameters * tokens_per_iter
    device = config.get("device") or "cuda"
    start = dict(
        kind="start",
        program="nanoGPT",
        config=config,
        device=None if "cuda" in device else device,  # "cuda" does not name the card
        device_type=device.partition(":")[0],
        parameters=plain(parameters),
        dtype=config.get("dtype"),
        tokens_per_iter=plain(tokens_per_iter),
        train_tokens=plain(find_number(r"tokens in an epoch: ([\d,]+)", text)),
        flops_per_token=plain(gpu_flops / tokens_per_iter),  # on one GPU
        world_size=1 if is_all_work else None,
    )
    records = read_lines(text, tokens_per_iter)
    pauses = [record["seconds"] for record in records if record["kind"] == "eval"]
    if STEP.search(text) and any(map(math.isnan, pauses)):
        warnings.append(
            f"{path}: the time of evaluations and checkpoints is unknown, because the log has "
            "no iterations with them, or none without; `time` is n/a or leaves them out"
        )
    return [start, *records], warnings


def find_number(pattern: str, text: str) -> float:
    """Return the number that the pattern finds in the log, without its commas; NaN if none."""
    match = re.search(pattern, text)
    return float(match[1].replace(",", "")) if match else math.nan


def read_settings(text: str) -> dict:
    """
    Return the configuration that the log prints: the values of config files and flags, but not
    nanoGPT's defaults. A value that is computed, such as n_layer = layers, is None.
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
    Parse a printed value. nanoGPT prints config files as they are, but strings from flags without
    quotes. Raises ValueError or SyntaxError for a formula other than a product.
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
    """Return the number of weights as metrics.jsonl counts them; NaN if the log lacks it."""
    # nanoGPT prints one line for decayed tensors and one for the others, on every rank
    counted = dict(re.findall(r"parameter tensors: (\d+), with ([\d,]+) parameters", text))
    if counted:
        return float(sum(int(digits.replace(",", "")) for digits in counted.values()))
    # nanoGPT's rounded figure leaves out the position embeddings
    positions = (config.get("block_size") or math.nan) * (config.get("n_embd") or math.nan)
    return 1e6 * find_number(r"number of parameters: ([\d.]+)M", text) + positions


def flops_of_one_gpu(text: str) -> float:
    """
    Return one GPU's FLOPs per iteration, from the time and the MFU that nanoGPT prints; NaN if
    unknown. nanoGPT's MFU is a running mean that includes the time of evaluations, so the lines
    before the first evaluation after an iteration are used, and later lines only if there are no
    others.
    """
    evaluated = {0, *(int(it) for it, *_ in EVAL.findall(text))}
    first = STEP.search(text)
    begun = first.end() if first else 0
    later = [match.start() for match in EVAL.finditer(text, begun)]
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
    Return the records of steps, evaluations and checkpoints.

    nanoGPT evaluates and saves before an iteration, and includes that pause in the iteration's
    time. A pause cannot be seen if log_interval hides the iteration, or if it is the first of a
    launch, whose time includes compilation. The median of all visible pauses then stands in.
    """
    steps: dict[int, tuple[float, float]] = {}  # the later line, if a resume repeats one
    evals: dict[int, dict[str, float]] = {}  # val_loss, low, high
    launches = set()  # the first iteration of each launch
    last = (math.inf, False)
    for line in sorted([*STEP.finditer(text), *EVAL.finditer(text)], key=re.Match.start):
        it, is_step = int(line[1]), line.re is STEP
        if (it, is_step) <= last:
            launches.add(it)
        last = (it, is_step)
        if is_step:
            steps[it] = float(line[2]), float(line[3])
        else:
            evals[it] = {key: float(loss or "nan") for key, loss in line.groupdict().items()}
    plain_ms = [ms for it, (_, ms) in steps.items() if it > 0 and it not in evals]
    usual_ms = statistics.median(plain_ms or [math.nan])
    seen_ms = {it: steps[it][1] - usual_ms for it in evals.keys() & steps.keys() - launches}
    if not plain_ms:
        seen_ms.clear()
    usual_pause_ms = statistics.median(seen_ms.values() or [0.0])
    lines = sorted(steps.keys() | evals.keys())
    records = []
    pauses_ms = 0.0
    if len(evals) > 1:  # count the earlier pauses if the log begins with a resume
        eval_interval = min(after - before for before, after in pairwise(sorted(evals)))
        pauses_ms = max(0, lines[0] - 1) // eval_interval * usual_pause_ms
    for it in lines:
        loss, ms = steps.get(it, (math.nan, math.nan))
        tokens = it * tokens_per_iter
        if it in evals:
            # at iteration 0 nanoGPT evaluates but does not save; that time counts as startup
            pause_ms = seen_ms.get(it, usual_pause_ms) if it > 0 else 0.0
            pauses_ms += pause_ms
            records.append(
                dict(
                    kind="eval",
                    iter=it,
                    tokens=tokens,
                    hours=(it * usual_ms + pauses_ms) / 3.6e6,
                    **evals[it],
                    seconds=pause_ms / 1000 if seen_ms or it == 0 else math.nan,
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
    # nanoGPT does not time its saves: the seconds of an evaluation include its checkpoint
    records += [dict(kind="checkpoint")] * len(SAVE.findall(text))
    return records
