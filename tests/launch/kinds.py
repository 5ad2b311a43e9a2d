"""Kinds of training programs, each a plain loop after the structure of public repositories, small and for the CPU.

``python kinds.py NAME FILE`` runs one. ``watch`` is a stopwatch that knows nothing of the timer; its times go to FILE.
The standard output has the program's result.
"""

import contextlib
import copy
import json
import math
import random
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

FOLDER = Path(sys.argv[2]).parent


class Watch:
    """Keeps the times of blocks by name."""

    def __init__(self):
        self.times = {}

    @contextlib.contextmanager
    def __call__(self, name):
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.times.setdefault(name, []).append(time.perf_counter() - begun)

    def over(self, iterable, name="IO"):
        """The items of an iterable, each wait timed."""
        iterator = iter(iterable)
        while True:
            begun = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self.times.setdefault(name, []).append(time.perf_counter() - begun)
            yield item


watch = Watch()


def mlp(inside=64, hidden=256, out=10):
    return nn.Sequential(
        nn.Linear(inside, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out)
    )


def data(n=40, batch=64, inside=64, **more):
    return DataLoader(
        TensorDataset(torch.randn(n * batch, inside), torch.randint(10, (n * batch,))), batch_size=batch, **more
    )


def forward(net, *x, **more):
    with watch("FORWARD"):
        return net(*x, **more)


def backward(loss, **more):
    with watch("BACKWARD"):
        loss.backward(**more)


def step(optimizer, *more):
    with watch("optimizer"):
        optimizer.step(*more)


def classifier():
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    for _ in range(2):
        for x, y in watch.over(data(shuffle=True)):
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(net, x), y)
            backward(loss)
            step(optimizer)
            schedule.step()
    return net


def workers():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in watch.over(data(num_workers=2, multiprocessing_context="fork")):
        backward(F.cross_entropy(forward(net, x), y))
        step(optimizer)
        optimizer.zero_grad()
    return net


def gan():
    generator, critic = mlp(16, 128, 64), mlp(64, 128, 1)
    of_g, of_d = torch.optim.Adam(generator.parameters(), 2e-4), torch.optim.Adam(critic.parameters(), 2e-4)
    one, zero = torch.ones(64, 1), torch.zeros(64, 1)
    for x, _ in watch.over(data()):
        of_d.zero_grad()
        fake = forward(generator, torch.randn(64, 16))
        loss = F.binary_cross_entropy_with_logits(forward(critic, x), one)
        loss = loss + F.binary_cross_entropy_with_logits(forward(critic, fake.detach()), zero)
        backward(loss)
        step(of_d)
        of_g.zero_grad()
        backward(F.binary_cross_entropy_with_logits(forward(critic, fake), one))
        step(of_g)
    return nn.ModuleList([generator, critic])


def wgan_gp():
    generator, critic = mlp(16, 128, 64), mlp(64, 128, 1)
    of_g, of_d = torch.optim.Adam(generator.parameters(), 2e-4), torch.optim.Adam(critic.parameters(), 2e-4)
    for n, (x, _) in enumerate(watch.over(data(60))):
        of_d.zero_grad()
        fake = forward(generator, torch.randn(64, 16)).detach()
        mixed = (x + torch.rand(64, 1) * (fake - x)).requires_grad_()
        out = forward(critic, mixed)
        with watch("autograd.grad"):
            (slope,) = torch.autograd.grad(out.sum(), mixed, create_graph=True)
        loss = forward(critic, fake).mean() - forward(critic, x).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
        backward(loss)
        step(of_d)
        if n % 5 == 4:
            of_g.zero_grad()
            backward(-forward(critic, forward(generator, torch.randn(64, 16))).mean())
            step(of_g)
    return nn.ModuleList([generator, critic])


def dqn():
    """A replay buffer, a target network, an environment; no data loader."""
    net, target = mlp(8, 128, 4), mlp(8, 128, 4)
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters())
    buffer, state = [], torch.randn(8)
    for n in range(150):
        with torch.no_grad():
            action = int(net(state[None]).argmax())
        following = torch.tanh(state + 0.1 * action + 0.1 * torch.randn(8))
        buffer.append((state, action, float(following.sum()), following))
        state = following
        if len(buffer) < 32:
            continue
        s, a, r, f = zip(*random.sample(buffer, 32), strict=True)
        with torch.no_grad():
            goal = torch.tensor(r) + 0.99 * target(torch.stack(f)).max(1).values
        q = forward(net, torch.stack(s)).gather(1, torch.tensor(a)[:, None])[:, 0]
        optimizer.zero_grad()
        backward(F.smooth_l1_loss(q, goal))
        nn.utils.clip_grad_value_(net.parameters(), 100)
        step(optimizer)
        if n % 20 == 0:
            target.load_state_dict(net.state_dict())
    return net


def ppo():
    """Rollouts without gradients, then several epochs over them."""
    actor, critic = mlp(8, 64, 4), mlp(8, 64, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 3e-4)
    for _ in range(4):
        states = torch.randn(128, 8)
        with torch.no_grad():
            pi = torch.distributions.Categorical(logits=actor(states))
            actions = pi.sample()
            before, value = pi.log_prob(actions), critic(states)[:, 0]
        gain = torch.randn(128) - value
        for _ in range(4):
            for at in torch.randperm(128).split(32):
                now = torch.distributions.Categorical(logits=forward(actor, states[at]))
                ratio = (now.log_prob(actions[at]) - before[at]).exp()
                loss = -torch.min(ratio * gain[at], ratio.clamp(0.8, 1.2) * gain[at]).mean()
                loss = loss + F.mse_loss(forward(critic, states[at])[:, 0], gain[at]) - 0.01 * now.entropy().mean()
                optimizer.zero_grad()
                backward(loss)
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                step(optimizer)
    return nn.ModuleList([actor, critic])


def amp():
    """Automatic mixed precision with a scaler, accumulation over four micro-batches, clipping."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for n, (x, y) in enumerate(watch.over(data(80))):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(forward(net, x), y) / 4
        backward(scaler.scale(loss))
        if n % 4 == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            with watch("optimizer"):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(base.in_features, rank) * 0.01)
        self.b = nn.Parameter(torch.zeros(rank, base.out_features))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def lora():
    net = mlp()
    for name, part in list(net.named_children()):
        if isinstance(part, nn.Linear):
            net[int(name)] = Lora(part)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    for x, y in watch.over(data()):
        loss = F.cross_entropy(forward(net, x), y)
        optimizer.zero_grad(set_to_none=True)
        backward(loss)
        step(optimizer)
    return net


def lbfgs():
    net = mlp(64, 64)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    for x, y in watch.over(data(15)):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(net, x), y)
            backward(loss)
            return loss

        step(optimizer, closure)
    return net


class Shards(IterableDataset):
    def __iter__(self):
        for shard in range(8):
            made = torch.Generator().manual_seed(shard)
            for _ in range(320):
                yield torch.randn(64, generator=made), int(torch.randint(10, (), generator=made))


def iterable():
    """Samples from shards, as webdataset has them; no length."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in watch.over(DataLoader(Shards(), batch_size=64)):
        optimizer.zero_grad()
        backward(F.cross_entropy(forward(net, x), y))
        step(optimizer)
    return net


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=96, width=64, blocks=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt():
    """Batches cut out of one array, accumulation, evaluation every N steps, a checkpoint after it; no data loader."""
    text = torch.randint(96, (20_000,))

    def get_batch():
        at = torch.randint(len(text) - 33, (8,))
        return torch.stack([text[i : i + 32] for i in at]), torch.stack([text[i + 1 : i + 33] for i in at])

    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    x, y = get_batch()
    for n in range(24):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1, (n + 1) / 10)
        if n and n % 8 == 0:
            with watch("VALIDATION"):
                model.eval()
                with torch.no_grad():
                    for _ in range(4):
                        model(*get_batch())
                model.train()
            with watch("CHECKPOINT"):
                torch.save({"model": model.state_dict(), "n": n}, FOLDER / "ckpt.pt")
        for _ in range(2):
            _, loss = forward(model, x, y)
            x, y = get_batch()
            backward(loss / 2)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    return model


class Diffusion(nn.Module):
    """The loss is a method, so the program never calls this module itself."""

    def __init__(self):
        super().__init__()
        self.net = mlp(65, 256, 64)
        self.register_buffer("alpha", torch.linspace(0.99, 0.01, 100))

    def loss(self, x):
        t = torch.randint(100, (len(x),))
        a, noise = self.alpha[t][:, None], torch.randn_like(x)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(forward(self.net, torch.cat([noisy, t[:, None] / 100], 1)), noise)


def diffusion():
    """A model with an average of its weights, updated after each step."""
    model = Diffusion()
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    for x, _ in watch.over(data()):
        loss = model.loss(x)
        optimizer.zero_grad()
        backward(loss)
        step(optimizer)
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.01)
    return nn.ModuleList([model, average])


class Boxes(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        made = torch.Generator().manual_seed(i)
        size = 16 + 4 * (i % 5)
        return torch.randn(3, size, size, generator=made), torch.rand(1 + i % 4, 4, generator=made)


def detection():
    """Images of several sizes, a list of targets, a dict of losses."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU())
            self.head = nn.Linear(32, 4)

        def forward(self, images, targets):
            found = torch.stack([self.head(self.body(one[None]).mean((2, 3)))[0] for one in images])
            goal = torch.stack([boxes.mean(0) for boxes in targets])
            return {"box": F.smooth_l1_loss(found, goal), "size": found.square().mean() * 1e-3}

    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    for images, targets in watch.over(DataLoader(Boxes(), 2, collate_fn=lambda items: tuple(zip(*items, strict=True)))):
        losses = forward(model, images, targets)
        optimizer.zero_grad()
        backward(sum(losses.values()))
        step(optimizer)
    return model


def evaluates_every_n():
    """An evaluation within the epoch, with its own data loader."""
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    held_out = data(10)
    for n, (x, y) in enumerate(watch.over(data(60))):
        net.train()
        backward(F.cross_entropy(forward(net, x), y))
        step(optimizer)
        optimizer.zero_grad()
        if n % 20 == 19:
            with watch("VALIDATION"):
                net.eval()
                with torch.no_grad():
                    right = sum(int((net(x).argmax(1) == y).sum()) for x, y in watch.over(held_out))
                net.train()
    print(right)
    return net


def saves_in_background():
    """Checkpoints are written by a thread."""
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    writers = []
    for n, (x, y) in enumerate(watch.over(data(60))):
        optimizer.zero_grad()
        backward(F.cross_entropy(forward(net, x), y))
        step(optimizer)
        if n % 20 == 19:
            state = {key: value.clone() for key, value in net.state_dict().items()}
            writers.append(threading.Thread(target=torch.save, args=(state, FOLDER / f"{n}.pt")))
            writers[-1].start()
    for writer in writers:
        writer.join()
    return net


def saves_asynchronously():
    """Distributed checkpoints, written while the loop goes on."""
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    written = None
    for n, (x, y) in enumerate(watch.over(data(60))):
        optimizer.zero_grad()
        backward(F.cross_entropy(forward(net, x), y))
        step(optimizer)
        if n % 20 == 19:
            if written is not None:
                written.result()
            with watch("CHECKPOINT"):
                written = dcp.async_save({"model": net.state_dict()}, checkpoint_id=FOLDER / f"{n}", no_dist=True)
    written.result()
    return net


def fsdp2():
    """Two ranks, each with a shard of each layer."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    net = mlp()
    for part in net:
        if isinstance(part, nn.Linear):
            fully_shard(part)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    torch.manual_seed(dist.get_rank())
    for x, y in watch.over(data()):
        optimizer.zero_grad()
        backward(F.cross_entropy(forward(net, x), y))
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step(optimizer)
    return net


def own_optimizer():
    """The update is written out; there is no optimizer."""
    net = mlp()
    for x, y in watch.over(data()):
        backward(F.cross_entropy(forward(net, x), y))
        with watch("optimizer"), torch.no_grad():
            for p in net.parameters():
                p -= 0.05 * p.grad
                p.grad = None
    return net


def steps_in_backward():
    """Each parameter's optimizer steps as soon as its gradient is there."""
    net = mlp()
    of = {p: torch.optim.SGD([p], 0.05) for p in net.parameters()}

    def update(p):
        of[p].step()
        of[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    for x, y in watch.over(data()):
        backward(F.cross_entropy(forward(net, x), y))
    return net


def distillation():
    """A teacher that does not train, in evaluation mode throughout."""
    teacher, student = mlp(64, 512).eval(), mlp(64, 128)
    optimizer = torch.optim.Adam(student.parameters())
    for x, y in watch.over(data()):
        with torch.no_grad():
            goal = teacher(x)
        out = forward(student, x)
        loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), goal.softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        backward(loss)
        step(optimizer)
    return student


def frozen_norms():
    """Fine-tuning in evaluation mode, with gradients."""
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    net.eval()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x, y in watch.over(data()):
        optimizer.zero_grad()
        backward(F.cross_entropy(forward(net, x), y))
        step(optimizer)
    return net


def checkpointed():
    """Activation checkpointing: the backward pass calls parts of the model again."""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.blocks = nn.Linear(64, 128), nn.ModuleList([mlp(128, 256, 128) for _ in range(3)])
            self.out = nn.Linear(128, 10)

        def forward(self, x):
            x = self.inside(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in watch.over(data()):
        optimizer.zero_grad()
        backward(F.cross_entropy(forward(net, x), y))
        step(optimizer)
    return net


def triplets():
    """One model called three times for a loss, batches from a sampler."""
    net = mlp(64, 256, 32)
    optimizer = torch.optim.Adam(net.parameters())
    loader = data(30, batch=48)
    for x, _ in watch.over(loader):
        a, p, n = x.chunk(3)
        loss = F.triplet_margin_loss(forward(net, a), forward(net, p), forward(net, n))
        optimizer.zero_grad()
        backward(loss)
        step(optimizer)
    return net


def two_loaders():
    """Labelled and unlabelled data side by side, the shorter one begun again."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    labelled, unlabelled = data(12), data(30)
    again = iter(labelled)
    for u, _ in watch.over(unlabelled):
        with watch("IO"):
            try:
                x, y = next(again)
            except StopIteration:
                again = iter(labelled)
                x, y = next(again)
        guess = forward(net, u).softmax(1)
        loss = F.cross_entropy(forward(net, x), y) + (guess * guess.log()).sum(1).mean() * 0.1
        optimizer.zero_grad()
        backward(loss)
        step(optimizer)
    return net


def rnn():
    """Truncated backpropagation through time, state carried from step to step."""
    net, head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 16)
    optimizer = torch.optim.RMSprop([*net.parameters(), *head.parameters()], 1e-3)
    text, state = torch.randn(16, 640, 16), None
    for at in range(0, 600, 20):
        x, y = text[:, at : at + 20], text[:, at + 1 : at + 21]
        out, state = forward(net, x, state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        backward(F.mse_loss(forward(head, out), y))
        nn.utils.clip_grad_norm_(net.parameters(), 1)
        step(optimizer)
    return net


def maml():
    """An inner step by autograd.grad, an outer one by an optimizer."""
    net = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(40):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(3):
            x, y = torch.randn(32, 16), torch.randn(32, 4)
            with watch("autograd.grad"):
                slopes = torch.autograd.grad(F.mse_loss(F.linear(x, net.weight, net.bias), y), [*net.parameters()])
            weight, bias = (p - 0.1 * g for p, g in zip(net.parameters(), slopes, strict=True))
            total = total + F.mse_loss(F.linear(x, weight, bias), y)
        backward(total)
        step(optimizer)
    return net


KINDS = [
    classifier, workers, gan, wgan_gp, dqn, ppo, amp, lora, lbfgs, iterable, nanogpt, diffusion, detection,
    evaluates_every_n, saves_in_background, saves_asynchronously, fsdp2, own_optimizer, steps_in_backward, distillation,
    frozen_norms, checkpointed, triplets, two_loaders, rnn, maml,
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    trained = next(kind for kind in KINDS if kind.__name__ == sys.argv[1])()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.parameters()]
    total = math.fsum(p.double().sum().item() for p in whole)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print(f"weights {total!r}, random {torch.rand(1).item()!r} {random.random()!r}")
    Path(sys.argv[2]).write_text(json.dumps(watch.times))
