"""
Where a run begins: from scratch, from its own newest checkpoint, or from weights trained elsewhere;
and on which data.
"""

import subprocess
import sys
from pathlib import Path

from common.console import UserError
from configurator import Config, config_values
from data.shards import Dataset, check_dataset, dataset_folder, is_made_on_demand, open_dataset
from training.checkpoint import holds_run, list_checkpoints, load_newest
from training.ranks import Ranks

ARCHITECTURE = ("model", "n_layer", "n_head", "n_embd", "block_size", "bias", "tie_weights")
ROUNDING = (
    "device",
    "dtype",
    "compile",
    "flash",
    "loss_chunk",
    "recompute",
    "tf32",
    "batch_size",
    "gradient_accumulation_steps",
)
FIXED_ON_RESUME = (
    *ARCHITECTURE,
    "pad_vocab_multiple",
    "optimizer",
    "seed",
    "stream",
)  # with these a checkpoint stands


class Start:
    """
    What init_from means. `resumed` is the checkpoint a run goes on from, `saved` that or weights
    trained elsewhere (then it holds `model`, `model_config` and `vocab` alone); both None from
    scratch.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.resumed: dict | None = None
        self.saved: dict | None = None
        self.checkpoints: list[Path] = []  # that were in out_dir then

    def find(self, config: Config) -> list[str]:
        """
        Read what init_from names, let it set the keys that it decides, and list the files and flags
        that contradict it: a check for load_config.
        """
        out_dir, resuming = Path(config.out_dir), config.init_from in ("resume", "auto")
        problems = []
        self.checkpoints = list_checkpoints(out_dir)
        holds_another = self.ranks.from_first(holds_run, out_dir) and not (
            resuming or config.overwrite
        )
        if holds_another and config.eval_only and config.init_from == "scratch":
            problems.append(
                f"init_from: scratch would evaluate random weights, not those of the run in {out_dir}; "
                f"--init_from=resume"
            )
        elif holds_another and not config.eval_only:
            problems.append(
                f"out_dir: {out_dir} holds another run; go on with it: --init_from=auto; or choose another: "
                f"--out_dir=...; or delete it: --overwrite=True"
            )
        try:
            if resuming:
                self.resumed = self.saved = self.ranks.from_first(load_newest, out_dir)
            elif config.init_from != "scratch":
                self.saved = self.ranks.from_first(read_pretrained, config)
        except UserError as error:
            return problems + error.problems
        if self.resumed:
            if "dataset" not in config.given:
                config.dataset = self.resumed["config"]["dataset"]
            return problems + adopt(self.resumed["config"], FIXED_ON_RESUME, config)
        if self.saved:
            return problems + adopt(self.saved["model_config"], ARCHITECTURE, config)
        if config.init_from == "resume":
            problems.append(
                f"init_from: {out_dir} holds no checkpoint to resume; --init_from=auto starts where there is none"
            )
        if config.init_from == "auto" and self.ranks.from_first(Path.exists, out_dir / "best.pt"):
            problems.append(
                f"init_from: {out_dir} holds best.pt but no ckpt-*.pt; --init_from={out_dir}/best.pt with another "
                f"--out_dir starts from its weights"
            )
        return problems

    def finished(self, config: Config) -> bool:
        """Whether the resumed run has nothing left to do; says so."""
        progress = self.resumed["progress"] if self.resumed else None
        if (
            not progress
            or config.eval_only
            or not progress["iter_num"] >= config.max_iters <= progress["evaluated_at"]
        ):
            return False
        print(
            f"{config.out_dir} is finished: {progress['iter_num']:,} iterations; a larger --max_iters goes on"
        )
        return True

    def say_what_changed(self, config: Config) -> None:
        """
        Print the keys that differ from the resumed checkpoint's, and whether the run goes on bit
        for bit.
        """
        values, saved = config_values(config), self.resumed["config"] if self.resumed else {}
        changed = [
            name
            for name in values
            if saved.get(name, values[name]) != values[name] and name != "init_from"
        ]
        for name in changed:
            print(
                f"resume: {name} = {values[name]!r} (the checkpoint had {saved[name]!r})",
                flush=True,
            )
        rounding = [name for name in changed if name in ROUNDING]
        if self.resumed and len(self.resumed["rng"]) != self.ranks.world_size:
            rounding.append("number of processes")
        horizon = self.resumed["progress"]["lr_horizon"] if self.resumed else config.max_iters
        if horizon != config.max_iters and "lr_decay_iters" not in config.given:
            print(
                f"resume: the rate's decay still ends at iteration {horizon}; --lr_decay_iters={config.max_iters} moves that"
            )
        if rounding:
            print(
                f"resume: with another {', '.join(rounding)} sums round differently: close to, not bit for bit the same run"
            )


def read_pretrained(config: Config) -> dict:
    from training.pretrained import load_pretrained  # rarely needed, and it needs safetensors

    block_size = config.block_size if "block_size" in config.given else None
    return load_pretrained(config.init_from, block_size)


def adopt(saved: dict, names: tuple[str, ...], config: Config) -> list[str]:
    """
    Set these keys to the saved values; list those that a file or flag has set to something else.
    """
    problems = []
    for name in (name for name in names if name in saved):
        if name in config.given and getattr(config, name) != saved[name]:
            source = (
                "the checkpoint" if config.init_from in ("resume", "auto") else config.init_from
            )
            problems.append(
                f"{name}: {getattr(config, name)!r} contradicts the {saved[name]!r} of {source}; leave it out"
            )
        setattr(config, name, saved[name])
    return problems


def prepare_on_demand(config: Config) -> None:
    """Make the quickstart's dataset where it is missing: the one dataset that needs no download."""
    folder = dataset_folder(config.dataset)
    if not is_made_on_demand(config):
        return
    print(f"data: preparing {folder} from Python's own source files", flush=True)
    script = Path(__file__).parent / "data" / "prepare_text.py"
    if subprocess.run([sys.executable, str(script), f"--out={folder}"]).returncode:
        raise UserError(f"dataset: {script} failed; see its message above")
    if problems := check_dataset(config):
        raise UserError(*problems)


def check_data(config: Config) -> list[str]:
    """
    What is wrong with the dataset or the stream's source for this configuration, one line each (for
    load_config).
    """
    if not config.stream:
        return check_dataset(config)
    from data.stream import check_source  # which training from shards does not need

    return check_source(config)


def open_data(config: Config, position: dict | None = None) -> Dataset:
    """
    The configured dataset: a folder, or a stream, from the `position` that a checkpoint holds of
    it. Raises UserError.
    """
    if not config.stream:
        return open_dataset(config.dataset)
    from data.stream import open_stream

    return open_stream(config, position)
