"""
Device, dtype, peaks and MFU, against numbers computed by hand from data sheets and users' logs.
"""

import os
import platform
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ON_WINDOWS, flags, run_here, run_process

import train
from common.console import run_main
from configurator import Config
from model import GPTConfig
from training import hardware
from training.gpus import find_row, read_gpu_table, row_peak
from training.hardware import Hardware, count_flops
from training.ranks import check_shares

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "name, sm_count, dtype, tf32, peak",
    [
        # 116.6 would be the fp16-accumulate rate
        ("NVIDIA GeForce RTX 4070", 46, BF16, True, 58.3),
        ("NVIDIA GeForce RTX 4070", 46, FP32, True, 29.1),
        ("NVIDIA GeForce RTX 4070 Ti", 60, BF16, True, 80.2),  # not the 4070 in its name
        ("NVIDIA A100-SXM4-40GB", 108, BF16, True, 312),
        ("A100-SXM4-40GB", 108, BF16, True, 312),  # older drivers leave out "NVIDIA "
        ("NVIDIA A100-SXM4-40GB", 108, FP32, True, 156),
        ("NVIDIA A100-SXM4-40GB", 108, FP32, False, 19.5),
        ("NVIDIA A10", 72, BF16, True, 125),
        ("NVIDIA A10G", 80, BF16, True, 70),
        ("NVIDIA H200", 132, BF16, True, 989.4),
        ("Tesla T4", 40, FP16, True, 65.0),
        ("Tesla T4", 40, BF16, True, None),  # only emulated
        ("Tesla T4", 40, FP32, True, 8.1),  # no TF32 on Turing: plain fp32
        ("NVIDIA GeForce RTX 3080", 68, BF16, True, 59.5),
        ("NVIDIA GeForce RTX 3080", 70, BF16, True, 61.3),  # the 12 GB part of the same name
        ("NVIDIA A40", 84, BF16, True, 149.7),
    ],
)
def test_peaks_by_whole_name_sm_count_and_dtype(name, sm_count, dtype, tf32, peak):
    """nanoGPT #182, PR#464, PR#555: 312e12 on every card."""
    dtype_name = str(dtype).removeprefix("torch.")
    assert row_peak(find_row(name, sm_count), dtype_name, tf32) == peak


@pytest.mark.parametrize(
    "name, sm_count",
    [
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 36),
        ("NVIDIA GeForce RTX 4070", 40),
        ("NVIDIA H100", 132),
        ("NVIDIA A100", 108),
        ("GeForce", 46),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14),
        ("nvidia a10", 72),
        ("", 1),
    ],
)
def test_unknown_cut_down_or_partitioned_devices_have_no_peak(name, sm_count):
    assert find_row(name, sm_count) is None


@pytest.mark.parametrize(
    "name, sm_count",
    [("NVIDIA GeForce RTX 5090 D", 170), ("NVIDIA H20-3e", 78), ("NVIDIA B100", None)],
)
def test_unverified_rows_have_no_peak(name, sm_count):
    assert row_peak(find_row(name, sm_count), "bfloat16", True) is None


def hw(peak_tflops, dtype=BF16):
    return Hardware(torch.device("cpu"), dtype, "test", peak_tflops, None)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")
def test_a_system_that_does_not_tell_its_peak_memory(monkeypatch):
    assert hw(None).peak_memory_gib() > 0
    monkeypatch.setattr(Path, "read_text", lambda _: "VmRSS:  1 kB")
    assert hw(None).peak_memory_gib() is None


def test_mfu_of_the_users_two_runs_on_a_4070():
    """
    Their logs say 12.9 % and 15.4 %, of an A100's 312 TFLOP/s; of the 4070's own 58.3 it is 69.2 %
    and 82.3 %.
    """
    wide = count_flops(GPTConfig(bias=False))
    narrow = count_flops(GPTConfig(bias=False, n_embd=384, n_head=6))
    assert hw(58.3).mfu(narrow, 524288 / 3.900) == pytest.approx(0.692, abs=0.0005)
    assert hw(58.3).mfu(wide, 524288 / 9.340) == pytest.approx(0.823, abs=0.0005)
    assert hw(312).mfu(narrow, 524288 / 3.900) == pytest.approx(0.129, abs=0.0005)


@pytest.mark.parametrize(
    "tok_per_sec, peak, vocab_size, tie, mfu",
    [
        (16_950, 19.5, 50257, False, 0.69),
        (40_900, 156, 50257, False, 0.209),
        (43_700, 312, 50257, False, 0.112),
        (112_100, 312, 50257, False, 0.286),
        (132_200, 312, 50257, False, 0.338),
        (147_400, 312, 50304, False, 0.376),
        (148_600, 312, 50304, True, 0.379),
    ],
)
def test_mfu_of_the_a100_ladder_by_each_rows_own_peak(tok_per_sec, peak, vocab_size, tie, mfu):
    """Context 512: 124M * 6 + 12 * 12 * 768 * 512 = 798 MFLOP/token, tied or not."""
    flops = count_flops(
        GPTConfig(block_size=512, vocab_size=vocab_size, tie_weights=tie, bias=True)
    )
    assert hw(peak).mfu(flops, tok_per_sec) == pytest.approx(mfu, abs=0.006)


def test_mfu_is_not_clamped_and_unknown_without_a_peak_or_flops():
    assert hw(1.0).mfu(10**9, 2000) == 2.0
    assert hw(None).mfu(10**9, 2000) is None and hw(1.0).mfu(None, 2000) is None
    assert hw(1.0).mfu(10**9, 2000, devices=4) == 0.5


def test_peak_tflops_overrides_the_table():
    assert hardware.set_up(Config(device="cpu", peak_tflops=1.5)).peak_tflops == 1.5
    assert hardware.set_up(Config(device="cpu")).peak_tflops is None


def test_a_t4_that_claims_bfloat16_gets_float16(monkeypatch):
    """nanoGPT #525: is_bf16_supported() counts emulation. Each card answers for itself."""
    cards = {"cuda:0": (8, 6), "cuda:1": (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: cards[str(device)])
    assert hardware.best_dtype(torch.device("cuda:0")) == BF16
    assert hardware.best_dtype(torch.device("cuda:1")) == FP16


@pytest.mark.parametrize(
    "amx, avx512_bf16, name, dtype",
    [
        (True, True, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", BF16),
        (False, True, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", FP32),  # as in some VMs
        (False, True, "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", FP32),  # Windows
        (False, True, "AMD EPYC", BF16),
        (False, True, "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", BF16),  # Windows
        (False, False, "AMD Ryzen 7 5800X 8-Core Processor", FP32),
        (False, False, "", FP32),  # an ARM
    ],
)
def test_a_cpu_uses_bfloat16_where_its_products_are_faster(
    amx, avx512_bf16, name, dtype, monkeypatch
):
    """results/speed.md: 0.4 of float32's time on an EPYC, 1.4 on a Xeon without AMX."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(hardware, "cpu_name", lambda: name)
    assert hardware.best_dtype(torch.device("cpu")) == dtype


def test_a_mac_does_not_compile_and_trains_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    hw = hardware.set_up(Config(compile=True))
    assert hw.dtype == FP32
    assert not hw.can_compile


def test_dtype_is_chosen_for_the_device_that_was_asked_for(monkeypatch):
    """nanoGPT #281, #304: its dtype is chosen before --device is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert hardware.set_up(Config(device="cpu")).dtype == FP32


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps", "gpu", "cuda:x", "meta"])
def test_a_device_that_is_not_there_is_one_line(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    (problem,) = hardware.check_device(Config(device=device))
    assert device in problem


# docs/troubleshooting.md: PyPI's torch for Windows has no CUDA
CUDA_BUILD = "pip install torch=="


@pytest.mark.parametrize(
    "platform, build, hint",
    [
        ("linux", "13.0", "nvidia-smi"),
        ("linux", None, CUDA_BUILD),
        ("win32", None, CUDA_BUILD),
        ("darwin", None, "nvidia-smi"),
    ],
)
def test_a_missing_driver_is_told_from_a_torch_without_cuda(platform, build, hint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(sys, "platform", platform)
    (problem,) = hardware.check_device(Config(device="cuda"))
    assert hint in problem


def test_a_run_meant_for_a_gpu_says_once_how_to_get_a_torch_that_has_cuda(
    dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    large = dict(batch_size=6400, gradient_accumulation_steps=1, eval_tokens=6400 * 16)
    run_here(dataset, tmp_path / "large", device="auto", max_iters=1, **large)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "sees no GPU" in line]
    assert CUDA_BUILD in line
    run_here(dataset, tmp_path / "small", device="auto", max_iters=1)
    assert "sees no GPU" not in capsys.readouterr().err


def test_out_of_memory_is_known_in_any_form():
    wrapped = torch._dynamo.exc.BackendCompilerFailed(
        print, RuntimeError("Triton Error [CUDA]: out of memory"), None
    )
    caused = RuntimeError("compiling failed")
    caused.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    for error in (
        wrapped,
        caused,
        MemoryError(),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ):
        assert hardware.is_out_of_memory(error), error
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError("memory"),
        None,
    ):
        assert not hardware.is_out_of_memory(error)


ITERATIONS = {  # batch_size, accumulation, processes -> the next smaller that does as much
    "half": ((8, 4, 1), (4, 8)),
    "the next divisor": ((12, 3, 1), (9, 4)),
    "of a prime": ((7, 2, 1), (2, 7)),
    "shared by processes": ((6, 4, 2), (4, 6)),
    "shared, where a larger one would not be": ((4, 3, 3), (2, 6)),
    "nothing smaller": ((1, 40, 1), None),
}


@pytest.mark.parametrize("asked, smaller", ITERATIONS.values(), ids=ITERATIONS.keys())
def test_out_of_memory_names_the_next_smaller_batch_that_does_as_much(asked, smaller):
    batch_size, accumulation, world_size = asked
    config = Config(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    line = hardware.out_of_memory_line(config, world_size)
    assert line.startswith(f"out of memory with batch_size={batch_size}; ")
    found = re.findall(r"--batch_size=(\d+) --gradient_accumulation_steps=(\d+)", line)
    assert [tuple(map(int, pair)) for pair in found] == ([smaller] if smaller else [])
    if smaller:
        assert smaller[0] * smaller[1] == batch_size * accumulation and smaller[0] < batch_size
        assert check_shares(Config(gradient_accumulation_steps=smaller[1]), world_size) == []
    else:
        assert "--recompute=True" in line


class NoMemory:
    """A train_step that asks for too much where micro-batches hold more than `rows` sequences."""

    def __init__(self, rows: int, error: Exception):
        self.rows, self.error, self.step, self.taken = rows, error, train.train_step, 0

    def __call__(self, model, optimizer, scaler, micro_batches, *rest):
        if max(len(x) for x, _ in micro_batches) > self.rows:
            raise self.error
        self.taken += sum(len(x) for x, _ in micro_batches)
        return self.step(model, optimizer, scaler, micro_batches, *rest)


@pytest.mark.skipif(ON_WINDOWS, reason="this process has the first run's log open for the next one")
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "asked",
    [
        dict(batch_size=12, gradient_accumulation_steps=1),
        dict(batch_size=12, gradient_accumulation_steps=1, tokens_per_iter=192),
        dict(batch_size=6, init_from="auto"),
    ],
    ids=["two keys", "tokens_per_iter", "auto"],
)
def test_the_command_that_out_of_memory_names_starts(
    error, asked, dataset, tmp_path, monkeypatch, capsys
):
    """Typed behind the first, again and again: in the end it fits, and trains on as many tokens."""
    step = NoMemory(2, error)
    monkeypatch.setattr(train, "train_step", step)

    def run(arguments) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        with pytest.raises(SystemExit) as exit:
            run_main(train.main, train.explain)
        return exit.value.code, capsys.readouterr().err.splitlines()

    arguments, sizes = flags(dataset, tmp_path, max_iters=1, **asked), []
    for _ in range(5):
        code, lines = run(arguments)
        if code == 0:
            break
        assert code == 1 and lines[-1].startswith("error: out of memory with batch_size=")
        pair = lines[-1].split(": ")[-1].split()
        sizes.append(pair[0])
        arguments += pair
    assert code == 0 and step.taken == 12
    assert sizes[-1] == "--batch_size=2"


def test_a_resume_that_runs_out_of_memory_counts_with_its_own_model(
    dataset, tmp_path, monkeypatch, capsys
):
    """Its context is the checkpoint's: 192 tokens are twelve sequences of it."""
    run_here(dataset, tmp_path, max_iters=1)
    monkeypatch.setattr(train, "train_step", NoMemory(2, MemoryError()))
    keys = dict(batch_size=12, tokens_per_iter=192, max_iters=2, init_from="resume")
    arguments = [f for f in flags(dataset, tmp_path, **keys) if not f.startswith("--block_size")]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit):
        run_main(train.main, train.explain)
    pair = "--batch_size=6 --gradient_accumulation_steps=2"
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": {pair} --eval_tokens=256")


def test_other_errors_are_not_explained():
    for error in (RuntimeError("shapes cannot be multiplied"), KeyError("memory")):
        assert train.explain(error, []) == ""


@pytest.mark.parametrize(
    "device, dtype, tokens, flash, fused",
    [
        ("cpu", BF16, 512, True, False),
        ("cpu", BF16, 513, True, True),
        ("cpu", FP32, 64, True, True),
        ("cpu", FP16, 16, True, True),  # not measured: as configured
        ("cpu", FP32, 1024, False, False),
        ("cuda", BF16, 64, True, True),
        ("cuda", BF16, 64, False, False),
        # pytorch #195910: its kernel may look at later tokens
        ("mps", BF16, 1024, True, False),
        ("mps", FP32, 1024, True, False),
    ],
)
def test_plain_attention_where_it_is_faster_on_a_cpu_and_on_a_mac(
    device, dtype, tokens, flash, fused
):
    machine = Hardware(torch.device(device), dtype, "test", None, None)
    assert machine.flash(Config(block_size=tokens, flash=flash)) is fused


ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def fresh_linux(monkeypatch):
    """A Linux whose user has set none of the allocator's variables."""
    monkeypatch.setattr(os, "environ", {"HOME": "/home/user"})
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")


def set_environment():
    """What hardware.py does where it is first imported."""
    runpy.run_path(hardware.__file__)


def test_the_allocator_is_set_where_the_user_has_not(fresh_linux):
    set_environment()
    found = {key: value for key, value in os.environ.items() if key in ALLOCATOR_NAMES}
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ALLOCATOR_NAMES)
def test_the_users_own_allocator_setting_stays(name, fresh_linux):
    os.environ[name] = "max_split_size_mb:64"
    set_environment()
    found = {key: value for key, value in os.environ.items() if key in ALLOCATOR_NAMES}
    assert found == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize("home", ["home", "none"])
def test_compiled_code_is_kept_in_a_home_that_can_be_written(home, fresh_linux, tmp_path):
    """A container's user may have none, and torch makes the folder when it is imported."""
    (tmp_path / "home").mkdir()
    os.environ["HOME"] = os.environ["USERPROFILE"] = str(tmp_path / home)
    set_environment()
    expected = f"{tmp_path}/home/.cache/torchinductor" if home == "home" else None
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == expected


def test_wsl_keeps_the_allocators_own_setting(fresh_linux, monkeypatch):
    """pytorch #192330: expandable segments crash its driver."""
    monkeypatch.setattr(platform, "release", lambda: "5.15.0-microsoft-standard-WSL2")
    set_environment()
    assert not any(name in os.environ for name in ALLOCATOR_NAMES)


@pytest.mark.parametrize("module", ["data.sources", "training.pretrained"])
def test_windows_hears_nothing_of_the_symbolic_links_that_it_lacks(module):
    """Of the library by which the hub's texts and weights come."""
    code = f"import os, {module}; print(os.environ['HF_HUB_DISABLE_SYMLINKS_WARNING'])"
    assert run_process("-c", code, cold=True) == (0, "1\n", "")


@pytest.mark.parametrize(
    "platform_name, in_wsl, limits",
    [("win32", False, [0.75]), ("linux", True, [0.75]), ("linux", False, [])],
)
def test_windows_and_wsl_limit_torch_to_the_free_memory(platform_name, in_wsl, limits, monkeypatch):
    """6 of 8 GB are free; above them the driver would spill into system memory without a word."""
    seen = []
    monkeypatch.setattr(sys, "platform", platform_name)
    monkeypatch.setattr(hardware, "IN_WSL", in_wsl)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9, 8e9))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: seen.append(share)
    )
    hardware.forbid_spilling(torch.device("cuda", 0))
    assert seen == limits


def test_a_rocm_build_is_let_through(monkeypatch):
    """It calls itself cuda, and its cards' names are in the table."""
    monkeypatch.setattr(hardware, "forbid_spilling", lambda device: None)
    monkeypatch.setattr(hardware, "best_dtype", lambda device: BF16)
    card = SimpleNamespace(multi_processor_count=304)
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("set_device", None),
        ("get_device_name", "AMD Instinct MI300X"),
        ("get_device_properties", card),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert hardware.check_device(Config(device="cuda")) == []
    assert hardware.set_up(Config(device="cuda")).peak_tflops == 1307.4


@pytest.mark.parametrize("local_rank, gpus, device", [(0, 2, 0), (1, 2, 1), (3, 1, 0)])
def test_a_rank_that_sees_one_gpu_alone_takes_it(local_rank, gpus, device, monkeypatch):
    """As SLURM gives each task a GPU of its own, which is cuda:0 for all of them."""
    monkeypatch.setattr(hardware, "find_row", lambda *_: None)
    monkeypatch.setattr(hardware, "forbid_spilling", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    card = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    hw = hardware.set_up(Config(device="cuda", dtype="float32"), local_rank)
    assert hw.device == torch.device("cuda", device)


def test_every_row_of_the_table_can_be_found_by_its_own_name():
    """But for those of laptops, whose peak torch's name does not tell."""
    for row in read_gpu_table():
        for alias in row["name"].split("|"):
            if "Laptop" in alias:
                continue
            assert find_row(alias, int(row["sm_count"]) if row["sm_count"] else None) == row


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc"
    or any(name == "LD_PRELOAD" or "MALLOC" in name for name in os.environ),
    reason="another malloc, or another setting",
)
def test_memory_freed_by_a_tensor_stays_for_the_next():
    """Without it glibc unmaps a block of 256 MB at once; touching new pages is what costs."""
    code = """
import re, torch
from configurator import Config
from training import hardware
def resident():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmRSS:\\s+(\\d+)", status)[1]) / 1024
def grown():
    before = resident()
    torch.ones(2**26)
    return resident() - before
print(grown())
hardware.set_up(Config(device="cpu", dtype="float32"))
print(grown())
"""
    exit_code, out, err = run_process("-c", code, only_torch=True)
    assert exit_code == 0, err
    without, with_set_up = map(float, out.split())
    assert without < 100 and with_set_up > 200
