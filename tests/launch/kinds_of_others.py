"""Kinds of training programs with frameworks of others, small and for the CPU; ``kinds.py`` has the plain loops.

``python kinds_of_others.py NAME FILE`` runs one. The model, its backward pass, the optimizer and the data sleep for
milliseconds, by a stopwatch that knows nothing of the timer. FILE gets its times.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from kinds import FOLDER, data, mlp, watch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 20
"""So many steps has each program, but for those that say another number."""


def asleep(name, seconds):
    with watch(name):
        time.sleep(seconds)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, slope):
        asleep("BACKWARD", 0.020)
        return slope


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(16, 32, 4)

    def forward(self, x, labels=None):
        trains = torch.is_grad_enabled()
        asleep("FORWARD" if trains else "VALIDATION", 0.016)
        out = self.net(SlowBackward.apply(x.requires_grad_()) if trains else x)
        loss = None if labels is None else nn.functional.cross_entropy(out.float(), labels)
        return {"loss": loss, "logits": out}


class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        asleep("optimizer", 0.024)
        super().step()
        return loss


class Rows(Dataset):
    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, at):
        if at % 8 == 0:
            asleep("IO", 0.012)
        return {"x": torch.randn(16), "labels": torch.tensor(at % 4)}


def parts():
    net = Net()
    return net, Sgd(net.parameters(), 0.01), DataLoader(Rows(), 8)


def loop(net, optimizer, loader, backward=torch.Tensor.backward):
    for batch in loader:
        optimizer.zero_grad()
        backward(net(**batch)["loss"])
        optimizer.step()


# --- trainers --------------------------------------------------------------------------------------------------------


def hugging_face(**more):
    from transformers import Trainer, TrainingArguments

    net, optimizer, _ = parts()
    settings = TrainingArguments(
        str(FOLDER / "trained"), num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        remove_unused_columns=False, per_device_train_batch_size=8, max_grad_norm=0, **more,
    )  # fmt: skip
    given = {} if "deepspeed" in more else {"optimizers": (optimizer, None)}
    Trainer(net, settings, train_dataset=Rows(), eval_dataset=[Rows()[1] for _ in range(8)], **given).train()


def hugging_face_evaluates():
    hugging_face(eval_strategy="epoch")


def hugging_face_deepspeed():
    from deepspeed.comm import torch as of_deepspeed

    of_deepspeed.build_shm_op = lambda: None
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    zero = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    hugging_face(bf16=True, deepspeed={"train_batch_size": 8, "optimizer": optimizer, **zero})


def deepspeed(stage=0, of=1):
    import deepspeed
    from deepspeed.comm import torch as of_deepspeed

    of_deepspeed.build_shm_op = lambda: None
    net = Net()
    every = list(net.parameters())
    own = Sgd([{"params": every[at::of]} for at in range(of)], 0.01)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=own,
        config={"train_batch_size": 8, "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0},
                "zero_allow_untested_optimizer": True},
    )  # fmt: skip
    for batch in DataLoader(Rows(), 8):
        batch["x"] = batch["x"].to(next(engine.parameters()).dtype)
        engine.backward(engine(**batch)["loss"])
        engine.step()


def deepspeed_groups():
    deepspeed(1, 2)


def deepspeed_zero2():
    deepspeed(2, 2)


def deepspeed_zero3():
    deepspeed(3, 2)


def accelerated(**more):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **more)
    net, optimizer, loader = accelerator.prepare(*parts())
    loop(net, optimizer, loader, accelerator.backward)
    net.eval()
    with torch.no_grad():
        for at, batch in enumerate(loader):
            if at < 4:
                net(**batch)


def accelerated_deepspeed():
    from accelerate import Accelerator, DeepSpeedPlugin
    from deepspeed.comm import torch as of_deepspeed

    of_deepspeed.build_shm_op = lambda: None
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    net, optimizer, loader = accelerator.prepare(*parts())
    for batch in loader:
        batch["x"] = batch["x"].bfloat16()
        accelerator.backward(net(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def lightning():
    from lightning.pytorch import LightningModule, Trainer

    net, optimizer, loader = parts()

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, _):
            self.net(**batch)

        def configure_optimizers(self):
            return optimizer

    Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=FOLDER,
    ).fit(Module(), loader, DataLoader([Rows()[1] for _ in range(8)], 8))  # fmt: skip


def fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    net, optimizer, loader = parts()
    net, optimizer = fabric.setup(net, optimizer)
    loop(net, optimizer, fabric.setup_dataloaders(loader), fabric.backward)


def keras_on_torch():
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy as np

    class Slow(keras.layers.Layer):
        def call(self, x):
            if x.device.type != "meta":  # on which Keras looks at the shapes
                asleep("FORWARD", 0.016)
            return x

    model = keras.Sequential([keras.Input((16,)), Slow(), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((8 * STEPS, 16)), np.zeros((8 * STEPS, 4)), batch_size=8, epochs=1, verbose=0)


# --- launchers and several processes ---------------------------------------------------------------------------------


def ranks():
    torch.distributed.init_process_group("gloo")
    net, optimizer, loader = parts()
    loop(nn.parallel.DistributedDataParallel(net), optimizer, loader)
    torch.distributed.destroy_process_group()


def one_process():
    loop(*parts())


def launcher():
    """Starts its rank with a copy of the environment, as LLaMA-Factory, Ray and a sweep's agent do."""
    import subprocess

    subprocess.run([sys.executable, __file__, "one_process", sys.argv[2]], env=os.environ.copy(), check=True)


def ray_actor():
    import ray

    arguments = list(sys.argv)
    ray.init(num_cpus=1, include_dashboard=False, logging_level="error")

    @ray.remote
    class Actor:
        def train(self):
            sys.argv = arguments  # `kinds.py` reads it
            import kinds_of_others

            kinds_of_others.one_process()
            return kinds_of_others.watch.times

    watch.times.update(ray.get(Actor.remote().train.remote()))
    ray.shutdown()


def sweep():
    for _ in range(3):
        loop(*parts())


# --- loops in the shape of others' -----------------------------------------------------------------------------------


def pipeline_engine():
    """A stand-in for Megatron's schedules, which start the backward pass themselves."""
    engine = torch.autograd.Variable._execution_engine

    def backward(loss):
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)

    loop(*parts(), backward)


def generator():
    """A stand-in for torchtitan's and Grain's data: an iterator that is not PyTorch's."""
    net, optimizer, loader = parts()
    loop(net, optimizer, (torch.utils.data.default_collate([loader.dataset[at]] * 8) for at in range(0, 160, 8)))


class Endless:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class Infinite(DataLoader):
    """As ultralytics' loader, whose iterator never ends."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def infinite():
    net, optimizer, _ = parts()
    loader = Infinite(Rows(), 8)
    for _ in range(2):
        loop(net, optimizer, loader)


def hf_datasets():
    """``datasets`` iterated directly."""
    from datasets import Dataset as Arrow

    rows = Arrow.from_dict({"x": torch.randn(160, 16).tolist(), "labels": [0] * 160}).with_format("torch")
    net, optimizer, _ = parts()
    loop(net, optimizer, rows.iter(8))


def averaged():
    """As timm: a validation of the model and of its average, without ``eval`` of a wrapper."""
    net, optimizer, loader = parts()
    average = torch.optim.swa_utils.AveragedModel(net)
    for _ in range(2):
        net.train()
        loop(net, optimizer, loader)
        average.update_parameters(net)
        for model in (net, average.module):
            model.eval()
            with torch.no_grad():
                for batch in DataLoader(torch.utils.data.Subset(Rows(), range(32)), 8):
                    model(**batch)


def compiled_step():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    @torch.compile(backend="eager")
    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    for x, y in watch.over(data(STEPS)):
        step(x, y)


def functional():
    from torch.func import functional_call, grad

    net = mlp()
    weights = {name: one.detach() for name, one in net.named_parameters()}
    of_loss = grad(lambda weights, x, y: nn.functional.cross_entropy(functional_call(net, weights, (x,)), y))
    for _ in range(2):
        for x, y in watch.over(data(STEPS)):
            slopes = of_loss(weights, x, y)
            weights = {name: one - 0.01 * slopes[name] for name, one in weights.items()}
        for x, _ in watch.over(data(5)):
            with torch.no_grad():
                functional_call(net, weights, (x,))


def policy():
    """A policy that writes token by token before each update."""
    net, optimizer, _ = parts()
    for _ in range(STEPS):
        net.eval()
        with torch.no_grad(), watch("generate"):
            for _ in range(10):
                net.net(torch.randn(4, 16))
        net.train()
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(8, 16), torch.zeros(8, dtype=torch.long))["loss"].backward()
            optimizer.step()


def two_threads():
    """A thread that calls the model while another trains, as a live evaluation does."""
    import threading

    net, optimizer, loader = parts()
    over = threading.Event()

    def serve():
        other = mlp(16, 32, 4)
        while not over.is_set():
            with torch.no_grad():
                other(torch.randn(4, 16))
            time.sleep(0.001)

    thread = threading.Thread(target=serve)
    thread.start()
    loop(net, optimizer, loader)
    over.set()
    thread.join()


def by_hand():
    """Weights without a module, updated by hand, cleared at the next step."""
    net, _, loader = parts()
    for batch in loader:
        net.zero_grad()
        net(**batch)["loss"].backward()
        for one in net.parameters():
            one.data.sub_(0.01 * one.grad)


def evolution():
    """An evolution strategy: no gradients at all."""
    net, _, loader = parts()
    with torch.no_grad():
        for _ in range(60):
            for batch in loader:
                net.net(batch["x"])
                break


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    sys.modules["mlflow"] = None  # which DeepSpeed would import
    if "deepspeed" in sys.argv[1]:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_PORT=str(29000 + os.getpid() % 900))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
    if os.environ.get("RANK", "0") == "0" and watch.times:
        Path(sys.argv[2]).write_text(json.dumps(watch.times))
