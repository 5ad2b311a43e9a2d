"""Which collectives a training run spends its time in, how much of it is overlapped, which rank is late, and why.

Two processes train the digits of scikit-learn with DistributedDataParallel; rank 1 has slower data. Run it with::

    torchrun --nproc-per-node 2 examples/ddp_comm.py

and afterwards ``deep500-timing stragglers runs/ddp`` or ``deep500-timing report runs/ddp``.
"""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits

import deep500_timing_torch as timer
from deep500_timing.ranks import find_stragglers
from deep500_timing.runs import Run
from deep500_timing_torch import comm as dist  # in the place of `import torch.distributed as dist`

SLOW_DATA_S = 0.02


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tmr = timer.CPUGPUTimer(keep_last=1000, run="runs/ddp")
    dist.configure(timer=tmr)  # the training thread's time in communication becomes COMM

    digits = load_digits()
    images = torch.tensor(digits.data[rank::world_size], dtype=torch.float32) / 16
    labels = torch.tensor(digits.target[rank::world_size])
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    )
    dist.instrument_ddp(model)  # DDP sends its buckets from C++, where nothing else sees them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    correct = torch.zeros(1)
    for step in range(64):
        with tmr.region(timer.TimeType.BATCH):
            with tmr.region(timer.TimeType.IO):
                if rank == 1:
                    time.sleep(SLOW_DATA_S)
                batch = slice(step % 20 * 32, (step % 20 + 1) * 32)
            output = model(images[batch])
            loss = torch.nn.functional.cross_entropy(output, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # An operation of our own that overlaps with the bookkeeping after it.
            correct[0] = (output.argmax(1) == labels[batch]).sum()
            handle = dist.all_reduce(correct, async_op=True)
            time.sleep(0.002)
            handle.wait()

    found = dist.log_summary(show_straggler=True)  # on every rank; rank 0 prints
    if rank == 0:
        late = "nobody" if found.late_rank is None else f"rank {found.late_rank}"
        print(f"\nLoss {loss.item():.3f}. The ranks waited for {late}.\n")
        tmr.print_all_time_stats()

    tmr.run.close()
    dist.barrier()
    if rank == 0:
        with Run.open("runs/ddp") as run:
            print(find_stragglers(run))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
