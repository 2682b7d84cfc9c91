"""What provokes the errors that the guides promise to raise, in the order of their table."""

from __future__ import annotations

import copy
import functools
import socket
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.testing._internal.distributed.fake_pg import FakeStore

import shoal
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.swarm.protocol import gathering
from tests.optim.closing import Sam, SamAfterBackward
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model
from tests.repository.error_tables import Scene, provokes, raised


def address_of(listener: socket.socket) -> Multiaddr:
    """Of a peer that nobody is, at this socket."""
    return Multiaddr(f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}").with_peer(Identity().peer_id)


# -- of a DHT


@provokes("none of the initial peers answered", "nobody listens there")
def joins_where_nobody_listens(_: Scene) -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return raised(lambda: shoal.DHT([address_of(bound)], start=True))


@provokes("somebody answers there who cannot prove to be that peer")
def expects_another_peer_at_an_address(scene: Scene) -> str:
    address = scene.dht.get_visible_maddrs()[0].with_peer(Identity().peer_id)
    return raised(lambda: shoal.DHT([address], start=True))


@provokes("no answer within … s")
def joins_where_packets_are_dropped(scene: Scene) -> str:
    """The queue of a listener that accepts nobody is full, and the kernel ignores who comes then."""
    server = scene.ends.enter_context(socket.socket())
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    for _ in range(3):
        caller = scene.ends.enter_context(socket.socket())
        caller.setblocking(False)
        caller.connect_ex(server.getsockname())
    return raised(lambda: shoal.DHT([address_of(server)], start=True, bootstrap_timeout=1.0))


@provokes("… must end in /p2p/<peer id>")
def leaves_out_the_peer_id(_: Scene) -> str:
    return raised(lambda: shoal.DHT(["/ip4/127.0.0.1/tcp/31337"], start=True))


@provokes("client_mode=True needs initial_peers")
def is_a_client_of_nobody(_: Scene) -> str:
    return raised(lambda: shoal.DHT(client_mode=True, start=True))


@provokes("port_mapping=True needs an address that the router reaches")
def has_a_port_of_loopback_mapped(_: Scene) -> str:
    return raised(lambda: shoal.DHT(port_mapping=True, start=True))


@provokes("client_mode=False, but the DHT is in client mode")
def is_no_client_on_a_dht_that_is(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(scene.another_dht(client_mode=True), client_mode=False))


@provokes("can't listen at …")
def takes_a_port_that_is_taken(_: Scene) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        return raised(lambda: shoal.DHT(host_maddrs=[address], start=True))


@provokes("an identity file holds the 32 bytes of an ed25519 seed")
def names_something_else_as_its_identity(scene: Scene) -> str:
    (scene.folder / "identity").write_text("-----BEGIN PRIVATE KEY-----")
    return raised(lambda: shoal.DHT(identity_path=str(scene.folder / "identity"), start=True))


@provokes("… is complex, and peers average real numbers")
def trains_a_complex_parameter(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(params=[nn.Parameter(torch.ones(2, dtype=torch.complex64))]))


@provokes("optimizer= is a SparseAdam, which steps only the rows of sparse gradients")
def averages_for_an_optimizer_of_sparse_gradients(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(optimizer=lambda params: torch.optim.SparseAdam(list(params))))


@provokes("… is already served on this node")
def makes_two_optimizers_with_one_run_id_on_one_dht(scene: Scene) -> str:
    scene.optimizer()
    return raised(scene.optimizer)


@provokes("this DHT was not started")
def gives_a_dht_that_was_not_started(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(shoal.DHT()))


# -- of a peer that does not fit a run


@provokes(
    "the other peers of the run go by other terms: X is A here, and B there",
    "… is in the run with other terms: …",
)
def joins_two_with_another_target(scene: Scene) -> str:
    scene.optimizer()
    scene.optimizer(scene.another_dht())
    return raised(lambda: scene.optimizer(scene.another_dht(), target_batch_size=128).step(batch_size=1))


@provokes("the run refuses this peer: …")
def gathers_more_than_a_round_may_carry(scene: Scene) -> str:
    scene.ends.enter_context(pytest.MonkeyPatch.context()).setattr(gathering, "MAX_GATHERED_BYTES", 100)
    averagers = []
    for dht in (scene.dht, scene.another_dht()):
        averagers.append(shoal.DecentralizedAverager([torch.zeros(3)], dht, prefix=scene.run_id, start=True))
        scene.ends.callback(averagers[-1].shutdown)
    steps = [averager.step(gather="x" * 80, wait=False) for averager in averagers]
    refused, others = wait(steps, 100, FIRST_EXCEPTION)
    for other in others:
        other.cancel()
    return raised(refused.pop().result)


@provokes("the run's state does not fit this peer")
def comes_late_with_a_scheduler_that_keeps_less(scene: Scene) -> str:
    def warmed_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        scheduler: Any = lr_scheduler.StepLR(optimizer, 1)
        scheduler.warmup = 5
        return scheduler  # type: ignore[no-any-return]

    scene.optimizer(scheduler=warmed_up).step(batch_size=64)
    newcomer = scene.optimizer(scene.another_dht(), scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 1))
    return raised(lambda: newcomer.step(batch_size=1))


# -- of arguments


@provokes("offload_optimizer=True makes the optimizer over parameters of its own")
def offloads_an_optimizer_that_is_made_already(scene: Scene) -> str:
    made = OPTIMIZERS["sgd"](make_model().parameters())
    return raised(lambda: scene.optimizer(params=None, optimizer=made, offload_optimizer=True))


@provokes("delay_…=True needs …")
def delays_a_step_that_is_not_offloaded(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(delay_optimizer_step=True, offload_optimizer=False))


@provokes("use_local_updates=True … leaves no use for …")
def clips_with_local_updates(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(use_local_updates=True, max_grad_norm=1.0))


@provokes("averager_opts has …")
def gives_averaging_an_option_that_it_does_not_have(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(averager_opts={"averaging_alpha": 0.5}))


@provokes("tracker_opts has …")
def gives_the_tracker_an_option_that_it_does_not_have(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(tracker_opts={"refresh": 1}))


@provokes("average_opt_statistics has 'x', and SGD keeps no such tensor")
def averages_a_statistic_that_is_not_kept(scene: Scene) -> str:
    optimizer = scene.optimizer(average_opt_statistics=["x"])
    return raised(lambda: optimizer.step(batch_size=64))


@provokes("reuse_grad_buffers=True accumulates in .grad")
def clears_gradients_that_accumulate_in_place(scene: Scene) -> str:
    return raised(scene.optimizer(reuse_grad_buffers=True).zero_grad)


@provokes("parameter N ('weight' of a Linear) was replaced")
def gives_a_module_another_parameter(scene: Scene) -> str:
    model = make_model()
    optimizer = scene.optimizer(params=model.parameters())
    model[2].weight = nn.Parameter(torch.zeros(20, 20))
    return raised(lambda: optimizer.step(batch_size=64))


@provokes("parameter N (…) is float64 of shape … now, and was float32")
def converts_the_model_later(scene: Scene) -> str:
    model = make_model()
    optimizer = scene.optimizer(params=model.parameters())
    model.double()
    return raised(lambda: optimizer.step(batch_size=64))


def be_one_of_two_ranks(scene: Scene) -> None:
    """Of a process group in which the other rank is not needed."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    scene.ends.callback(distributed.destroy_process_group)


@provokes("parameter N (…) is held by a DistributedDataParallel of M ranks")
def wraps_the_model_for_two_ranks(scene: Scene) -> str:
    be_one_of_two_ranks(scene)
    model = DistributedDataParallel(make_model())
    return raised(lambda: scene.optimizer(params=model.parameters()).step(batch_size=64))


@provokes("a checkpoint was loaded into the model (load_state_dict) after the first inner step")
def loads_the_model_alone_in_the_midst_of_diloco(scene: Scene) -> str:
    model = make_model()
    optimizer = scene.optimizer(params=model.parameters(), outer=shoal.DiLoCo(inner_steps=4), target_batch_size=None)
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    model.load_state_dict(make_model(1).state_dict())
    return raised(lambda: optimizer.step(batch_size=64))


@provokes("tensor N is a DTensor")
def shards_the_model_over_two_ranks(scene: Scene) -> str:
    be_one_of_two_ranks(scene)
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return raised(lambda: scene.optimizer(params=model.parameters()))


@provokes("optimizer= is a LBFGS, whose step evaluates the loss again and again")
def gives_an_optimizer_that_calls_the_closure(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(optimizer=torch.optim.LBFGS))


@provokes("the step of a X calls its closure: call step(closure)")
def gives_no_closure_to_an_optimizer_that_calls_it(scene: Scene) -> str:
    optimizer = scene.optimizer(optimizer=torch.optim.LBFGS, outer=shoal.DiLoCo())
    return raised(lambda: optimizer.step(batch_size=64))


@provokes(
    "X calls its closure a second time, to evaluate the loss itself", "X calls its closure after it has written to …"
)
def averages_gradients_with_an_optimizer_that_calls_its_closure_again(scene: Scene) -> str:
    said = ""
    for make in (Sam, SamAfterBackward):
        optimizer = scene.optimizer(run_id=make.__name__, optimizer=make)
        said += raised(functools.partial(optimizer.step, lambda: torch.tensor(1.0), batch_size=64))
    return said


# -- of the optimizer's life


@provokes("step() was called while another thread is in this optimizer")
def steps_in_two_threads(scene: Scene) -> str:
    optimizer = scene.optimizer()
    texts: list[str] = []

    def closure() -> torch.Tensor:
        with ThreadPoolExecutor(1) as another:
            texts.append(another.submit(raised, lambda: optimizer.step(batch_size=64)).result())
        return torch.zeros(())

    optimizer.step(closure, batch_size=64)
    return texts[0]


@provokes("the DHT of this optimizer was shut down")
def shuts_the_dht_down_first(scene: Scene) -> str:
    dht = scene.another_dht()
    optimizer = scene.optimizer(dht)
    dht.shutdown()
    return raised(lambda: optimizer.step(batch_size=64))


@provokes("a shoal.Optimizer is neither copied nor pickled")
def copies_the_optimizer(scene: Scene) -> str:
    return raised(lambda: copy.deepcopy(scene.optimizer()))


# -- of arguments of step, and of parameters


@provokes("grad_scaler= is a GradScaler: give a shoal.GradScaler")
def gives_torchs_own_scaler(scene: Scene) -> str:
    scaler: Any = torch.amp.GradScaler("cpu")
    return raised(lambda: scene.optimizer().step(batch_size=64, grad_scaler=scaler))


@provokes("the loss of these gradients was not scaled")
def steps_by_a_scaler_without_a_scaled_loss(scene: Scene) -> str:
    optimizer = scene.optimizer(reuse_grad_buffers=True)
    return raised(lambda: shoal.GradScaler("cpu").step(optimizer, batch_size=64))


@provokes("step needs batch_size=…")
def never_says_how_large_batches_are(scene: Scene) -> str:
    return raised(scene.optimizer().step)


@provokes("tensors 0 and 1 share memory")
def gives_a_tied_parameter_twice(scene: Scene) -> str:
    weight = nn.Parameter(torch.zeros(4))
    return raised(lambda: scene.optimizer(params=[weight, nn.Parameter(weight.data)]))


@provokes("no parameter of the optimizer has requires_grad=True")
def freezes_everything_first(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(params=make_model().requires_grad_(False).parameters()))


@provokes("a parameter that was frozen … has a gradient now")
def thaws_a_parameter_in_the_run(scene: Scene) -> str:
    model = make_model()
    weight = next(model.parameters()).requires_grad_(False)
    optimizer = scene.optimizer(params=model.parameters())
    weight.requires_grad_(True).grad = torch.ones_like(weight)
    return raised(lambda: optimizer.step(batch_size=64))


@provokes('param_groups[N]["params"] has … parameters, and had …', "param_groups has N groups, and had M")
def sets_other_groups(scene: Scene) -> str:
    optimizer: Any = scene.optimizer()
    other = [{**optimizer.param_groups[0], "params": []}]
    return raised(lambda: setattr(optimizer, "param_groups", other)) + raised(
        lambda: setattr(optimizer, "param_groups", [])
    )


@provokes("the parameters of a run are fixed")
def adds_a_group_later(scene: Scene) -> str:
    return raised(lambda: scene.optimizer().add_param_group({"params": [nn.Parameter(torch.zeros(1))]}))


@provokes("scheduler= is of another optimizer")
def gives_the_scheduler_of_another_optimizer(scene: Scene) -> str:
    mine, other = (OPTIMIZERS["sgd"](make_model().parameters()) for _ in range(2))
    scheduler = lr_scheduler.StepLR(other, 1)
    return raised(lambda: scene.optimizer(params=None, optimizer=mine, scheduler=scheduler))


@provokes("the scheduler is of a … that no shoal.Optimizer has")
def makes_the_scheduler_of_the_plain_optimizer(_: Scene) -> str:
    scheduler = lr_scheduler.StepLR(OPTIMIZERS["sgd"](make_model().parameters()), 1)
    return raised(lambda: shoal.EpochScheduler(scheduler))


@provokes("EpochScheduler of a …: give a torch scheduler")
def wraps_a_scheduler_that_wants_a_metric(scene: Scene) -> str:
    scheduler: Any = lr_scheduler.ReduceLROnPlateau(scene.optimizer())
    return raised(lambda: shoal.EpochScheduler(scheduler))


@provokes("the state of an EpochScheduler has epoch and scheduler")
def loads_the_state_of_a_plain_scheduler(scene: Scene) -> str:
    plain = lr_scheduler.StepLR(scene.optimizer(), 1)
    return raised(lambda: shoal.EpochScheduler(plain).load_state_dict(plain.state_dict()))


# -- of averagers


@provokes("no result within … s")
def averages_with_nobody(scene: Scene) -> str:
    averager = shoal.DecentralizedAverager(
        [torch.zeros(3)], scene.dht, prefix=scene.run_id, start=True, min_group_size=2
    )
    scene.ends.callback(averager.shutdown)
    return raised(lambda: averager.step(timeout=0.5))
