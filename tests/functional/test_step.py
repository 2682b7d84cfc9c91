"""What a step promises whatever the algorithm: who is left alone, scaling, layouts in memory, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.functional import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    FunctionalOptimizer,
    Kernel,
    RMSprop,
    functional_optim_map,
)
from tests.functional.options import OPTIONS

KERNELS: list[dict[str, bool]] = [{"fused": True}, {"foreach": True}, {"foreach": False}]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=["fused", "foreach", "loop"])
with_fused = pytest.mark.parametrize(
    "make", [lambda **k: SGD(momentum=0.9, **k), Adam, AdamW, Adagrad], ids=["SGD", "Adam", "AdamW", "Adagrad"]
)


@pytest.mark.parametrize("optimizer", OPTIONS, ids=lambda optimizer: optimizer.__name__)
def test_a_parameter_without_gradient_is_left_alone_with_its_state(optimizer: Any) -> None:
    functional: Any = functional_optim_map[optimizer]()
    params = [torch.ones(5), torch.ones(5)]
    state = functional.init(params)
    before = {name: tensors[1].clone() for name, tensors in state.items()}
    functional.step(params, [torch.ones(5), None], state)
    assert not torch.equal(params[0], torch.ones(5))
    assert torch.equal(params[1], torch.ones(5))
    assert all(torch.equal(state[name][1], value) for name, value in before.items())
    functional.step(params, [None, None], state)


@pytest.mark.parametrize("optimizer", OPTIONS, ids=lambda optimizer: optimizer.__name__)
def test_the_state_is_as_declared(optimizer: Any) -> None:
    functional: Any = functional_optim_map[optimizer]()
    params = [torch.ones(2, 3, dtype=torch.float64), torch.ones(4), torch.ones(0)]
    state = functional.init(params)
    assert list(state) == list(functional.state_layout)
    for name, entry in functional.state_layout.items():
        for param, tensor in zip(params, state[name], strict=True):
            assert torch.equal(tensor, torch.full_like(tensor, entry.initial))
            if entry.like_parameter:
                assert (tensor.shape, tensor.dtype) == (param.shape, param.dtype)
            else:
                assert (tensor.shape, tensor.dtype) == ((), torch.float32)


@kernels
@with_fused
def test_gradients_are_divided_by_the_scale(make: Any, kernel: dict[str, bool]) -> None:
    optimizer: FunctionalOptimizer = make(lr=0.1, **kernel)
    plain, scaled = torch.ones(40), torch.ones(40)
    states = optimizer.init([plain]), optimizer.init([scaled])
    grad = torch.linspace(-1, 1, 40)
    optimizer.step([plain], [grad.clone()], states[0])
    optimizer.step([scaled], [grad * 8], states[1], grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0))
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0)  # a multiple by 8 is exact, and so is its quotient


@kernels
@pytest.mark.parametrize("shape", [(), (1,)], ids=["number", "one element"])
def test_the_scale_may_have_either_shape_of_one_element(kernel: dict[str, bool], shape: tuple[int, ...]) -> None:
    optimizer = SGD(lr=0.1, **kernel)
    param = torch.zeros(5)
    found_inf = torch.zeros(shape)
    optimizer.step([param], [torch.ones(5)], {}, grad_scale=torch.full(shape, 2.0), found_inf=found_inf)
    assert torch.equal(param, torch.full((5,), -0.05))  # 1/2 of the rate is exact


@kernels
@with_fused
def test_nothing_happens_where_a_gradient_was_not_finite(make: Any, kernel: dict[str, bool]) -> None:
    optimizer: FunctionalOptimizer = make(lr=0.1, **kernel)
    params = [torch.ones(40), torch.ones(3)]
    state = optimizer.init(params)
    grads = [torch.full((40,), torch.inf), torch.ones(3)]
    optimizer.step(params, grads, state, grad_scale=torch.tensor(8.0), found_inf=torch.tensor(1.0))
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)
    assert all((tensor == 0).all() for tensors in state.values() for tensor in tensors)


def _shapes_in_memory() -> list[tuple[torch.Tensor, torch.Tensor]]:
    image = torch.randn(2, 3, 4, 5)
    last = image.clone(memory_format=torch.channels_last)
    square = torch.randn(6, 6)
    return [
        (last.clone(), torch.randn(2, 3, 4, 5)),  # strides differ
        (last.clone(), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
        (square.clone(), torch.randn(6, 6).t()),
        (square.clone().t(), torch.randn(6, 6)),
        (torch.randn(6, 8)[:, ::2], torch.randn(6, 4)),  # not dense
        (square.clone(), torch.randn(6, 1).expand(6, 6)),  # as the backward of sum() gives them
    ]


@pytest.mark.parametrize("case", range(len(_shapes_in_memory())))
def test_fused_kernels_get_tensors_that_lie_alike(case: int) -> None:
    torch.manual_seed(case)
    param, grad = _shapes_in_memory()[case]
    plain = param.clone(memory_format=torch.contiguous_format)
    optimizer = Adam(0.1, weight_decay=0.1, fused=True)
    state, plain_state = optimizer.init([param]), optimizer.init([plain])
    for _ in range(3):
        optimizer.step([param], [grad], state)
        optimizer.step([plain], [grad.contiguous()], plain_state)
    # The elements are in another order, so others are at the end, which fused kernels round otherwise: a few 2**-23.
    torch.testing.assert_close(param, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(state["exp_avg_sq"][0], plain_state["exp_avg_sq"][0], rtol=0, atol=1e-6)


def test_one_call_updates_several_dtypes() -> None:
    params = [torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3)]
    state = Adam().init(params)
    Adam(0.5).step(params, [torch.ones_like(param) for param in params], state)
    assert all(torch.allclose(param, torch.full_like(param, 0.5)) for param in params)
    assert [step.item() for step in state["step"]] == [1, 1, 1]


def test_parameters_that_require_grad_are_updated_too() -> None:
    param = torch.ones(3, requires_grad=True)
    SGD(0.5).step([param], [torch.ones(3)], {})
    assert param.tolist() == [0.5, 0.5, 0.5]
    assert param.is_leaf


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own Adagrad causes it
@pytest.mark.parametrize("make", [SGD, Adagrad])
def test_sparse_gradients_where_torch_takes_them(make: Any) -> None:
    dense, sparse = torch.ones(4, 2), torch.ones(4, 2)
    grad = torch.zeros(4, 2)
    grad[1] = 2
    optimizer: FunctionalOptimizer = make(0.1)
    for param, gradient in ((dense, grad.clone()), (sparse, grad.to_sparse(1))):
        optimizer.step([param], [gradient], optimizer.init([param]), grad_scale=torch.tensor(2.0))
    assert torch.equal(sparse, dense)  # zeros and ones: the order of the operations rounds nothing
    with pytest.raises(RuntimeError, match=r"Adam does not support sparse gradients: pass grad.to_dense\(\)"):
        Adam().step([sparse], [grad.to_sparse()], Adam().init([sparse]))


def test_options_change_by_a_new_value_and_the_state_stays() -> None:
    param = torch.zeros(3)
    optimizer = Adam(1e-3)
    state = optimizer.init([param])
    optimizer.step([param], [torch.ones(3)], state)
    faster = replace(optimizer, lr=1.0)
    faster.step([param], [torch.ones(3)], state)
    assert state["step"][0].item() == 2
    assert param[0] < -0.5
    assert optimizer.lr == 1e-3
    with pytest.raises(ValueError, match="state has no 'max_exp_avg_sq', which Adam needs"):
        replace(optimizer, amsgrad=True).step([param], [torch.ones(3)], state)


@kernels
def test_a_learning_rate_may_be_a_tensor(kernel: dict[str, bool]) -> None:
    lr = torch.tensor(0.5)
    if kernel.get("foreach"):
        with pytest.raises(ValueError, match="tensors only if capturable"):
            Adam(lr, **kernel)
        return
    param = torch.ones(3)
    optimizer = Adam(lr, **kernel)
    optimizer.step([param], [torch.ones(3)], optimizer.init([param]))
    assert torch.allclose(param, torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Adam, {"lr": -1.0}, "lr is at least 0, got -1.0"),
        (Adam, {"lr": torch.ones(2)}, "lr as a tensor has one element, got 2"),
        (Adam, {"betas": (0.9, 1.0)}, r"betas\[1\] is at least 0 and below 1, got 1.0"),
        (Adam, {"eps": -1}, "eps is at least 0"),
        (Adam, {"fused": True, "foreach": True}, "choose one kernel"),
        (SGD, {"nesterov": True}, "nesterov needs a momentum above 0 and no dampening"),
        (SGD, {"momentum": -1}, "momentum is at least 0"),
        (RMSprop, {"alpha": float("nan")}, "alpha is at least 0, got nan"),
    ],
)
def test_options_out_of_range(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("optimizer", OPTIONS, ids=lambda optimizer: optimizer.__name__)
def test_differentiable_is_refused(optimizer: Any) -> None:
    make: Any = functional_optim_map[optimizer]
    with pytest.raises(ValueError, match=r"differentiable=True is refused: .* in place .* torch.optim"):
        make(differentiable=True)


def test_betas_may_be_tensors_where_there_is_no_fused_kernel() -> None:
    numbers, tensors = (torch.full((3,), 1 + 2j) for _ in range(2))
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    for param, optimizer in ((numbers, Adam(0.5, betas=(0.9, 0.99))), (tensors, Adam(0.5, betas=betas))):
        optimizer.step([param], [torch.ones_like(param)], optimizer.init([param]))
    torch.testing.assert_close(tensors, numbers)


def test_a_tensor_in_the_place_of_a_list_is_refused() -> None:
    flat, optimizer = torch.ones(4), SGD(0.1)
    for wrong in (
        lambda: optimizer.init(flat),
        lambda: optimizer.step(flat, torch.ones(4), {}),
        lambda: optimizer.step([flat], torch.ones(1, 4), {}),
    ):
        with pytest.raises(TypeError, match=r"lists of tensors: pass \[tensor\]"):
            wrong()
    assert torch.equal(flat, torch.ones(4))


def test_lists_of_unlike_lengths() -> None:
    params = [torch.ones(3), torch.ones(3)]
    with pytest.raises(ValueError, match="got 2 and 1"):
        Adam().step(params, [None], Adam().init(params))
    with pytest.raises(ValueError, match="one tensor of state 'step' per parameter: got 1 for 2"):
        Adam().step(params, [None, None], Adam().init(params[:1]))


@kernels
def test_tensors_of_another_shape(kernel: dict[str, bool]) -> None:
    """torch's fused kernels would read and write beyond their end."""
    param, optimizer = torch.ones(100), Adam(**kernel)
    with pytest.raises(ValueError, match=r"the gradient of a parameter of shape \[100\] has shape \[10\]"):
        optimizer.step([param], [torch.ones(10)], optimizer.init([param]))
    if kernel.get("fused"):
        with pytest.raises(ValueError, match=r"exp_avg of a parameter of shape \[100\] has shape \[10\]"):
            optimizer.step([param], [torch.ones(100)], optimizer.init([torch.ones(10)]))
    assert torch.equal(param, torch.ones(100))


@pytest.mark.parametrize("optimizer", OPTIONS, ids=lambda optimizer: optimizer.__name__)
@pytest.mark.parametrize("grad", [torch.ones(3, dtype=torch.float16), torch.ones(3, device="meta")], ids=str)
def test_gradients_of_another_dtype_or_device_change_nothing(optimizer: Any, grad: torch.Tensor) -> None:
    functional: Any = functional_optim_map[optimizer]()
    params = [torch.ones(3)]
    state = functional.init(params)
    before = {name: tensors[0].clone() for name, tensors in state.items()}
    with pytest.raises(ValueError, match=f"a gradient is of {grad.dtype} on {grad.device}, but its parameter"):
        functional.step(params, [grad], state)
    assert torch.equal(params[0], torch.ones(3))
    assert all(torch.equal(state[name][0], value) for name, value in before.items())


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "NAdam", "RAdam"])
@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999), 0.9])
def test_betas_are_two(name: str, betas: Any) -> None:
    optimizer: Any = functional_optim_map[getattr(torch.optim, name)]
    with pytest.raises(ValueError, match="betas are two numbers"):
        optimizer(betas=betas)


def test_the_kernel_that_is_chosen() -> None:
    small, large = [torch.zeros(100)] * 20, [torch.zeros(100_000)]
    assert Adam().kernel(small) is Kernel.FUSED
    assert Adam(fused=False).kernel(small) is Kernel.FOREACH
    assert Adam(foreach=False).kernel(small) is Kernel.LOOP
    assert RMSprop().kernel(small) is Kernel.FOREACH
    assert RMSprop().kernel(large) is Kernel.LOOP
    assert RMSprop(foreach=True).kernel(large) is Kernel.FOREACH
    with pytest.raises(RuntimeError, match=r"no fused kernel of Adam for torch.complex64 on cpu"):
        Adam(fused=True).kernel([torch.zeros(3, dtype=torch.complex64)])


def test_16_bit_parameters_move_with_momentum() -> None:
    """torch 2.13's fused CPU kernel leaves them where they are, and must not be chosen."""
    param = torch.zeros(64, dtype=torch.bfloat16)
    optimizer = SGD(1.0, momentum=0.5)
    optimizer.step([param], [torch.ones_like(param)], optimizer.init([param]))
    assert (param == -1).all()


def test_counters_are_advanced_whether_they_lie_together_or_not() -> None:
    params = [torch.ones(3) for _ in range(4)]
    grads = [torch.ones(3)] * 4
    state = Adam().init(params)
    Adam().step(params, grads, state)
    Adam().step(params, [*grads[:2], None, grads[3]], state)
    state["step"][0] = state["step"][0].clone()
    Adam().step(params, grads, state)
    assert [step.item() for step in state["step"]] == [3, 3, 2, 3]
