"""The features of an engine besides its schedules, on two ranks: each check returns its findings."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

from deep500_timing import Timer
from deep500_timing_deepspeed.pipe import (
    DataEndedError,
    LayerSpec,
    PipelineError,
    PipelineModule,
    TiedLayerSpec,
    initialize,
)
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.pipeline import instrument_schedule

warnings.filterwarnings("ignore")
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def engine_of(layers, loss_fn, *, size=4, steps=4, model=None, config=None, **settings):
    """An engine over two stages."""
    module = PipelineModule(
        layers, num_stages=2, loss_fn=loss_fn, seed_layers=True, **{"partition_method": "uniform", **(model or {})}
    )
    given = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": steps, "optimizer": SGD}
    return initialize(model=module, config={**given, **(config or {})}, timeout_s=300, **settings)[0]


def built(layers):
    """The layers as modules, by the engine's seeds."""
    found = []
    for number, spec in enumerate(layers):
        torch.manual_seed(1234 + number)
        found.append(spec.build() if isinstance(spec, LayerSpec) else spec)
    return found


def distance(module, expected):
    """How far this rank's tensors are off."""
    return max(float((one - expected[name]).abs().max()) for name, one in module.state_dict().items())


def batches(count, make, seed=0):
    """So many micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    return [make(generator) for _ in range(count)]


def numbers(generator):
    """A micro-batch for a regression."""
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


MLP = [
    LayerSpec(nn.Linear, 6, 12),
    LayerSpec(nn.GELU),
    LayerSpec(nn.Dropout, 0.0),
    LayerSpec(nn.Linear, 12, 12),
    LayerSpec(nn.GELU),
    LayerSpec(nn.Linear, 12, 3),
]


def tied(_):
    """An embedding on the first stage is the head on the last one."""
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, 11, 8),
        LayerSpec(nn.Linear, 8, 8),
        LayerSpec(nn.Linear, 8, 8),
        TiedLayerSpec("embedding", nn.Embedding, 11, 8, forward_fn=lambda layer, x: x @ layer.weight.T),
    ]

    def loss_fn(logits, tokens):
        return nn.functional.cross_entropy(logits.reshape(-1, 11), tokens.reshape(-1))

    engine = engine_of(layers, loss_fn, config={"gradient_clipping": 0.3})
    reference = nn.ModuleList(built(layers)[:3])
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    wrong = 0.0
    for step in range(3):
        tokens = batches(4, lambda g: torch.randint(0, 11, (4, 5), generator=g), step)
        loss = engine.train_batch(iter([(one, one) for one in tokens]))
        expected = 0.0
        for one in tokens:
            value = reference[2](reference[1](reference[0](one))) @ reference[0].weight.T
            part = loss_fn(value, one) / 4
            part.backward()
            expected += float(part)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        wrong = max(wrong, abs(float(loss) - expected))
    state = reference.state_dict() | {"3.weight": reference[0].weight.detach()}
    return {"loss": wrong, "parameters": distance(engine.module, state)}


def variants(_):
    """Activation checkpointing, autocast, and other cuts."""
    found = {}
    for name, model, config in (
        ("checkpointing", {"activation_checkpoint_interval": 2}, {}),
        ("autocast", {}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        ("parameters", {"partition_method": "parameters"}, {}),
        ("type", {"partition_method": "type:linear"}, {}),
    ):
        engine = engine_of(MLP, nn.MSELoss(), model=model, config=config)
        reference = nn.Sequential(*built(MLP))
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        data = batches(4, numbers)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "autocast"):
            losses = [nn.MSELoss()(reference(x), y) / 4 for x, y in data]
        for one in losses:
            one.backward()
        optimizer.step()
        loss = engine.train_batch(iter(data))
        found[name] = {
            "loss": abs(float(loss) - float(sum(losses))),
            "parameters": distance(engine.module, reference.state_dict()),
            "bounds": engine.module.bounds,
        }
    return found


def measured(_):
    """Layers with given times are cut evenly by them."""
    model = PipelineModule(MLP, num_stages=2, loss_fn=nn.MSELoss(), partition_method=[1, 1, 1, 1, 1, 5])
    return model.bounds


def resumed(folder):
    """A run that is saved, ended and loaded goes on as one that was not, to the last bit."""
    layers = [
        LayerSpec(nn.Linear, 6, 12),
        LayerSpec(nn.Dropout, 0.5),
        LayerSpec(nn.Linear, 12, 12),
        LayerSpec(nn.Linear, 12, 3),
    ]
    data = [tuple(one) for one in zip(*numbers(torch.Generator().manual_seed(3)), strict=True)] * 11
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}},
    }
    settings = {"size": 4, "steps": 2, "config": config, "training_data": data, "model": {"schedule": "GPipe"}}
    one = engine_of(layers, nn.MSELoss(), **settings)
    torch.manual_seed(7 + dist.get_rank())
    for _ in range(3):
        one.train_batch()
    one.save_checkpoint(folder / "checkpoint", client_state={"note": "here"})
    losses = [float(one.train_batch()) for _ in range(3)]
    torch.manual_seed(99)
    other = engine_of(layers, nn.MSELoss(), **settings)
    _, client = other.load_checkpoint(folder / "checkpoint")
    again = [float(other.train_batch()) for _ in range(3)]
    same = all(
        bool(torch.equal(tensor, other.module.state_dict()[name])) for name, tensor in one.module.state_dict().items()
    )
    # The same model in one stage more for each rank.
    cut = engine_of(layers, nn.MSELoss(), **{**settings, "model": {"schedule": "Interleaved1F1B"}})
    cut.load_checkpoint(folder / "checkpoint", tag="global_step3")
    return {
        "losses": losses, "again": again, "same": same, "client": client, "steps": other.global_steps,
        "lr": [one.get_lr(), other.get_lr()], "recut": cut.global_steps, "recut_loss": float(cut.train_batch()),
    }  # fmt: skip


def refusals(_):
    """Bad input is an error on every rank, and the engine goes on after it."""
    found = {}

    def refused(name, work):
        try:
            work()
        except (PipelineError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "accepted"

    engine = engine_of(MLP, nn.MSELoss())
    data = batches(4, numbers)
    plain = float(engine.train_batch(iter(data)))
    refused("ends early", lambda: engine.train_batch(iter(data[:3])))
    found["ends early is a StopIteration"] = issubclass(DataEndedError, StopIteration)
    # One rank alone has too little.
    short = iter(data[:1]) if dist.get_rank() == 1 else iter(data)
    refused("ends early on rank 1", lambda: engine.train_batch(short))
    refused("uneven", lambda: engine.train_batch(iter([*data[:3], (torch.randn(3, 6), torch.randn(3, 3))])))
    refused("does not divide", lambda: engine.set_train_batch_size(18))
    refused("fewer than stages", lambda: engine.set_train_batch_size(4))
    refused("no pair", lambda: engine.train_batch(iter([{"x": 1}] * 4)))
    refused("no data", lambda: engine_of(MLP, nn.MSELoss()).train_batch())
    refused("reduce", lambda: engine.eval_batch(iter(data), reduce_output="sum"))
    refused("no layer", lambda: PipelineModule([nn.Linear(2, 2)], num_stages=2))
    refused("no multiple", lambda: PipelineModule(MLP, num_stages=3))
    refused("1F1B at start", lambda: engine_of(MLP, nn.MSELoss(), steps=1))
    refused("zero key", lambda: engine_of(MLP, nn.MSELoss(), config={"zero_optimization": {"stage": 1}}))
    refused("unknown key", lambda: engine_of(MLP, nn.MSELoss(), config={"gradient_acumulation": 2}))
    refused("sizes", lambda: engine_of(MLP, nn.MSELoss(), config={"train_batch_size": 30}))
    refused("plain module", lambda: initialize(model=nn.Linear(1, 1), config={}))
    refused("zb checkpointing", lambda: engine_of(
        MLP, nn.MSELoss(), model={"schedule": "ZBV", "activation_checkpoint_interval": 1}))  # fmt: skip
    refused("no config", lambda: initialize(model=PipelineModule(MLP, num_stages=2)))
    refused("mpu", lambda: initialize(model=PipelineModule(MLP, num_stages=2), config={}, mpu=object()))
    refused("topology", lambda: PipelineModule(MLP, topology=object()))
    for name in ("forward", "backward", "step", "__call__"):
        refused(name, lambda name=name: getattr(engine, name)(torch.ones(1)))
    again = float(engine.train_batch(iter(data)))
    found["goes on"] = again < plain
    # Another shape of micro-batches is no error: it is seen, and shapes are exchanged again.
    longer = [(torch.cat([x, x]), torch.cat([y, y])) for x, y in data]
    engine.train_batch(iter(longer))
    found["warm"] = [batch.warm_up for batch in engine.recorder.batches]
    outputs = engine.eval_batch(iter(data), compute_loss=False, reduce_output=None)
    found["outputs"] = None if outputs is None else [list(one.shape) for one in outputs]
    return found


def in_place(_):
    """A stage that begins with an in-place layer, and the same model with a layer that copies."""
    found = {}
    for name, layer in (("in place", nn.ReLU(inplace=True)), ("copy", nn.ReLU())):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Linear(6, 6), layer, nn.Linear(6, 3)]
        engine = engine_of(layers, nn.MSELoss())
        found[name] = [float(engine.train_batch(iter(batches(4, numbers, step)))) for step in range(3)]
    return found


def evaluating(folder):
    """An engine without an optimizer loads a trained model, evaluates and saves it."""
    trained = engine_of(MLP, nn.MSELoss(), config={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    trained.train_batch(iter(batches(4, numbers)))
    trained.save_checkpoint(folder / "trained")
    config = folder / f"config-{dist.get_rank()}.json"  # both write it, and the other may be reading
    config.write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}')
    module = PipelineModule(MLP, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine = initialize(argparse.Namespace(deepspeed_config=str(config)), module, timeout_s=300)[0]
    engine.load_checkpoint(folder / "trained")
    losses = [float(one.eval_batch(iter(batches(4, numbers)))) for one in (trained, engine)]
    return {"losses": losses, "saved": engine.save_checkpoint(folder / "again").exists()}


def faulty(_):
    """Timing that fails in several ways, and an untimed batch."""
    stage_of = lambda: PipelineStage(layer(), dist.get_rank(), 2, torch.device("cpu"))  # noqa: E731

    def layer():
        torch.manual_seed(5)
        return nn.Linear(4, 4)

    def train(schedule):
        losses = []
        given = {"target": torch.zeros(8, 4), "losses": losses} if dist.get_rank() == 1 else {}
        schedule.step(*([torch.ones(8, 4)] if dist.get_rank() == 0 else []), **given)
        stage = schedule._stage
        return [float(one) for one in losses] + [float(one.grad.sum()) for one in stage.submod.parameters()]

    def fail(*_):
        raise OSError("gone")

    found = {"plain": train(Schedule1F1B(stage_of(), 4, loss_fn=nn.MSELoss()))}
    for name in ("record", "now_ns", "run"):
        timer = Timer()
        schedule = Schedule1F1B(stage_of(), 4, loss_fn=nn.MSELoss())
        broken = type("Broken", (), {"__getattr__": lambda _, name, timer=timer: getattr(timer, name)})()
        if name == "run":
            broken.run = type("Log", (), {"declare": fail})()
        else:
            setattr(broken, name, fail)
        with instrument_schedule(schedule, broken) as times:
            values = train(schedule)
        found[name] = {"values": values, "faults": times.faults, "left": times.recorder._noted}
    return found


def own_schedule(folder):
    """A custom schedule, timed and restored."""
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    before = (dict(stage.__dict__), dict(schedule.__dict__), schedules._batch_p2p, schedules._wait_batch_p2p)
    run = folder / "run"
    timer = CPUGPUTimer(run=str(run))
    with instrument_schedule(schedule, timer) as times:
        for _ in range(3):
            losses = []
            given = {"target": torch.zeros(8, 4), "losses": losses} if rank == 1 else {}
            schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), **given)
        bubble = times.bubble(deadline_s=300)
    timer.run.flush()
    after = (schedules._batch_p2p, schedules._wait_batch_p2p)
    left = [name for name in stage.__dict__ if name not in before[0]]
    left += [name for name in schedule.__dict__ if name not in before[1]]
    kinds = sorted({action.kind.value for batch in times.batches for action in batch.actions})
    region = timer.get_time(f"stage {rank} forward")
    return {
        "left": left, "module": [after[0] is before[2], after[1] is before[3]], "kinds": kinds,
        "forwards": len(region), "bubble": bubble.bubble, "batches": bubble.batches, "faults": times.faults,
        "warm": [batch.warm_up for batch in times.batches], "run": str(run),
    }  # fmt: skip


def digits(_):
    """A small transformer on real images of digits: its loss falls."""
    # The file alone, as importing scikit-learn takes a second.
    path = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
    numbers = torch.tensor(np.loadtxt(path, delimiter=","), dtype=torch.float32)
    images, labels = numbers[:, :-1].reshape(-1, 8, 8) / 16, numbers[:, -1].long()

    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 32)
            self.place = nn.Parameter(torch.randn(8, 32) * 0.1)

        def forward(self, rows):
            return self.linear(rows) + self.place

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 10)

        def forward(self, value):
            return self.linear(value.mean(1))

    block = LayerSpec(nn.TransformerEncoderLayer, 32, 4, 64, dropout=0.0, batch_first=True)
    data = list(zip(images[:1536], labels[:1536], strict=True))
    engine = engine_of(
        [LayerSpec(Embed), block, block, LayerSpec(Head)], nn.CrossEntropyLoss(), size=16, steps=4,
        config={"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}, training_data=data,
    )  # fmt: skip
    losses = [float(engine.train_batch()) for _ in range(36)]
    return {
        "first": losses[0], "last": sum(losses[-4:]) / 4, "rate": engine.samples_per_second(),
        "named": engine.timers("train_batch").count(), "fwd": engine.timers("fwd").mean(), "memory": engine.memory(),
    }  # fmt: skip


def main():
    """All checks, one after the other."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {}
    checks = (
        tied, variants, measured, resumed, refusals, in_place, evaluating, faulty, own_schedule,
        digits,
    )  # fmt: skip
    for check in checks:
        found[check.__name__] = check(folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
