"""`Together` does what its members do, one after the other, and is a torch optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import shoal
from shoal.flat import ContiguousParams, members_of, names_of_members, pick_kernels
from shoal.flat.step_hook import flat_parameters


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and name != "4.weight"  # that one is the head


def both(params: Any) -> tuple[Optimizer, Optimizer]:
    matrices, rest = shoal.Together.divide(params, is_matrix)
    return Muon(matrices, lr=0.02), AdamW(rest, lr=0.01, foreach=False)


def together(params: Any) -> shoal.Together:
    return shoal.Together(*both(params))


class Counting(torch.optim.SGD):
    """SGD with state without a parameter, and with modes."""

    own_options = frozenset({"mood"})

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.tensor(0)) + 1  # type: ignore[index, call-overload]
        return super().step(closure)

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def train(model: nn.Module, step: Callable[[], object], steps: int = 4) -> torch.Tensor:
    for number in range(steps):
        model.zero_grad()
        model(torch.full((4, 6), 1.0 + number)).square().mean().backward()
        step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def pair() -> tuple[nn.Module, shoal.Together, nn.Module, tuple[Optimizer, Optimizer]]:
    model, plain = make_model(), make_model()
    return model, together(model.named_parameters()), plain, both(plain.named_parameters())


def test_it_does_what_its_members_do() -> None:
    model, optimizer, plain, members = pair()
    assert torch.equal(train(model, optimizer.step), train(plain, lambda: [one.step() for one in members]))
    assert isinstance(optimizer, Optimizer)
    assert [type(one) for one in members_of(optimizer)] == [Muon, AdamW]
    assert names_of_members(shoal.Together(optimizer)) == "Together(Together(Muon, AdamW))"


def test_groups_are_those_of_the_members() -> None:
    model = make_model()
    optimizer = together(model.named_parameters())
    muon, adamw = optimizer.members
    assert optimizer.param_groups[0] is muon.param_groups[0]
    assert optimizer.param_groups is optimizer.param_groups
    optimizer.param_groups[1]["lr"] = 0.5
    assert adamw.param_groups[0]["lr"] == 0.5
    adamw.load_state_dict(adamw.state_dict())  # torch makes new groups then
    assert optimizer.param_groups[1] is adamw.param_groups[0]
    given = [dict(group, lr=0.0) for group in optimizer.param_groups]
    optimizer.param_groups = given
    assert optimizer.param_groups is given
    assert [member.param_groups[0] for member in optimizer.members] == given
    optimizer.param_groups[1] = dict(given[1], lr=0.25)  # a change in place
    train(model, optimizer.step, 1)
    assert adamw.param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match=r"set to 1 groups, and Together\(Muon, AdamW\) has 2"):
        optimizer.param_groups = given[:1]
    assert muon.param_groups == given[:1]


def test_state_is_that_of_the_members() -> None:
    model = make_model()
    matrices, rest = shoal.Together.divide(model, is_matrix)
    optimizer = shoal.Together(Muon(matrices), Counting(rest, lr=0.1, momentum=0.9))
    head, matrix, stranger = model[4].bias, model[0].weight, torch.zeros(1)
    assert head not in optimizer.state
    assert optimizer.state.get(head) is None
    assert optimizer.state.pop(head, None) is None
    train(model, optimizer.step, 2)
    assert optimizer.state is optimizer.state
    assert optimizer.state[head] is optimizer.members[1].state[head]
    assert optimizer.state[1, "k"] == 2
    assert set(optimizer.state) == {*matrices_and_rest(matrices, rest), (1, "k")}
    assert len(optimizer.state) == 7
    del optimizer.state[head]
    assert head not in optimizer.members[1].state
    optimizer.state[head]["momentum_buffer"] = torch.ones(1)
    assert optimizer.members[1].state[head]
    optimizer.state["epoch"], optimizer.state[stranger] = 3, {}
    assert {"epoch", stranger} < set(optimizer.state)
    kept = optimizer.state.copy()
    optimizer.state.clear()
    assert not optimizer.members[0].state
    optimizer.state = kept
    assert optimizer.members[0].state[matrix] is kept[matrix]
    assert optimizer.members[1].state["k"] == 2  # type: ignore[index]
    assert optimizer.state == kept


def matrices_and_rest(*parts: Any) -> list[torch.Tensor]:
    return [parameter for part in parts for _, parameter in part]


def saved(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_dict_has_torchs_form_and_continues() -> None:
    model, optimizer, plain, members = pair()
    train(model, optimizer.step)
    packed = optimizer.state_dict()
    assert sorted(packed["state"]) == list(range(6))
    assert [group["params"] for group in packed["param_groups"]] == [[0, 1], [2, 3, 4, 5]]
    assert packed["state"][2]["step"] == 4
    other = make_model()
    other.load_state_dict(model.state_dict())
    resumed = together(other.named_parameters())
    resumed.load_state_dict(saved(packed))
    train(plain, lambda: [one.step() for one in members])
    expected = train(plain, lambda: [one.step() for one in members])
    assert torch.equal(train(other, resumed.step), expected)
    assert torch.equal(train(model, optimizer.step), expected)


def test_a_state_dict_of_another_optimizer_over_such_groups_loads_and_the_other_way_round() -> None:
    model, other = make_model(), make_model()
    groups = [[p for p in each.parameters() if p.ndim == 2] for each in (model, other)]
    rest = [[p for p in each.parameters() if p.ndim != 2] for each in (model, other)]
    one = AdamW([{"params": groups[0]}, {"params": rest[0]}], lr=0.01)
    train(model, one.step)
    two = shoal.Together(AdamW(groups[1], lr=0.5), AdamW(rest[1], lr=0.5))
    other.load_state_dict(model.state_dict())
    two.load_state_dict(saved(one.state_dict()))
    assert torch.equal(train(other, two.step), train(model, one.step))
    one.load_state_dict(saved(two.state_dict()))
    assert torch.equal(train(other, two.step), train(model, one.step))


def test_state_without_a_parameter_is_in_the_state_dict_by_member() -> None:
    model, other = make_model(), make_model()

    def counting(each: nn.Module) -> shoal.Together:
        params = list(each.parameters())
        return shoal.Together(shoal.Together(Counting(params[:1], 0.1), Counting(params[1:3], 0.1)), AdamW(params[3:]))

    optimizer, fresh = counting(model), counting(other)
    train(model, optimizer.step, 3)
    given = saved({**optimizer.state_dict(), "state": {**optimizer.state_dict()["state"], "epoch": 5}})
    with pytest.warns(UserWarning, match="the state dict has 'epoch', which is of no parameter"):
        fresh.load_state_dict(given)
    assert {key: value for key, value in fresh.state.items() if isinstance(key, (tuple, str))} == {
        (0, (0, "k")): 3,
        (0, (1, "k")): 3,
        "epoch": 5,
    }
    assert fresh.state_dict()["state"]["epoch"] == 5


def test_a_state_dict_of_other_groups_is_refused_before_anything_changes() -> None:
    model = make_model()
    optimizer = together(model.named_parameters())
    train(model, optimizer.step, 1)
    before = saved(optimizer.state_dict())
    other = saved(before)
    other["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match=r"groups of \[2, 3\] parameters, and those of Together\(Muon, AdamW\) have"):
        optimizer.load_state_dict(other)
    assert repr(saved(optimizer.state_dict())) == repr(before)


def test_hooks_of_both_are_called() -> None:
    model = make_model()
    optimizer = together(model.named_parameters())
    calls: list[str] = []
    for name, one in {"outer": optimizer, "muon": optimizer.members[0]}.items():
        one.register_step_pre_hook(lambda *_, name=name: calls.append(f"{name} before"))
        one.register_step_post_hook(lambda *_, name=name: calls.append(f"{name} after"))
        one.register_state_dict_pre_hook(lambda *_, name=name: calls.append(f"{name} saves"))
        one.register_state_dict_post_hook(lambda *_, name=name: calls.append(f"{name} saved"))
        one.register_load_state_dict_pre_hook(lambda *_, name=name: calls.append(f"{name} loads"))
        one.register_load_state_dict_post_hook(lambda *_, name=name: calls.append(f"{name} loaded"))
    train(model, optimizer.step, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [
        *("outer before", "muon before", "muon after", "outer after"),
        *("outer saves", "muon saves", "muon saved", "outer saved"),
        *("outer loads", "muon loads", "muon loaded", "outer loaded"),
    ]


def test_a_hook_that_raises_before_loading_leaves_all_members_as_they_were() -> None:
    model = make_model()
    optimizer = together(model.named_parameters())
    train(model, optimizer.step, 1)
    before = saved(optimizer.state_dict())
    given = copy.deepcopy(before)
    given["param_groups"][0]["lr"] = 9.0

    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    optimizer.members[1].register_load_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.load_state_dict(given)
    assert repr(saved(optimizer.state_dict())) == repr(before)


def test_copies_and_pickles() -> None:
    model, optimizer, plain, members = pair()
    train(model, optimizer.step, 2)
    train(plain, lambda: [one.step() for one in members], 2)
    expected = train(plain, lambda: [one.step() for one in members], 2)
    for copied in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        other, another = copied
        assert torch.equal(train(other, another.step, 2), expected)
        another.param_groups[0]["lr"] = 0.0
    assert torch.equal(train(model, optimizer.step, 2), expected)


def test_schedulers_of_it_and_of_a_member() -> None:
    model = make_model()
    optimizer = together(model.named_parameters())
    schedule = LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.5**step])
    of_member = LambdaLR(optimizer.members[1], lambda step: 10.0)
    for _ in range(2):
        train(model, optimizer.step, 1)
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02 * (1 / 3), 0.01 / 4]
    of_member.step()
    assert optimizer.param_groups[1]["lr"] == 0.1


def test_a_closure_is_evaluated_once() -> None:
    class AsksTwice(Counting):
        def step(self, closure: Any = None) -> Any:
            return closure() + closure()

    model, optimizer, plain, members = pair()
    seen: list[bool] = []
    heard: list[Any] = []
    optimizer.members[0].register_step_post_hook(lambda _, args, kwargs: heard.append(args[0] if args else None))

    def evaluate(each: nn.Module = model) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        each.zero_grad()
        loss = each(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(evaluate)
    assert seen == [True]
    assert torch.equal(loss, evaluate(plain))
    for one in members:
        one.step()
    assert torch.equal(*(torch.cat([p.flatten() for p in each.parameters()]) for each in (model, plain)))
    with pytest.raises(RuntimeError, match="AsksTwice evaluates the loss a second time"):
        shoal.Together(AsksTwice(model.parameters(), 0.1)).step(evaluate)


@pytest.mark.parametrize("unscale", [False, True])
def test_with_a_gradient_scaler(unscale: bool) -> None:
    model, optimizer, plain, members = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(3):
        model.zero_grad()
        scaler.scale(model(torch.full((4, 6), 1.0 + number)).square().mean()).backward()
        if number == 1:
            model[0].bias.grad[0] = float("inf")  # type: ignore[index, union-attr]
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    for number in (0, 2):
        plain.zero_grad()
        plain(torch.full((4, 6), 1.0 + number)).square().mean().backward()
        for one in members:
            one.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)  # scaling by powers of two rounds nothing but tiny numbers


def test_train_and_eval_are_those_of_the_members() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    plain = shoal.Together(AdamW(params[:1]))
    assert not hasattr(plain, "train")
    assert not hasattr(copy.copy(plain), "eval")
    with pytest.raises(AttributeError, match="'Together' object has no attribute 'nothing'"):
        plain.nothing  # noqa: B018
    counting = Counting(params[1:], 0.1)
    optimizer = shoal.Together(AdamW(params[:1]), counting)
    optimizer.train()
    assert counting.mode == "train"
    optimizer.eval()
    assert counting.mode == "eval"
    assert optimizer.own_options == {"mood"}


def test_what_it_refuses() -> None:
    model = make_model()
    params = list(model.parameters())
    adamw = AdamW(params[:2])
    with pytest.raises(ValueError, match="Together needs optimizers"):
        shoal.Together()
    with pytest.raises(TypeError, match="member 0 of Together is a list"):
        shoal.Together([adamw])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="member 1 of Together, a AdamW, was given before"):
        shoal.Together(adamw, adamw)
    with pytest.raises(ValueError, match=r"member 1 of Together is a LBFGS, whose step evaluates the loss again"):
        shoal.Together(adamw, torch.optim.LBFGS(params[2:]))
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"'0.bias', of shape \(8,\), is in group 0 of member 0, a AdamW, and"):
        shoal.Together(adamw, torch.optim.SGD(named[1:], 0.1))
    with pytest.raises(ValueError, match=r"add_param_group does not say which member of Together\(AdamW\)"):
        shoal.Together(adamw).add_param_group({"params": params[2:]})

    class OwnForm(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {"inner": super().state_dict()}

    with pytest.raises(ValueError, match=r"state dict of OwnForm has a form of its own \(inner\)"):
        shoal.Together(adamw, OwnForm(params[2:], 0.1))
    late = torch.optim.SGD(params[2:4], 0.1)
    optimizer = shoal.Together(adamw, late)
    late.add_param_group({"params": params[:1]})
    with pytest.raises(ValueError, match=r"is in group 0 of member 0, a AdamW, and in group 1 of member 1, a SGD"):
        optimizer.step()


def test_divide_by_name_in_the_form_that_was_given() -> None:
    model = make_model()
    named = dict(model.named_parameters())
    for params in (model, model.named_parameters()):
        matrices, rest = shoal.Together.divide(params, is_matrix)
        assert [name for name, _ in matrices] == ["0.weight", "2.weight"]
        assert dict(matrices) | dict(rest) == named
    first = {"params": list(model[0].named_parameters()), "lr": 0.5}
    groups = [first, {"params": [("bias", model[4].bias)], "lr": 0.1}]
    matrices, rest = shoal.Together.divide(groups, lambda name, p: name == "weight")
    assert matrices == [{"params": [("weight", model[0].weight)], "lr": 0.5}]
    assert rest == [{"params": [("bias", model[0].bias)], "lr": 0.5}, {"params": [("bias", model[4].bias)], "lr": 0.1}]
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(8, 6\)\) has none: give params=model.named"):
        shoal.Together.divide(model.parameters(), is_matrix)
    with pytest.raises(ValueError, match=r"chosen=<lambda> picks no parameter of 6 \('0.weight', .*, …\)"):
        shoal.Together.divide(model, lambda name, p: name == "embedding")


def test_empty_groups() -> None:
    model = make_model()
    optimizer = shoal.Together(
        Muon([{"params": []}, {"params": [p for p in model.parameters() if p.ndim == 2]}]),
        AdamW([{"params": [p for p in model.parameters() if p.ndim != 2]}, {"params": []}]),
    )
    train(model, optimizer.step, 1)
    assert [len(group["params"]) for group in optimizer.state_dict()["param_groups"]] == [0, 3, 3, 0]


def test_kernels_are_picked_for_each_member() -> None:
    model = make_model()
    matrices, rest = shoal.Together.divide(model, is_matrix)
    optimizer = shoal.Together(Muon(matrices), AdamW(rest), torch.optim.SGD([torch.ones(3, requires_grad=True)], 0.1))
    pick_kernels(optimizer)
    assert [group.get("fused") for group in optimizer.param_groups] == [None, True, True]


def test_a_member_may_step_flat_memory() -> None:
    model, plain = make_model(), make_model()
    matrices, rest = shoal.Together.divide(model, is_matrix)
    flat = ContiguousParams(rest)
    optimizer = shoal.Together(Muon(matrices, lr=0.02), AdamW(flat.contiguous(), lr=0.01, foreach=False))
    members = both(plain.named_parameters())
    model[0].bias.requires_grad_(False)  # so that runs are split
    plain[0].bias.requires_grad_(False)
    with_members = train(plain, lambda: [one.step() for one in members])
    assert torch.equal(train(model, optimizer.step), with_members)
    assert len(flat_parameters(optimizer.members[1])) == len(optimizer.param_groups[1]["params"])
    assert sorted(map(len, (optimizer.state, optimizer.members[0].state))) == [2, 3]


class Counts(torch.optim.SGD):
    """Keeps a count of no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[index, call-overload]
        return super().step(closure)


def test_what_a_plain_optimizer_keeps_of_no_parameter_is_told() -> None:
    plain, member = (Counts([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    plain.step()
    with pytest.warns(UserWarning, match="the state dict has 'k', which is of no parameter: no member"):
        shoal.Together(member).load_state_dict(plain.state_dict())


class NoClosure(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


def test_a_member_whose_step_takes_no_closure() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    together = shoal.Together(torch.optim.SGD(parameters[:1], 0.1), NoClosure(parameters[1:], 0.1))
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    assert together.step(lambda: 3.0) == 3.0
    assert [parameter.item() for parameter in parameters] == pytest.approx([0.9, 0.9])


def test_groups_that_share_a_parameter_are_not_set() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    together = shoal.Together(*(torch.optim.SGD([parameter], 0.1) for parameter in parameters))
    before = [dict(group) for group in together.param_groups]
    with pytest.raises(ValueError, match="parameter 0"):
        together.param_groups = [dict(before[0]), {**before[1], "params": parameters[:1]}]
    assert [group["params"] for group in together.param_groups] == [[one] for one in parameters]
