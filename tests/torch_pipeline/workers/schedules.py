"""Every schedule on so many ranks, against the model that is not cut: losses, parameters, evaluation."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from deep500_timing import Timer
from deep500_timing_deepspeed.pipe import LayerSpec, PipelineModule, initialize
from deep500_timing_torch.pipeline import Kind, order_of

warnings.filterwarnings("ignore")
SIZE, HIDDEN = 4, 16


def specs():
    """Eight layers, so that four ranks have two stages each; one has running statistics, one no parameters."""
    layers = [LayerSpec(nn.Linear, 6, HIDDEN, bias=False), LayerSpec(nn.BatchNorm1d, HIDDEN)]
    for _ in range(5):
        layers += [LayerSpec(nn.Linear, HIDDEN, HIDDEN), torch.tanh]
    return [*layers, LayerSpec(nn.Linear, HIDDEN, 3)]


def data(count, seed, replica=0):
    """Micro-batches of a replica."""
    generator = torch.Generator().manual_seed(seed * 10 + replica)
    return [
        (torch.randn(SIZE, 6, generator=generator), torch.randint(0, 3, (SIZE,), generator=generator))
        for _ in range(count)
    ]


class Reference:
    """The whole model on one rank."""

    def __init__(self, replicas, clip=0.0):
        layers = []
        for number, spec in enumerate(specs()):
            torch.manual_seed(1234 + number)
            layers.append(spec.build() if isinstance(spec, LayerSpec) else Call(spec))
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.replicas, self.clip = replicas, clip
        # Replicas keep separate running statistics, as everywhere without SyncBatchNorm.
        self.statistics = [{name: one.clone() for name, one in self.model.named_buffers()} for _ in range(replicas)]
        self.loss_fn = nn.CrossEntropyLoss()

    @contextmanager
    def as_replica(self, replica):
        """Be the model with a replica's running statistics."""
        buffers = dict(self.model.named_buffers())
        for name, one in buffers.items():
            one.copy_(self.statistics[replica][name])
        yield
        self.statistics[replica] = {name: one.clone() for name, one in buffers.items()}

    def train(self, batches, order):
        """A batch: a list of micro-batches for each replica; ``order`` is in which gradients are summed.

        A sum of floats depends on the order, and Adam makes steps of full size of gradients that are rounding alone.
        """
        self.model.train()
        sums = []
        total = 0.0
        for replica, microbatches in enumerate(batches):
            with self.as_replica(replica):
                losses = [self.loss_fn(self.model(inputs), labels) for inputs, labels in microbatches]
            for number in order:
                losses[number].backward()
            sums.append([one.grad for one in self.model.parameters()])
            self.optimizer.zero_grad()
            total += sum(float(loss) for loss in losses) / len(microbatches) / self.replicas
        for parameter, *gradients in zip(self.model.parameters(), *sums, strict=True):
            parameter.grad = sum(one / len(batches[0]) for one in gradients) / self.replicas
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def evaluate(self, batches):
        """The loss and the outputs."""
        self.model.eval()
        losses, logits = [], []
        with torch.no_grad():
            for replica, microbatches in enumerate(batches):
                with self.as_replica(replica):
                    losses += [self.loss_fn(self.model(x), y) for x, y in microbatches]
                    logits.append(torch.cat([self.model(x) for x, _ in microbatches]))
        return float(torch.stack(losses).mean()), logits


class Call(nn.Module):
    """A function as a module, for the names of parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, value):
        """Its value."""
        return self.function(value)


def backward_order(module, microbatches):
    """In which order the first stage sees the micro-batches' backward passes."""
    order = order_of(module.schedule, module.num_stages, microbatches, module.stages_per_rank)
    kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return [slot.microbatch for slots in order.values() for slot in slots if slot.stage == 0 and slot.kind in kinds]


def check(schedule, ranks, replicas, sizes):
    """Train batches of these numbers of micro-batches and say how far off the reference everything is."""
    timer = Timer()
    module = PipelineModule(
        specs(), num_stages=ranks, loss_fn=nn.CrossEntropyLoss(), seed_layers=True, schedule=schedule,
        partition_method="uniform",
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": sizes[0],
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    }
    engine, _, _, _ = initialize(model=module, config=config, timer=timer, timeout_s=300)
    reference = Reference(replicas, clip=0.5)
    wrong = {"loss": 0.0, "parameters": 0.0, "eval": 0.0, "logits": 0.0}
    for step, size in enumerate([*sizes, sizes[-1]]):
        engine.set_train_batch_size(SIZE * size * replicas)
        batches = [data(size, step, replica) for replica in range(replicas)]
        loss = engine.train_batch(iter(batches[module.replica]))
        expected = reference.train(batches, backward_order(module, size))
        wrong["loss"] = max(wrong["loss"], abs(float(loss) - expected))
        if step == 1:
            held = [data(size, 100 + step, replica) for replica in range(replicas)]
            found, logits = engine.eval_batch(iter(held[module.replica]), return_logits=True)
            expected, expected_logits = reference.evaluate(held)
            wrong["eval"] = abs(float(found) - expected)
            if engine.is_last_stage():
                wrong["logits"] = float((logits - expected_logits[module.replica]).abs().max())
    expected = {**reference.model.state_dict(), **reference.statistics[module.replica]}
    own = module.state_dict()
    for name, tensor in own.items():
        wrong["parameters"] = max(wrong["parameters"], float((tensor.double() - expected[name].double()).abs().max()))
    bubble = engine.bubble(deadline_s=300)
    regions = sorted(one.name for one in timer.snapshot().regions)
    warm = [batch.warm_up for batch in engine.recorder.batches]
    engine.close()
    return {
        "wrong": wrong,
        "names": len(own),
        "bubble": bubble.bubble,
        "ideal": None if bubble.ideal is None else float(bubble.ideal),
        "causes": bubble.warm_up + bubble.drain + bubble.imbalance + bubble.messages,
        "text": str(bubble),
        "regions": regions,
        "warm": warm,
        "faults": engine.recorder.faults,
    }


def main():
    """Every schedule that is named."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in names:
        name, _, pipeline = name.partition(":")
        ranks = int(pipeline or world)
        found[name if not pipeline else f"{name} {ranks}x{world // ranks}"] = check(
            name, ranks, world // ranks, [2 * ranks, 3 * ranks, 2 * ranks]
        )
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
