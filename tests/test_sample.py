"""
sample.py and GPT.generate: the text is what the model says, whole, and never from the padding.
"""

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import load_newest, run_here, run_process
from weights import as_transformers, assert_refused

import convert
import sample
import train
from common.console import UserError, printable
from configurator import read_config
from data.tokenizer import Tokenizer
from data.writer import write_shard
from model import GPT, GPTConfig, generate, sample_next
from model_fast import config_from_dict, config_to_dict
from training import checkpoint, hardware
from training.pretrained import read_weights

GREEDY = 0.0  # temperature
TEXT = (Path(__file__).parent / "conftest.py").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of seconds on this folder's own source, byte by byte."""
    folder = tmp_path_factory.mktemp("sample")
    for split in ("train", "val"):
        write_shard(folder / f"{split}_000000.bin", np.frombuffer(TEXT, dtype=np.uint8))
    (folder / "manifest.json").write_text(json.dumps(dict(tokenizer="byte", vocab=256, eot=0)))
    sizes = dict(max_iters=20, eval_interval=20, log_interval=20, batch_size=16)
    assert run_here(folder, folder / "run", **sizes) == 0
    return folder / "run"


def small_model(**changes) -> GPT:
    torch.manual_seed(0)
    sizes = dict(block_size=24, vocab_size=128, n_layer=3, n_head=2, n_embd=32)
    model = GPT(GPTConfig(**sizes | changes)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # far from uniform, so that argmax is clear
    return model


# -----------------------------------------------------------------------------
# GPT.generate


def test_greedy_with_the_cache_is_transformers_generate_token_for_token():
    model = small_model()
    reference = as_transformers(model)
    idx = torch.randint(128, (3, 5))
    expected = reference.generate(
        idx,
        attention_mask=torch.ones_like(idx),
        max_new_tokens=19,
        do_sample=False,
        use_cache=False,
    )
    assert torch.equal(generate(model, idx, 19, 128, GREEDY), expected)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("prompt", [1, 5, 23, 24, 31])
def test_past_the_context_each_token_follows_from_the_last_window(flash, prompt):
    model = small_model(flash=flash)
    idx = torch.randint(128, (2, prompt))
    expected = idx
    with torch.no_grad():
        for _ in range(40):
            logits = model(expected[:, -24:])[:, -1, :100]
            expected = torch.cat((expected, logits.argmax(dim=-1, keepdim=True)), dim=1)
    assert torch.equal(generate(model, idx, 40, 100, GREEDY), expected)


def test_padded_ids_are_never_drawn_not_even_when_the_model_wants_them():
    model = small_model(tie_weights=False, bias=True)
    # the padding is by far the likeliest
    model.lm_head.weight.data[100:] = 50 * model.transformer.ln_f.bias.data.normal_()
    assert model(torch.zeros(1, 4, dtype=torch.int64))[0, -1].argmax() >= 100
    for temperature in (0.0, 1.0, 5.0):
        ids = generate(model, torch.zeros(4, 1, dtype=torch.int64), 30, 100, temperature)
        assert ids.max() < 100


@pytest.mark.parametrize(
    "top_k, top_p, temperature",
    [(3, 1, 1), (0, 0.7, 1), (5, 0.6, 2), (1, 1, 1), (0, 1e-9, 1), (0, 1e-46, 1)],
)
def test_top_k_and_top_p_keep_what_transformers_keeps(top_k, top_p, temperature):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    scores = TemperatureLogitsWarper(float(temperature))(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    expected = TopPLogitsWarper(top_p)(None, scores).softmax(dim=-1)[0]
    generator = torch.Generator().manual_seed(2)
    logits = logits.expand(20_000, -1)
    drawn = sample_next(logits, temperature, top_k, top_p, generator).flatten()
    found = torch.bincount(drawn, minlength=12) / 20_000
    assert torch.equal(found > 0, expected > 0)
    # five standard deviations of a share of 20,000 draws
    assert (found - expected).abs().max() < 0.02


# -----------------------------------------------------------------------------
# sample.py


def test_samples_of_a_real_run_repeat_with_their_seed(run, script):
    arguments = [
        f"--out_dir={run}",
        "--num_samples=3",
        "--max_new_tokens=40",
        "--start=import ",
        "--device=cpu",
    ]
    code, out, err = script(sample.main, *arguments)
    val_loss = load_newest(run)["progress"]["best_val_loss"]
    assert code == 0
    assert err == [f"model: {run / 'best.pt'}, iteration 20, val loss {val_loss:.4f}"]
    samples = out.split(f"\n{sample.RULER}\n")
    assert len(samples) == 4 and samples.pop() == ""
    assert all(text.startswith("import ") and len(text) > 20 for text in samples)
    assert len(set(samples)) == 3
    assert script(sample.main, *arguments)[1] == out
    assert script(sample.main, *arguments, "--seed=1")[1] != out


def test_the_loss_is_that_of_the_checkpoint_the_best_or_not(run, tmp_path, monkeypatch):
    losses = iter([[4.0, 4.0], [3.0, 3.25], [3.0, 3.5]])
    monkeypatch.setattr(train, "estimate_loss", lambda *_: (next(losses), None))
    run_here(run.parent, tmp_path, max_iters=4, eval_interval=2, checkpoint_interval=3)
    best, newest = tmp_path / "best.pt", tmp_path / "ckpt-00000004.pt"
    assert read_weights(str(best))["source"] == f"{best}, iteration 2, val loss 3.2500"
    for name in (tmp_path, newest):
        assert read_weights(str(name))["source"] == f"{newest}, iteration 4, val loss 3.5000"
    newest.unlink()  # no evaluation at 3
    assert read_weights(str(tmp_path))["source"] == f"{tmp_path / 'ckpt-00000003.pt'}, iteration 3"


def test_greedy_samples_are_those_of_an_uncached_model(run, script):
    code, out, _ = script(
        sample.main,
        f"--out_dir={run}",
        "--num_samples=2",
        "--max_new_tokens=30",
        "--temperature=0",
        "--start=def test",
        "--device=cpu",
        "--dtype=float32",
    )
    state = load_newest(run)
    model = GPT(config_from_dict(state["model_config"])).eval()
    model.load_state_dict(state["model"])
    reference, idx = as_transformers(model), torch.tensor([list(b"def test")])
    with torch.no_grad():
        for _ in range(30):
            logits = reference(idx[:, -16:]).logits[:, -1:, :256]
            idx = torch.cat((idx, logits.argmax(dim=-1)), dim=1)
    expected = printable(bytes(idx[0].tolist()).decode(errors="replace"))
    assert code == 0 and out == f"{expected}\n{sample.RULER}\n{expected}\n{sample.RULER}\n"


def always_draws(token: int, path: Path) -> Path:
    """A checkpoint of a byte model after which this token follows, whatever came before."""
    config = GPTConfig(
        block_size=16, vocab_size=256, n_layer=1, n_head=1, n_embd=8, tie_weights=False
    )
    model = GPT(config)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.transformer.ln_f.bias.data[0] = 1.0
    model.lm_head.weight.data[token, 0] = 100.0
    state = dict(
        model=model.state_dict(),
        model_config=config_to_dict(config),
        vocab=256,
        tokenizer=dict(kind="byte"),
    )
    checkpoint.save(state, path)
    return path


def test_a_sample_stops_at_the_end_of_text(tmp_path, script):
    path = always_draws(0, tmp_path / "x.pt")
    code, out, err = script(
        sample.main, f"--init_from={path}", "--start=The end", "--num_samples=2", "--device=cpu"
    )
    assert code == 0 and out == f"The end\n{sample.RULER}\nThe end\n{sample.RULER}\n"
    assert err == [f"model: {path}"]


def test_control_characters_reach_no_terminal_not_even_through_a_pipe(tmp_path, script):
    """An ESC could recolour, retitle or reprogram the terminal that shows a sample."""
    path = always_draws(27, tmp_path / "x.pt")
    code, out, _ = script(
        sample.main,
        f"--init_from={path}",
        "--start=a\tb\r",
        "--num_samples=2",
        "--max_new_tokens=2",
        "--device=cpu",
    )
    text = r"a	b\x0d\x1b\x1b"
    assert code == 0 and out == f"{text}\n{sample.RULER}\n{text}\n{sample.RULER}\n"


def test_nanogpts_habits_work(run, tmp_path, script, monkeypatch):
    """Its sample.py takes config files, also those of a training run, and has these keys."""
    defaults = dict(
        init_from="resume",
        out_dir="out",
        start="\n",
        num_samples=10,
        max_new_tokens=500,
        temperature=0.8,
        top_k=200,
        seed=1337,
        device="cuda",
        dtype="bfloat16",
        compile=False,
    )
    file = tmp_path / "all.py"
    file.write_text("\n".join(f"{name} = {value!r}" for name, value in defaults.items()))
    for argv in ([str(file)], [f"--{name}={value}" for name, value in defaults.items()]):
        config = read_config(argv, sample.SampleConfig)
        assert {name: getattr(config, name) for name in defaults} == defaults
    assert sample.SampleConfig().top_k == 200 and sample.SampleConfig().temperature == 0.8

    training = tmp_path / "training.py"
    training.write_text(
        f"out_dir = {str(run)!r}\ninit_from = 'auto'\nbatch_size = 4\ndtype = 'float32'\n"
        "lr_decay_iters = max_iters\ntokens_per_iter = 524288\n"
    )
    short = ("--start=~/x", "--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    code, out, _ = script(sample.main, training, *short)
    assert code == 0 and out.startswith("~/x")
    training.write_text("temprature = 1")
    assert_refused(script, sample.main, training, *short, words=("did you mean temperature?",))
    assert_refused(script, sample.main, "--batch_size=4", words=("batch_size: unknown key",))


SHORT = ("--num_samples=1", "--max_new_tokens=1", "--device=cpu")


def test_of_a_run_the_best_model_is_taken_and_else_the_newest(run, tmp_path, script, monkeypatch):
    """Also where it has been trained on since; best.pt does not hold what it was before."""
    losses = iter([[4.0, 4.0], [3.0, 3.25], [3.0, 3.5]])
    monkeypatch.setattr(train, "estimate_loss", lambda *_: (next(losses), None))
    run_here(run.parent, tmp_path, max_iters=4, eval_interval=2, always_save_checkpoint=True)
    best, newest = tmp_path / "best.pt", tmp_path / "ckpt-00000004.pt"
    _, _, err = script(sample.main, f"--out_dir={tmp_path}", *SHORT)
    assert err == [f"model: {best}, iteration 2, val loss 3.2500"]
    best.unlink()
    _, _, err = script(sample.main, f"--out_dir={tmp_path}", *SHORT)
    assert err == [f"model: {newest}, iteration 4, val loss 3.5000"]


NO_ROOM = """
import runpy, sys, torch, model
def no_room(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
model.generate_tokens = no_room
runpy.run_path("sample.py", run_name="__main__")
"""


def test_samples_that_do_not_fit_into_memory_are_one_line(run):
    code, _, err = run_process("-c", NO_ROOM, f"--out_dir={run}", *SHORT)
    assert (code, err.splitlines()[1:]) == (1, ["error: out of memory; fewer --num_samples"]), err


def test_a_run_is_read_from_its_checkpoints_even_with_an_export_inside(run, tmp_path, script):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    assert script(convert.main, "ckpt-to-hf", run, tmp_path / "hf")[0] == 0
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "hf" / name, folder)
    code, _, err = script(sample.main, f"--out_dir={folder}", *SHORT)
    assert code == 0 and err[0].startswith(f"model: {folder / 'best.pt'}, iteration 20")
    (folder / "best.pt").unlink()
    code, _, err = script(sample.main, f"--out_dir={folder}", *SHORT)
    assert code == 0 and err[0].startswith(f"model: {folder / 'ckpt-00000020.pt'}, iteration 20")


def test_text_appears_while_it_grows_and_never_half_a_character(capsys):
    seen = []

    def new_ids():
        for token in "aé✓b".encode():  # one, two, three and one bytes
            yield torch.tensor([[token]])
            seen.append(capsys.readouterr().out)

    text, samples = Tokenizer(dict(kind="byte")), [list(b"> ")]
    sample.print_growing(text, samples, new_ids())
    assert seen == ["> a", "", "é", "", "", "✓", "b"]
    assert capsys.readouterr().out == "\n"
    assert text.decode(samples[0]) == "> aé✓b"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_prompt_from_a_file_is_read_as_windows_writes_it(encoding, tmp_path):
    (tmp_path / "prompt.txt").write_text("na\u00efve\n", encoding, newline="\r\n")
    assert sample.read_prompt(f"FILE:{tmp_path / 'prompt.txt'}") == "na\u00efve\n"
    (tmp_path / "other.txt").write_bytes(b"na\xefve")  # in an older encoding
    assert sample.read_prompt(f"FILE:{tmp_path / 'other.txt'}") == "na\ufffdve"


def test_a_prompt_from_a_file_longer_than_the_context_is_handled_and_said(run, tmp_path, script):
    (tmp_path / "prompt.txt").write_text("import os\n" * 10)
    code, out, err = script(
        sample.main,
        f"--out_dir={run}",
        f"--start=FILE:{tmp_path / 'prompt.txt'}",
        "--num_samples=1",
        "--max_new_tokens=5",
        "--device=cpu",
    )
    assert code == 0 and out.startswith("import os\n" * 10)
    assert err[1:] == ["start: 100 tokens, but the model sees only the last 16"]


def test_end_of_text_in_a_prompt_is_one_token():
    text = Tokenizer(dict(kind="byte"))
    assert sample.encode("a<|endoftext|>b", text) == [97, 0, 98]
    assert sample.encode("<|endoftext|>", text) == sample.encode("", text) == [0]


def test_a_character_model_leaves_out_what_it_does_not_know(capsys):
    text = Tokenizer(dict(kind="char", itos=list("\n abc")))
    assert sample.encode("a cab?", text) == [2, 1, 4, 2, 3]
    assert "'?'" in capsys.readouterr().err


def test_gpt2_weights_and_bpe_from_a_hugging_face_folder(tmp_path, script):
    tokens = bpe_or_skip().encode_ordinary("Hello world")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=8, n_layer=1, n_head=1)).eval()
    reference.transformer.wte.weight.data.mul_(50)
    reference.save_pretrained(tmp_path / "hf")
    idx = torch.tensor([tokens])
    expected = reference.generate(
        idx, attention_mask=torch.ones_like(idx), max_new_tokens=6, do_sample=False
    )[0].tolist()
    code, out, _ = script(
        sample.main,
        f"--init_from={tmp_path / 'hf'}",
        "--start=Hello world",
        "--temperature=0",
        "--num_samples=1",
        "--max_new_tokens=6",
        "--device=cpu",
        "--dtype=float32",
    )
    assert code == 0 and out == f"{bpe_or_skip().decode(expected)}\n{sample.RULER}\n"


def bpe_or_skip():
    from data.tokenizer import gpt2_bpe

    try:
        return gpt2_bpe()
    except UserError as error:
        pytest.skip(str(error))


class Terminal(io.StringIO):
    """What is typed on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch):
    """typed(text): both ends are a terminal, on which the text is typed."""

    def type_there(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(text))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return type_there


def answers(out: str) -> list[str]:
    *samples, rest = out.split(f"\n{sample.RULER}\n")
    assert rest.strip(" >\n") == ""
    return samples


def test_a_mac_samples_with_plain_attention(run, monkeypatch):
    """pytorch #195910. The checkpoint's own choice is the fused kernel."""
    monkeypatch.setattr(hardware, "choose_device", lambda *_: torch.device("mps"))
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, *_: model)  # there is no Mac here
    state = read_weights(run, best=True)
    state["model_config"]["flash"] = True
    model = sample.load_model(state, sample.SampleConfig())
    assert not any(block.attn.flash for block in model.transformer.h)


@pytest.mark.parametrize("end", ["", "\nimport this is not read"])
def test_on_a_terminal_prompts_are_read_until_an_empty_line_or_the_end(
    end, run, script, monkeypatch, typed
):
    loads = []
    load_model = sample.load_model
    monkeypatch.setattr(sample, "load_model", lambda *a: loads.append(1) or load_model(*a))
    typed(f"import \ndef test\nimport \n{end}")
    flags = ("--max_new_tokens=20", "--device=cpu")
    code, out, _ = script(sample.main, f"--out_dir={run}", *flags)
    assert (code, len(loads)) == (0, 1)
    samples = answers(out)
    assert [text[:9] for text in samples] == ["> import ", "> def tes", "> import "]
    assert samples[0] != samples[2]  # asked again, it says something else


def test_on_a_terminal_a_start_is_the_only_prompt(run, script, typed):
    typed("import \n")
    code, out, _ = script(sample.main, f"--out_dir={run}", "--start=def", *SHORT)
    assert code == 0 and [text[:3] for text in answers(out)] == ["def"]


@pytest.mark.parametrize("terminal", ["stdin", "stdout"])
def test_where_one_end_is_no_terminal_the_default_prompt_is_sampled(
    terminal, run, script, monkeypatch
):
    """As under cron or with > samples.txt. Nothing is read: an idle pipe would never end."""
    stdin = Terminal("import \n") if terminal == "stdin" else io.StringIO("import \n")
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal == "stdout")
    flags = ("--num_samples=2", "--max_new_tokens=5", "--device=cpu")
    code, out, _ = script(sample.main, f"--out_dir={run}", *flags)
    assert code == 0 and [text[0] for text in answers(out)] == ["\n", "\n"]
    assert stdin.read() == "import \n"


def test_ctrl_c_ends_a_sample_and_the_next_prompt_is_answered(run, script, monkeypatch, typed):
    asked = []

    def print_growing(*_):
        asked.append(1)
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(sample, "print_growing", print_growing)
    typed("a\nb\n")
    assert script(sample.main, f"--out_dir={run}", *SHORT)[0] == 0 and len(asked) == 2
    asked.clear()
    assert script(sample.main, f"--out_dir={run}", "--start=a", *SHORT)[0] == 130


def test_bad_input_is_one_line_each_and_exit_2(run, tmp_path, script):
    unknown = tmp_path / "unknown.pt"
    checkpoint.save(load_newest(run) | dict(tokenizer=dict(kind="unknown")), unknown)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(next(run.glob("ckpt-*.pt")).read_bytes()[:-1000])
    for arguments, *words in (
        (["--start=FILE:nowhere.txt"], "nowhere.txt"),
        (["--init_from=nowhere"], "nowhere"),
        ([f"--init_from={unknown}"], "tokenizer"),
        ([f"--init_from={cut}"], "cut.pt"),
        (["--out_dir=nowhere"], "nowhere"),
        ([f"--out_dir={tmp_path / 'none'}"], "none"),
        (["--device=tpu"], "tpu"),
    ):
        common = (f"--out_dir={run}", "--device=cpu")
        assert_refused(script, sample.main, *common, *arguments, words=tuple(words))
    code, _, err = script(
        sample.main,
        f"--out_dir={run}",
        "--temperature=-1",
        "--num_samples=0",
        "--max_new_tokens=0",
        "--top_k=-1",
        "--compile=perhaps",
    )
    assert code == 2 and len(err) == 5
    for argument in ("--temprature=1", "--seed=x", "--dtype=int8"):
        assert_refused(script, sample.main, argument)


def test_a_missing_vocabulary_is_one_line(run, tmp_path, script, monkeypatch):
    def offline(name):
        raise ConnectionError

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    state = load_newest(run) | dict(tokenizer=dict(kind="gpt2"))
    checkpoint.save(state, tmp_path / "x.pt")
    words = ("go online once, or set TIKTOKEN_CACHE_DIR",)
    assert_refused(
        script, sample.main, f"--init_from={tmp_path / 'x.pt'}", "--device=cpu", words=words
    )
