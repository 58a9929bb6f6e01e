"""
Check fp16_accumulation on a CPU, where accumulators.py adds as the tensor cores of a GeForce do:
which matmuls add in float16, that a run follows float32's losses, and when torch's switch is set.
test_hardware.py checks which GPUs accept the key.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from accumulators import (
    MODELS,
    Float16Accumulators,
    gradient_errors,
)
from char_dataset import train_short
from program import FAST, column, write_tokens

from common.console import UserError
from configurator import load_config
from model_fast import build_model, config_from_dict
from training import hardware, preflight
from training.compiled import WrongKernels, compare_with_eager
from training.hardware import Hardware

KEYS = dict(dtype="float16", fp16_accumulation=True)
SMALL = dict(n_layer=1, n_head=2, n_embd=128, vocab_size=512)
HW = Hardware(torch.device("cpu"), torch.float16, "", None, None)
SWITCH = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def restored_switch():
    """Switch float16 accumulators off again, because torch has one switch for the process."""
    yield
    SWITCH.allow_fp16_accumulation = False


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Return a dataset, for runs that may use the key on this CPU."""
    monkeypatch.setattr(preflight, "check_device", lambda config: [])
    return write_tokens(tmp_path / "data", [4000], [700])


@pytest.mark.parametrize("chunk", [0, 32], ids=["at once", "in chunks"])
@pytest.mark.parametrize("model", MODELS)
def test_all_matmuls_but_the_heads_add_in_float16(model, chunk):
    """
    Count three matmuls for each of a block's four weights: the forward pass, and the gradients of
    input and weight.
    """
    sizes = SMALL | dict(model=model, loss_chunk=chunk)
    way = dict(key=(torch.float16, True), without=(torch.float16, False))
    found = gradient_errors(sizes, 128, way)
    (*_, counted), (*_, without) = found["key"], found["without"]
    heads = 3 * (128 // chunk if chunk else 1)
    assert (counted.float16, counted.bfloat16) == (12, heads)
    assert (without.float16, without.bfloat16) == (12 + heads, 0)


@pytest.mark.parametrize("model", MODELS)
def test_the_check_of_compiled_code_allows_errors_as_large_as_bfloat16s(model, monkeypatch):
    """
    Accept attention scaled by 0.97, whose gradients are off by 1% to 3%. Refuse a scale of 0.7.
    """
    config = config_from_dict(SMALL | dict(model=model, bias=True, fp16_accumulation=True))
    gpt = build_model(replace(config, block_size=64))
    attend = torch.nn.functional.scaled_dot_product_attention
    factor = 0.97

    def scaled(q, k, v, scale, **keys):
        return attend(q, k, v, scale=scale * (factor if q.dtype == torch.float16 else 1), **keys)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled)
    compare_with_eager(gpt, 2, 512, HW)
    factor = 0.7
    with pytest.raises(WrongKernels):
        compare_with_eager(gpt, 2, 512, HW)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_other_dtypes_refuse_the_key(dtype):
    """Refuse dtype=auto too: it never means float16 on a GPU that accepts the key."""
    with pytest.raises(UserError, match="fp16_accumulation: only dtype=float16 reads it"):
        load_config([f"--dtype={dtype}", "--fp16_accumulation=True"])


@pytest.mark.parametrize("recipe", [{}, FAST], ids=["gpt2", "fast"])
def test_a_run_trains_resumes_and_leaves_float16_once_the_two_flags_are_dropped(
    recipe, data, tmp_path
):
    """
    Follow float32's losses within 0.02, resume bit for bit, and then continue in the dtype that
    this machine trains in by default.
    """
    keys = recipe | dict(compile=False, lr_decay_iters=8, init_from="auto", dtype="auto")
    train_short(data, tmp_path / "wide", **keys | dict(dtype="float32"))
    with Float16Accumulators() as counted:
        train_short(data, tmp_path / "whole", **keys | KEYS)
        # go back to the checkpoint of iteration 4, as a kill would
        shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
        (tmp_path / "resumed" / "ckpt-00000008.pt").unlink()
        train_short(data, tmp_path / "resumed", **keys | KEYS)
    assert counted.float16 and counted.bfloat16 and SWITCH.allow_fp16_accumulation
    whole, resumed = (column(tmp_path / name, "step", "loss") for name in ("whole", "resumed"))
    assert resumed == whole and len(whole) == 8
    assert whole == pytest.approx(column(tmp_path / "wide", "step", "loss"), abs=0.02)
    train_short(data, tmp_path / "resumed", **keys, max_iters=9)
    assert not SWITCH.allow_fp16_accumulation
    default = str(hardware.best_dtype(torch.device("cpu"))).removeprefix("torch.")
    assert column(tmp_path / "resumed", "start", "dtype") == ["float16", "float16", default]


@pytest.mark.gpu
def test_gpu_adds_in_float16_where_the_key_asks_for_it():
    """
    Add 4032 times 1/256 to 2048 in mm, addmm with a bias, linear, bmm and baddbmm: about 2064 with
    float32 accumulators, and 2048 if each sum is rounded to float16.
    """
    n = 4096  # large enough for tensor cores
    a = torch.full((n, n), 1 / 256, dtype=torch.float16, device="cuda")
    a[:, :64] = 0
    a[:, 0] = 2048
    b = torch.ones(n, n, dtype=torch.float16, device="cuda")
    bias = torch.zeros(n, dtype=torch.float16, device="cuda")
    exact = 2048 + (n - 64) / 256
    for key in (True, False):
        hardware.set_up(load_config(["--dtype=float16", f"--fp16_accumulation={key}"]))
        for found in (
            a @ b,
            torch.addmm(bias, a, b),
            torch.nn.functional.linear(a, b, bias),
            torch.bmm(a[None], b[None])[0],
            torch.baddbmm(torch.zeros_like(a)[None], a[None], b[None])[0],
        ):
            # a kernel may sum parts of a row separately, and so lose only a part of the sum
            assert (found[0, 0].item() < exact - 2) == key
