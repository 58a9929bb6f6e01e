"""The table of optimizers: what it says of each is so; one more entry is one more optimizer."""

import contextlib

import pytest
import torch
from helpers import assert_same_state, flags, load, run_here
from torch.utils._pytree import tree_leaves
from training.build import OPTIMIZERS, adamw_groups, build_model, build_optimizer
from training.memory import memory_bytes, optimizer_bytes

import train
from common.console import UserError
from configurator import Config
from model import GPTConfig
from training import build


def test_an_optimizer_that_is_not_in_the_table_is_refused():
    assert not any(build.check_optimizer(Config(optimizer=name)) for name in OPTIMIZERS)
    (problem,) = build.check_optimizer(Config(optimizer="moun"))
    names = ", ".join(OPTIMIZERS)
    assert problem == f"optimizer: 'moun' is none of {names}; did you mean muon?"


@pytest.mark.parametrize("model", ["gpt2", "fast"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_keeps_as_many_numbers_as_memory_counts(optimizer, model):
    sizes = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, bias=True)
    gpt_config = GPTConfig(model=model, tie_weights=model == "gpt2", **sizes)
    net, config = build_model(gpt_config), Config(model=model, optimizer=optimizer)
    made = build_optimizer(net, config, torch.float32)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    made.step()
    kept = 0
    for state in made.state.values():
        kept += sum(x.numel() for x in state.values() if x.dim())
    assert memory_bytes(config, gpt_config, "float32", 1)["optimizer"] == 4 * kept


# -----------------------------------------------------------------------------
# One more


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv:2302.06675. As people write one: not fused, and it counts in an int."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, (beta1, beta2) = self.state[p], group["betas"]
                if p.grad is None:
                    continue
                state.setdefault("exp_avg", torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["exp_avg"].lerp(p.grad, 1 - beta1).sign())
                state["exp_avg"].lerp_(p.grad, 1 - beta2)


def make_lion(groups, **_):
    return Lion(groups)


LION = (adamw_groups, make_lion)
OPTIONS = dict(optimizer="lion", learning_rate=1e-3)


@pytest.fixture
def lion(monkeypatch):
    """An entry in the table."""
    monkeypatch.setitem(OPTIMIZERS, "lion", LION)
    optimizer_bytes.cache_clear()


def test_a_new_optimizer_trains_and_resumes_bit_for_bit(lion, dataset, tmp_path):
    assert run_here(dataset, tmp_path / "straight", **OPTIONS, dropout=0.1) == 0
    halves = dict(OPTIONS, dropout=0.1, lr_decay_iters=8)
    assert run_here(dataset, tmp_path / "halves", **halves, max_iters=4) == 0
    more = flags(dataset, tmp_path / "halves", **halves, init_from="resume")
    assert train.main(more) == 0
    straight = load(tmp_path / "straight", 8)
    kept = straight["optimizer"]["state"][0]
    assert kept.keys() == {"exp_avg", "step"} and kept.pop("step") == 8
    for other in range(1, len(straight["optimizer"]["state"])):
        del straight["optimizer"]["state"][other]["step"]  # no tensor
    assert_same_state(straight, load(tmp_path / "halves", 8))


def test_an_optimizers_own_counters_in_its_groups_are_resumed(dataset, tmp_path, monkeypatch):
    class Counting(Lion):
        """Each third update is twice as long."""

        def __init__(self, groups):
            torch.optim.Optimizer.__init__(self, groups, dict(count=0))

        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] += 1
                group["lr"] *= 1 + (group["count"] % 3 == 0)
            super().step()

    monkeypatch.setitem(OPTIMIZERS, "lion", (adamw_groups, lambda groups, **_: Counting(groups)))
    options = dict(OPTIONS, lr_decay_iters=8)
    assert run_here(dataset, tmp_path / "straight", **options) == 0
    assert run_here(dataset, tmp_path / "halves", **options, max_iters=4) == 0
    assert run_here(dataset, tmp_path / "halves", **options, init_from="resume") == 0
    for name, weights in load(tmp_path / "straight", 8)["model"].items():
        assert torch.equal(load(tmp_path / "halves", 8)["model"][name], weights)


def test_an_optimizers_state_is_resumed_in_the_types_that_it_keeps(dataset, tmp_path, monkeypatch):
    """torch casts it to the parameter's type. Also what lies in lists, as Shampoo's factors do."""

    class Half(Lion):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state.setdefault("exp_avg", torch.zeros_like(p, dtype=torch.bfloat16))
                    state.setdefault("sums", [torch.zeros_like(p, dtype=torch.float64)])
                    state.setdefault("seen", torch.tensor(2**24 + 1))
                    state["exp_avg"].lerp_(p.grad.bfloat16(), 0.1)
                    state["sums"][0] += 0.1 * p.grad
                    state["seen"] += 1
                    p.sub_(group["lr"] * (state["exp_avg"] + state["sums"][0]).sign())

    monkeypatch.setitem(OPTIMIZERS, "lion", (adamw_groups, lambda groups, **_: Half(groups)))
    options = dict(OPTIONS, lr_decay_iters=8)
    assert run_here(dataset, tmp_path / "straight", **options) == 0
    assert run_here(dataset, tmp_path / "halves", **options, max_iters=4) == 0
    assert run_here(dataset, tmp_path / "halves", **options, init_from="resume") == 0
    straight, halves = (load(tmp_path / run, 8) for run in ("straight", "halves"))
    for number, kept in straight["optimizer"]["state"].items():
        resumed = halves["optimizer"]["state"][number]
        for one, other in zip(tree_leaves(kept), tree_leaves(resumed), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
        assert kept["seen"] == 2**24 + 9


def test_a_constant_of_the_code_is_not_the_checkpoints(dataset, tmp_path, monkeypatch):
    """Muon's class gives AdamW an eps, which no group of the table sets."""
    options = dict(optimizer="muon", lr_decay_iters=8)
    assert run_here(dataset, tmp_path, **options, max_iters=4) == 0
    monkeypatch.setattr("training.muon.ADAM_EPS", 1e-6)
    assert run_here(dataset, tmp_path, **options, init_from="resume") == 0
    assert {group["eps"] for group in load(tmp_path, 4)["optimizer"]["param_groups"]} == {1e-10}
    assert {group["eps"] for group in load(tmp_path, 8)["optimizer"]["param_groups"]} == {1e-6}


def test_what_a_resume_would_refuse_is_refused_when_it_is_first_saved(
    lion, dataset, tmp_path, monkeypatch
):
    """A moment of another shape: a fused update would write past its end."""

    class Wrong(Lion):
        def step(self, closure=None):
            super().step()
            for p, state in self.state.items():
                state["other"] = p.new_zeros(*[1] * p.dim())

    monkeypatch.setitem(build.OPTIMIZERS, "lion", (adamw_groups, lambda groups, **_: Wrong(groups)))
    with pytest.raises(UserError, match=r"cannot be resumed .*other of its lion is \[1, 1\]"):
        run_here(dataset, tmp_path, **OPTIONS)
    assert len(list(tmp_path.glob("ckpt-*"))) == 1


def test_a_parameter_that_no_update_has_reached_may_be_resumed(
    lion, dataset, tmp_path, monkeypatch
):
    """Lion leaves an empty state behind for one without a gradient."""

    def frozen(*arguments):
        made = build_optimizer(*arguments)
        made.param_groups[0]["params"][0].requires_grad_(False)
        return made

    monkeypatch.setattr(train, "build_optimizer", frozen)
    assert run_here(dataset, tmp_path, **OPTIONS, max_iters=4, lr_decay_iters=8) == 0
    assert load(tmp_path, 4)["optimizer"]["state"][0] == {}
    assert run_here(dataset, tmp_path, **OPTIONS, init_from="resume") == 0


def test_what_an_optimizer_keeps_in_lists_is_counted(lion, monkeypatch):
    class Factors(Lion):
        def step(self, closure=None):
            super().step()
            for p, state in self.state.items():
                state["factors"] = [torch.zeros_like(p), torch.zeros_like(p)]

    sizes = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=24)
    arguments = Config(optimizer="lion"), GPTConfig(**sizes), "float32", 1
    one = memory_bytes(*arguments)["optimizer"]
    monkeypatch.setitem(OPTIMIZERS, "lion", (adamw_groups, lambda groups, **_: Factors(groups)))
    optimizer_bytes.cache_clear()
    assert memory_bytes(*arguments)["optimizer"] == 3 * one


@pytest.mark.parametrize("error", [AssertionError("on meta"), NotImplementedError("no kernel")])
def test_an_optimizer_that_needs_values_is_counted_as_adam(lion, monkeypatch, capsys, error):
    class Looks(Lion):
        def step(self, closure=None):
            raise error

    monkeypatch.setitem(OPTIMIZERS, "lion", (adamw_groups, lambda groups, **_: Looks(groups)))
    sizes = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=24)
    parts = memory_bytes(Config(optimizer="lion"), GPTConfig(**sizes), "float32", 1)
    assert parts["optimizer"] == 2 * parts["gradients"]
    assert "the memory of optimizer=lion is taken for Adam's: " in capsys.readouterr().err


@pytest.mark.parametrize("loss_chunk, own", [(0, 0), (4096, 256)])
def test_the_compared_loss_takes_a_sequence_at_a_time(loss_chunk, own):
    """Also where all logits exist at once: the whole batch may not fit without the compiler."""
    sizes = dict(block_size=8, vocab_size=16, n_layer=1, n_head=1, n_embd=8)
    model, seen = build_model(GPTConfig(**sizes, loss_chunk=loss_chunk)), []
    x, y = torch.randint(16, (2, 3, 8))
    loss = model(x, y).item()
    model.register_forward_pre_hook(lambda *_: seen.append("a call, not forward()"))
    forward = model.forward
    model.forward = lambda x, y: seen.append((len(x), model.config.loss_chunk)) or forward(x, y)
    build.check_loss(loss, model, (x, y), True, contextlib.nullcontext())
    assert seen == [(1, own)] * 3 and model.config.loss_chunk == loss_chunk
    with pytest.raises(ArithmeticError, match="and sequence by sequence"):
        build.check_loss(1.1 * loss, model, (x, y), True, contextlib.nullcontext())
