"""Sample and export whole runs."""

import contextlib
import io
import shutil

from char_dataset import LETTERS, SHORT_RUN, T, sample, write_parrot
from doc_pages import code_blocks
from program import (
    ROOT,
    checkpoint,
    run,
    train,
)


def test_padding_ids_are_never_sampled_even_if_the_model_predicts_them(gpt2, tmp_path):
    weights = checkpoint(gpt2, 8)["model"]["lm_head.weight"]
    assert len(weights) == 128 > len(LETTERS)
    parrot = write_parrot(gpt2, tmp_path / "parrot.pt", token=100)
    for temperature in (0, 1, 5):
        arguments = ("--start=a", "--max_new_tokens=40", "--num_samples=3")
        for text in sample(f"--init_from={parrot}", f"--temperature={temperature}", *arguments):
            assert len(text) == 41
            assert set(text) <= set(LETTERS)


def test_a_seed_always_gives_the_same_samples_and_another_seed_gives_others(gpt2):
    arguments = (f"--out_dir={gpt2}", "--start=abc", "--max_new_tokens=30", "--num_samples=3")
    texts = sample(*arguments)
    assert [text[:3] for text in texts] == ["abc"] * 3
    assert len(set(texts)) == 3
    assert sample(*arguments) == texts
    assert sample(*arguments, "--seed=1") != texts


def test_sample_py_uses_a_runs_best_model_or_else_its_newest(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "run")
    (tmp_path / "run" / "best.pt").unlink()  # a link to ckpt-00000008.pt, perhaps
    arguments = ("--start=a", "--max_new_tokens=5", "--num_samples=1", "--temperature=0")
    newest = sample(f"--out_dir={tmp_path / 'run'}", *arguments)
    write_parrot(gpt2, tmp_path / "run" / "best.pt", token=LETTERS.index("x"))
    assert newest != ["axxxxx"]
    assert sample(f"--out_dir={tmp_path / 'run'}", *arguments) == ["axxxxx"]
    file = tmp_path / "run" / "ckpt-00000008.pt"
    assert sample(f"--init_from={file}", *arguments) == newest


def test_convert_py_exports_a_runs_best_model(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "run")
    (tmp_path / "run" / "best.pt").unlink()
    write_parrot(gpt2, tmp_path / "run" / "best.pt", token=LETTERS.index("x"))
    result = run("convert.py", "ckpt-to-hf", tmp_path / "run", tmp_path / "hf")
    assert result.code == 0, result.err
    arguments = ("--start=a", "--max_new_tokens=5", "--num_samples=1", "--temperature=0")
    assert sample(f"--init_from={tmp_path / 'hf'}", *arguments) == ["axxxxx"]


def test_temperature_0_top_k_1_and_a_tiny_top_p_all_pick_the_likeliest_token(gpt2):
    arguments = (f"--out_dir={gpt2}", "--start=abc", "--max_new_tokens=20", "--num_samples=2")
    texts = sample(*arguments, "--temperature=0")
    assert texts[0] == texts[1]
    for flag in ("--top_k=1", "--top_p=1e-9"):
        assert sample(*arguments, "--temperature=2", flag) == texts
    assert sample(*arguments, "--temperature=2") != texts


def test_typed_prompts_are_answered_once_each_until_an_empty_line(gpt2):
    arguments = (f"--out_dir={gpt2}", "--max_new_tokens=20")
    texts = sample(*arguments, typed="abc\nxyz\nabc\n\nnot read\n")
    assert [text[:5] for text in texts] == ["> abc", "> xyz", "> abc"]
    assert texts[0] != texts[2]  # asked again, the model says something else
    assert len(sample(*arguments, typed="abc\n")) == 1  # the input may also just end
    # a --start is the only prompt
    (text, *_) = sample(*arguments, "--start=abc", typed="xyz\n")
    assert text.startswith("abc")


def test_without_a_terminal_sample_py_prints_ten_samples_and_reads_no_input(gpt2):
    # reading from pytest's stdin raises an error
    assert len(sample(f"--out_dir={gpt2}", "--max_new_tokens=2")) == 10


def test_a_prompt_may_come_from_a_file_and_be_longer_than_the_context(gpt2, tmp_path):
    (tmp_path / "prompt.txt").write_text(LETTERS[1:])
    arguments = ("--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    start_flag = f"--start=FILE:{tmp_path / 'prompt.txt'}"
    result = run("sample.py", f"--out_dir={gpt2}", start_flag, *arguments)
    assert result.out.startswith(LETTERS[1:])
    assert f"last {T}" in result.err


def test_unknown_characters_in_a_prompt_are_left_out_with_a_warning(gpt2):
    arguments = ("--num_samples=1", "--max_new_tokens=3", "--device=cpu")
    result = run("sample.py", f"--out_dir={gpt2}", "--start=a!b", *arguments)
    assert result.out.startswith("ab")
    assert "'!'" in result.err


def test_a_sample_ends_at_the_end_of_text_token(corpus, tmp_path):
    train(**SHORT_RUN, dataset=corpus, out_dir=tmp_path / "run", bias=True, tie_weights=False)
    for token, text in ((0, "The end"), (ord("."), "The end.....")):
        parrot = write_parrot(tmp_path / "run", tmp_path / f"{token}.pt", token)
        flags = ("--start=The end", "--max_new_tokens=5", "--num_samples=2", "--temperature=0")
        assert sample(f"--init_from={parrot}", *flags) == [text] * 2


def test_a_typed_prompt_is_answered_with_num_samples_samples(gpt2):
    assert (
        len(sample(f"--out_dir={gpt2}", "--max_new_tokens=5", "--num_samples=3", typed="a\n")) == 3
    )


def test_the_program_on_the_sampling_page_prints_a_sample_of_a_run(gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/x").mkdir(parents=True)
    write_parrot(gpt2, tmp_path / "out/x/best.pt", token=LETTERS.index("x"))
    blocks = code_blocks(ROOT / "docs/sampling.md", "python")
    (program,) = [block for block in blocks if "out/x" in block]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    assert printed.getvalue() == "The" + 100 * "x" + "\n"  # the model knows no space
