"""
Check device, dtype, peak speed and MFU against numbers computed by hand from data sheets and users'
logs. Other machines are imitated by patching torch and the standard library.
"""

import os
import platform
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from program import flags, run

from common import environment
from common.console import UserError, is_out_of_memory
from configurator import Config
from machine import cost, hardware
from machine.cost import count_flops
from machine.gpus import find_row, row_peak
from machine.hardware import Hardware
from model import GPT, GPTConfig, mean_loss
from model_fast import FastConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


PEAKS = [
    ("NVIDIA GeForce RTX 4070 Ti", 60, "bfloat16", True, 80.2),  # not the 4070 in its name
    ("A100-SXM4-40GB", 108, "bfloat16", True, 312),  # older drivers leave out "NVIDIA "
    ("Tesla T4", 40, "bfloat16", True, None),  # bfloat16 is only emulated
    ("Tesla T4", 40, "float32", True, 8.1),  # no TF32 on Turing: plain fp32
    ("NVIDIA GeForce RTX 3080", 70, "bfloat16", True, 61.3),  # the 12 GB part of the same name
    # no peak: cut down, partitioned, another number of SMs, a power limit of its own, unverified
    ("NVIDIA GeForce RTX 4070 Laptop GPU", 36, "bfloat16", True, None),
    ("nvidia a10", 72, "bfloat16", True, None),
    ("NVIDIA GeForce RTX 4070", 40, "bfloat16", True, None),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, "bfloat16", True, None),
    ("NVIDIA GeForce RTX 5090 D", 170, "bfloat16", True, None),
]


@pytest.mark.parametrize("name, sm_count, dtype, tf32, peak", PEAKS)
def test_finds_a_gpus_peak_by_whole_name_sm_count_and_dtype(name, sm_count, dtype, tf32, peak):
    """Look up each card's own peak; nanoGPT assumes 312e12 on every card (#182, PR#464, PR#555)."""
    row = find_row(name, sm_count)
    assert (row and row_peak(row, dtype, tf32)) == peak


@pytest.mark.parametrize("kind", [GPTConfig, FastConfig])
@pytest.mark.parametrize(
    "changes", [{}, dict(flash=False), dict(loss_chunk="7"), dict(dropout=0.1, bias=True)]
)
def test_counts_the_same_flops_however_the_model_is_computed(kind, changes):
    """
    Count 6 N + 12 L H Q T per token, as the PaLM paper does in appendix B, without embeddings and
    norms in N.
    """
    sizes = dict(n_layer=2, n_head=3, n_embd=96, block_size=40, vocab_size=100)
    config = kind(**dict(bias=False, tie_weights=False) | sizes | changes)
    n = 100 * 96 + 2 * 12 * 96**2
    assert count_flops(config) == 6 * n + 12 * 2 * 96 * 40


def test_counts_a_head_of_training_alone_and_frozen_weights_as_they_run(monkeypatch):
    """Count the passes of a model with a frozen part."""

    class Changed(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.second = nn.Linear(96, 100)
            self.transformer.requires_grad_(False)

        def forward(self, idx, targets=None):
            x = self.hidden(idx)
            loss = mean_loss(x, self.lm_head.weight, targets, self.config)
            if torch.is_grad_enabled():
                loss = loss + mean_loss(x, self.second.weight, targets, self.config)
            return loss

    monkeypatch.setattr(cost, "build_model", Changed)
    # counts are cached by config, so use sizes that no other test has
    sizes = dict(n_layer=2, n_head=3, n_embd=96, block_size=48, vocab_size=100)
    config = GPTConfig(**sizes, bias=False, tie_weights=False)
    # frozen blocks run forward alone, and the heads send no gradient to their input
    assert count_flops(config) == 2 * 2 * (12 * 96**2 + 2 * 96 * 48) + 2 * 4 * 96 * 100


def test_each_iteration_and_rank_of_a_seed_draws_random_numbers_of_its_own(monkeypatch):
    """Seed the GPU too, for which a function of torch stands in."""
    cpu, gpu = (Hardware(torch.device(kind), FP32, "", 1.0, "") for kind in ("cpu", "cuda"))
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)

    def drawn(hw: Hardware, *row: int) -> tuple[float, ...]:
        hw.seed(*row)
        return tuple(torch.rand(9).tolist())

    rows = [
        (seed, it, rank) for seed in (0, 1, 2**63 - 1) for it in (0, 1, 2**40) for rank in (0, 1)
    ]
    assert len({drawn(cpu, *row) for row in rows}) == len(rows) and not seeds
    assert [drawn(gpu, *row) == drawn(cpu, *row) for row in rows] == [True] * len(rows)
    assert len({*seeds}) == len(seeds) == len(rows)


MEASURED = 0.125  # TFLOP/s of a matmul on such a machine
# no GPU, an unknown CPU, and a torch that was built for CUDA
MACHINE = dict(system=sys.platform, release="6.8.0-generic", cpu="", amx=False, avx512_bf16=False)
MACHINE |= dict(gpu="", sm_count=1, capability=(8, 9), count=1, mps=False)
MACHINE |= dict(cuda="13.0")


@pytest.fixture
def machine(monkeypatch):
    """
    Return machine(), which imitates the machine that its keywords describe, and returns a list that
    collects the memory limits set on its GPUs, as fractions. Without `gpu` torch sees none.
    """
    read_text = Path.read_text

    def make(**described) -> list[float]:
        assert described.keys() <= MACHINE.keys()
        here, limits = SimpleNamespace(**MACHINE | described), []
        answers = {
            (torch.cuda, "is_available"): bool(here.gpu),
            (torch.cuda, "device_count"): here.count if here.gpu else 0,
            (torch.cuda, "set_device"): None,
            (torch.cuda, "get_device_name"): here.gpu,
            (torch.cuda, "get_device_properties"): SimpleNamespace(
                multi_processor_count=here.sm_count
            ),
            (torch.cuda, "get_device_capability"): here.capability,
            (torch.cuda, "mem_get_info"): (6 * 10**9, 8 * 10**9),
            (torch.backends.mps, "is_available"): here.mps,
            (torch.cpu, "_is_amx_tile_supported"): here.amx,
            (torch.cpu, "_is_avx512_bf16_supported"): here.avx512_bf16,
            (platform, "processor"): here.cpu,
            (platform, "release"): here.release,
        }
        for (module, name), answer in answers.items():
            monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)
        model = f"model name\t: {here.cpu}\n" if here.cpu else ""

        def read(path, *words, **keys) -> str:
            is_cpu = path == Path("/proc/cpuinfo")
            return f"processor : 0\n{model}" if is_cpu else read_text(path, *words, **keys)

        monkeypatch.setattr(Path, "read_text", read)
        monkeypatch.setattr(hardware, "measure_matmul", lambda *_: MEASURED)
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share, _: limits.append(share)
        )
        monkeypatch.setattr(torch.version, "cuda", here.cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(sys, "platform", here.system)
        return limits

    return make


RTX = dict(gpu="NVIDIA GeForce RTX 4070", sm_count=46)
A100 = dict(gpu="NVIDIA A100-SXM4-40GB", sm_count=108, capability=(8, 0))
T4 = dict(gpu="Tesla T4", sm_count=40, capability=(7, 5))
XEON = dict(cpu="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", avx512_bf16=True)
INTEL = "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel"
AMD = "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD"
CHOSEN = [  # a machine, keys -> device, dtype, peak; the key is resolved before the dtype
    (RTX | dict(mps=True), {}, "cuda", BF16, 58.3),  # 116.6 would be the fp16-accumulate rate
    (RTX, dict(dtype="float16"), "cuda", FP16, 58.3),
    (RTX, dict(device="cpu"), "cpu", FP32, None),  # nanoGPT #281, #304
    (A100, {}, "cuda", BF16, 312),
    (A100, dict(dtype="float32"), "cuda", FP32, 156),
    (A100, dict(dtype="float32", tf32=False), "cuda", FP32, 19.5),
    (A100, dict(peak_tflops=1.5), "cuda", BF16, 1.5),
    # nanoGPT #525: is_bf16_supported() counts emulation
    (T4, {}, "cuda", FP16, 65),
    # a ROCm build calls itself cuda
    (dict(gpu="AMD Instinct MI300X", sm_count=304, capability=(9, 4)), {}, "cuda", BF16, 1307.4),
    (dict(gpu="a card"), {}, "cuda", BF16, None),
    (dict(mps=True), {}, "mps", FP32, None),
    # In results/rows.json bfloat16 took 0.4 of float32's time on an EPYC, and 1.4 on a Xeon
    # without AMX.
    (XEON | dict(amx=True), {}, "cpu", BF16, None),
    (XEON, {}, "cpu", FP32, None),  # as in some VMs
    (XEON | dict(system="win32", cpu=INTEL), {}, "cpu", FP32, None),
    (XEON | dict(cpu="AMD EPYC"), {}, "cpu", BF16, None),
    (XEON | dict(system="win32", cpu=AMD), {}, "cpu", BF16, None),
    ({}, {}, "cpu", FP32, None),  # an ARM
]


@pytest.mark.parametrize("here, keys, device, dtype, peak", CHOSEN)
def test_picks_the_fastest_device_its_dtype_and_its_peak(here, keys, device, dtype, peak, machine):
    """Pick CUDA before MPS before the CPU, and a dtype for that device, unless a key names one."""
    machine(**here)
    config = Config(**keys)
    found = hardware.set_up(config)
    assert (found.device.type, found.dtype) == (device, dtype)
    source = "measured" if not peak else "peak_tflops" if config.peak_tflops else "gpus.csv"
    assert (found.peak_tflops, found.peak_source) == (peak or MEASURED, source)
    assert torch.get_float32_matmul_precision() == ("high" if config.tf32 else "highest")


def test_a_run_in_bfloat16_learns_on_a_t4_that_float16_is_faster(machine, capsys):
    """A run that began on an A100 keeps its dtype."""
    for here, words in ((T4, "--dtype=float16"), (A100, ""), (dict(), "")):
        machine(**here)
        assert hardware.set_up(Config(dtype="bfloat16")).dtype == BF16
        said = capsys.readouterr().err
        assert words in said and bool(said) == bool(words)


CUDA_BUILD = "pip install torch=="
REFUSED = [  # a machine, keys -> words of the error
    (dict(), dict(device="mps"), "--device=cpu"),
    (dict(), dict(device="cuda"), "nvidia-smi"),
    (dict(system="linux", cuda=None), dict(device="cuda"), CUDA_BUILD),
    (dict(system="darwin", cuda=None), dict(device="cuda"), "nvidia-smi"),
]


@pytest.mark.parametrize("here, keys, words", REFUSED)
def test_refuses_a_device_that_cannot_train_and_names_the_fix(here, keys, words, machine):
    machine(**here)
    with pytest.raises(UserError) as refusal:
        hardware.choose_device(Config(**keys))
    (problem,) = refusal.value.args
    assert words in problem


@pytest.mark.parametrize("local_rank, gpus, number", [("1", 2, 1), ("3", 1, 0)])
def test_each_rank_uses_the_gpu_of_its_local_rank_or_the_only_one_it_sees(
    local_rank, gpus, number, machine, monkeypatch
):
    """Use cuda:0 on a rank that sees only its own GPU, as under SLURM."""
    machine(gpu="a card", count=gpus)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert hardware.set_up(Config()).device == torch.device("cuda", number)


def test_measures_a_matmul_of_random_numbers(monkeypatch):
    """Double the size until a matmul takes 2 ms. The simulated device does 4 TFLOP/s."""
    now, seen = [0.0], []

    def multiply(a, b):
        seen.append(a)
        # the first one of each size takes three times as long
        now[0] += 2 * len(a) ** 3 / 4e12 * (1 if len(seen) % 8 != 1 else 3)

    monkeypatch.setattr(nn.functional, "linear", multiply)
    monkeypatch.setattr(hardware, "perf_counter", lambda: now[0])
    measured = hardware.measure_matmul(Hardware(torch.device("cpu"), FP32, "", 0.0, ""))
    assert measured == pytest.approx(4) and {len(a) for a in seen} == {512, 1024, 2048}
    assert seen[0].std().item() == pytest.approx(1, abs=0.02)


MANY = dict(gradient_accumulation_steps=1600)  # 102,400 tokens per iteration
ON_PURPOSE = [MANY | dict(device="cpu"), {}]


@pytest.mark.parametrize("keys", [MANY, *ON_PURPOSE])
def test_refuses_to_train_a_large_config_on_a_cpu_unless_asked_to(keys, tiny, machine):
    machine(cuda=None)
    is_refused = keys is MANY
    result = run("train.py", *flags(**tiny | dict(device="auto", max_iters=0) | keys))
    assert result.code == (1 if is_refused else 0), result.err
    assert ("--device=cpu" in result.err) == (CUDA_BUILD in result.err) == is_refused
    assert tiny["out_dir"].exists() != is_refused


# -----------------------------------------------------------------------------
# Out of memory


CAUSED = RuntimeError("compiling failed")
CAUSED.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
TRITON = RuntimeError("Triton Error [CUDA]: out of memory")
ERRORS = [
    torch._dynamo.exc.BackendCompilerFailed(print, TRITON, None),
    CAUSED,
    MemoryError(),
    # the words of cuBLAS, c10 on Windows and elsewhere, and MPS
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("Invalid buffer size: 128.00 GiB"),
]


def test_recognises_out_of_memory_in_many_errors():
    """Recognise the errors of torch, cuBLAS, Triton and Python, also as another error's cause."""
    assert [error for error in ERRORS if not is_out_of_memory(error)] == []
    for other in (RuntimeError("mat1 and mat2 cannot be multiplied"), KeyError("memory"), None):
        assert not is_out_of_memory(other)


# -----------------------------------------------------------------------------
# Systems


SEGMENTS = dict(PYTORCH_ALLOC_CONF="expandable_segments:True")
SWITCH = dict(TORCHINDUCTOR_MIX_ORDER_REDUCTION="0")
WSL = "5.15.0-microsoft-standard-WSL2"
# the user's variables, the kernel; the variables that a run adds
ADDED = [
    # the compiler loses gradients (pytorch #193061)
    ({}, "6.8.0-generic", SEGMENTS | SWITCH),
    # WSL's driver may crash with expandable segments (pytorch #192330)
    ({}, WSL, SWITCH),
    (dict(PYTORCH_ALLOC_CONF="max_split_size_mb:64"), "6.8.0-generic", SWITCH),
    (dict(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), "6.8.0-generic", SWITCH),
    (dict(TORCHINDUCTOR_MIX_ORDER_REDUCTION="1"), "6.8.0-generic", SEGMENTS),
]


@pytest.mark.parametrize("given, release, added", ADDED)
def test_sets_the_allocators_and_the_compilers_variables_unless_the_user_has(
    given, release, added, machine, monkeypatch
):
    machine(system="linux", release=release)
    monkeypatch.setattr(os, "environ", dict(given))
    runpy.run_path(environment.__file__)
    names = {*SEGMENTS, *SWITCH, "PYTORCH_CUDA_ALLOC_CONF"}
    assert {name: os.environ[name] for name in names & os.environ.keys()} == given | added


@pytest.mark.parametrize(
    "system, release, limits",
    [("win32", "11", [0.75]), ("linux", WSL, [0.75]), ("linux", "6.8.0-generic", [])],
)
def test_limits_torch_to_free_memory_where_the_driver_would_spill(system, release, limits, machine):
    """
    Limit torch to the 6 of 8 GB that are free on Windows and WSL. Otherwise the driver would spill
    into system memory without a word.
    """
    seen = machine(system=system, release=release, gpu="a card")
    runpy.run_path(hardware.__file__)["set_up"](Config(peak_tflops=1.0))
    assert seen == pytest.approx(limits)


# threads that run, CPUs, CPUs to a core, the user's variables; the spins before a thread sleeps
WAITS = [
    (9, 16, 2, {}, "10000"),  # 8 threads on 8 cores, and 8 other programs find a place
    (10, 16, 2, {}, "0"),
    (4, 2, 1, dict(GOMP_SPINCOUNT="77"), "77"),
    (4, 2, 1, dict(OMP_WAIT_POLICY="active"), None),
]


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is torch's on Linux")
@pytest.mark.parametrize("running, cpus, per_core, given, spins", WAITS)
def test_threads_do_not_spin_on_cores_that_other_programs_need(
    running, cpus, per_core, given, spins, monkeypatch
):
    def read_text(path, *rest, read=Path.read_text, **named) -> str:
        if path == Path("/proc/loadavg"):
            return f"9.00 9.00 9.00 {running}/400 77\n"
        if path.name != "siblings":
            return read(path, *rest, **named)
        return str(int(path.parent.name.removeprefix("cpu")) // per_core)

    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(Path, "glob", lambda *_: [Path(f"cpu{n}/siblings") for n in range(cpus)])
    monkeypatch.setattr(Path, "read_text", read_text)
    runpy.run_path(environment.__file__)
    assert os.environ.get("GOMP_SPINCOUNT") == spins
